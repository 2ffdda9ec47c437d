// serve LIBRARY: calls the functions of a library for another process, whose requests arrive at descriptor 0.
//
// A pointer means memory of that process. Nothing is there at first: the access faults, and the handler brings a copy
// of the page. What the call has changed in its copies is sent back, and the copies are dropped.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "call.hpp"

// The library's, too: the C library's clears blocks by an instruction at whose fault QEMU 7.2 resumes at the wrong place.
extern "C" __attribute__((visibility("default"))) void* memset(void* to, int value, size_t size) {
  for (volatile char* at = static_cast<volatile char*>(to); size > 0; --size) *at++ = static_cast<char>(value);
  return to;
}

namespace {

constexpr uint64_t kPage = 4096, kChunk = 1 << 16;
constexpr int kMost = 1 << 16;

struct Copy {
  uint64_t address;
  uint64_t size;
  char* before;
};

Copy copies[kMost];
int copied = 0;
int memory = -1;  // of the other process
std::atomic_flag busy = ATOMIC_FLAG_INIT;

// Makes a copy of the other process's memory appear at its address at once, as other threads may look at it.
bool bring(uint64_t address, uint64_t size) {
  void* const parts = mmap(nullptr, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (parts == MAP_FAILED || copied == kMost) return false;
  char* const before = static_cast<char*>(parts);
  char* const now = before + size;
  if (pread(memory, before, size, static_cast<off_t>(address)) != static_cast<ssize_t>(size)) {
    munmap(parts, 2 * size);
    return false;
  }
  memcpy(now, before, size);
  copies[copied++] = {address, size, before};
  return mremap(now, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, reinterpret_cast<void*>(address)) != MAP_FAILED;
}

void on_fault(int signal, siginfo_t* told, void*) {
  const uint64_t at = reinterpret_cast<uint64_t>(told->si_addr), chunk = at & ~(kChunk - 1);
  while (busy.test_and_set(std::memory_order_acquire)) {
  }
  bool there = false, chunk_begun = false;
  for (int i = 0; i < copied; i++) {
    there |= at - copies[i].address < copies[i].size;
    chunk_begun |= copies[i].address - chunk < kChunk;
  }
  there = there || (!chunk_begun && bring(chunk, kChunk)) || bring(at & ~(kPage - 1), kPage);
  busy.clear(std::memory_order_release);
  if (!there) {
    fprintf(stderr, "serve: no memory at %p\n", told->si_addr);
    ::signal(signal, SIG_DFL);
  }
}

template <class T>
struct Caller;

template <class R, class... A>
struct Caller<R(A...)> {
  static void call(void* function, const uint64_t* words, Reply& reply) {
    call(reinterpret_cast<R (*)(A...)>(function), words, reply, std::index_sequence_for<A...>());
  }

  template <size_t... I>
  static void call(R (*function)(A...), [[maybe_unused]] const uint64_t* words, Reply& reply,
                   std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
      function(from_word<A>(words[I])...);
    } else {
      const R result = function(from_word<A>(words[I])...);
      if constexpr (std::is_same_v<R, const char*>) {
        strncpy(reply.text, result, sizeof reply.text - 1);
      } else {
        reply.result = to_word(result);
      }
    }
  }
};

struct Function {
  const char* name;
  void (*call)(void*, const uint64_t*, Reply&);
};

const Function kFunctions[] = {
#define CALL(name, result, parameters, arguments) {#name, &Caller<result parameters>::call},
#include "calls.inc"
#undef CALL
};

// The bytes of each copy that the call has changed; runs closer than a word to each other are one.
std::string changes(int64_t& runs) {
  std::string bytes;
  for (int i = 0; i < copied; i++) {
    const Copy& copy = copies[i];
    const char* const now = reinterpret_cast<const char*>(copy.address);
    if (memcmp(now, copy.before, copy.size) == 0) continue;
    for (uint64_t at = 0; at < copy.size; at++) {
      if (now[at] == copy.before[at]) continue;
      uint64_t end = at + 1;
      for (uint64_t next = end; next < copy.size && next - end < sizeof(uint64_t); next++)
        if (now[next] != copy.before[next]) end = next + 1;
      const Run run{copy.address + at, end - at};
      bytes.append(reinterpret_cast<const char*>(&run), sizeof run).append(now + at, run.size);
      ++runs;
      at = end;
    }
  }
  return bytes;
}

bool answer(Reply& reply) {
  const std::string bytes = changes(reply.runs);
  for (int i = 0; i < copied; i++) {
    munmap(reinterpret_cast<void*>(copies[i].address), copies[i].size);
    munmap(copies[i].before, copies[i].size);
  }
  copied = 0;
  return send(1, &reply, sizeof reply) && send(1, bytes.data(), bytes.size());
}

}  // namespace

int main(int, char** given) {
  void* const library = dlopen(given[1], RTLD_NOW);
  if (library == nullptr) return fprintf(stderr, "serve: %s\n", dlerror()), 1;
  struct sigaction action {};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  for (Request request; receive(0, &request, sizeof request);) {
    if (memory < 0) {
      char path[64];
      snprintf(path, sizeof path, "/proc/%lld/mem", static_cast<long long>(request.process));
      memory = open(path, O_RDONLY | O_CLOEXEC);
      if (memory < 0) return perror(path), 1;
    }
    const Function& one = kFunctions[request.function];
    void* const function = dlsym(library, one.name);
    if (function == nullptr) return fprintf(stderr, "serve: no %s\n", one.name), 1;
    Reply reply{};
    one.call(function, request.arguments, reply);
    if (!answer(reply)) return 1;
  }
  return 0;
}
