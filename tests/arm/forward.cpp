// A library with lowp's functions that has each call done twice, by servers with the libraries of two processors, and
// compares what they return and every byte that they change. What the second has written is what the caller gets.
//
// places.inc has kServers, their two command lines with words separated by spaces, and kFolder, with a file `counts` of
// three int64 for every function: calls, bytes compared, calls that differed; a file `log` gets all messages.
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "call.hpp"
#include "places.inc"

extern char** environ;

namespace {

enum : int64_t {
#define CALL(name, result, parameters, arguments) k_##name,
#include "calls.inc"
#undef CALL
  kFunctions
};

const char* const kNames[] = {
#define CALL(name, result, parameters, arguments) #name,
#include "calls.inc"
#undef CALL
};

[[noreturn]] void fail(const char* what) {
  perror(what);
  abort();
}

int open_here(const char* name) {
  const int file = open((std::string(kFolder) + "/" + name).c_str(), O_RDWR | O_APPEND | O_CLOEXEC);
  if (file < 0) fail(name);
  return file;
}

int log_file() {
  static const int file = open_here("log");
  return file;
}

int start(const std::string& line) {
  std::vector<std::string> words;
  std::istringstream stream(line);
  for (std::string word; stream >> word;) words.push_back(word);
  std::vector<char*> given;
  for (std::string& word : words) given.push_back(word.data());
  given.push_back(nullptr);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("no socket");
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // the server reads our memory
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, log_file(), 2);
  pid_t child;
  if (posix_spawnp(&child, given[0], &actions, nullptr, given.data(), environ) != 0) fail("no server");
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  return ends[0];
}

struct Answer {
  Reply reply;
  std::map<uint64_t, std::string> runs;
};

struct Servers {
  std::mutex in_use;
  int files[2];

  Servers() {
    for (int i = 0; i < 2; i++) files[i] = start(kServers[i]);
  }

  void ask(int file, Answer& answer) {
    if (!receive(file, &answer.reply, sizeof answer.reply)) fail("a server has ended");
    for (int64_t i = 0; i < answer.reply.runs; i++) {
      Run run;
      if (!receive(file, &run, sizeof run)) fail("a server has ended");
      std::string bytes(run.size, '\0');
      if (!receive(file, bytes.data(), run.size)) fail("a server has ended");
      answer.runs.emplace(run.address, std::move(bytes));
    }
  }
};

std::atomic<Servers*> the_servers{nullptr};
std::mutex* beginning = new std::mutex;

// A child's memory is another: it needs servers of its own.
void forget() {
  the_servers.store(nullptr);
  beginning = new std::mutex;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &forget);

Servers& servers() {
  std::lock_guard<std::mutex> lock(*beginning);
  if (the_servers.load() == nullptr) the_servers.store(new Servers);
  return *the_servers.load();
}

std::atomic<int64_t>* counts() {
  static void* const place = [] {
    void* const found = mmap(nullptr, kFunctions * 24, PROT_READ | PROT_WRITE, MAP_SHARED, open_here("counts"), 0);
    if (found == MAP_FAILED) fail("counts");
    return found;
  }();
  return static_cast<std::atomic<int64_t>*>(place);
}

// Says in one line where two answers differ first.
void tell(const Request& request, const Answer& left, const Answer& right) {
  std::ostringstream words;
  words << kNames[request.function] << " differs: ";
  if (left.reply.result != right.reply.result) {
    words << "it returns " << left.reply.result << " and " << right.reply.result;
  } else {
    auto a = left.runs.begin(), b = right.runs.begin();
    while (a != left.runs.end() && b != right.runs.end() && *a == *b) ++a, ++b;
    words << left.runs.size() << " and " << right.runs.size() << " runs of changed bytes";
    const auto show = [&](const auto& run) {
      words << "; " << std::hex << run.first << " to " << run.first + run.second.size() << ":";
      for (size_t i = 0; i < run.second.size() && i < 16; i++) words << ' ' << (run.second[i] & 0xff);
    };
    if (a != left.runs.end()) show(*a);
    if (b != right.runs.end()) show(*b);
  }
  words << "; arguments" << std::hex;
  for (const uint64_t word : request.arguments) words << ' ' << word;
  words << '\n';
  send(log_file(), words.str().data(), words.str().size());
}

// The kernel that the first processor takes where the second is asked for one by name: its best for one that the second
// has, and none for one that it lacks.
const char* counterpart(const char* kernel) {
  if (kernel == nullptr || strcmp(kernel, "portable") == 0) return kernel;
  return strcmp(kernel, "neon") == 0 ? nullptr : "none";
}

Reply call(Request& request, bool names_kernel) {
  request.process = getpid();
  if (request.function == k_lowp_set_team) request.arguments[0] = 0;  // threads of ours are none of theirs
  Servers& both = servers();
  std::lock_guard<std::mutex> lock(both.in_use);
  Answer answers[2];
  Request first = request;
  if (names_kernel) first.arguments[0] = to_word(counterpart(from_word<const char*>(request.arguments[0])));
  if (!send(both.files[0], &first, sizeof first) || !send(both.files[1], &request, sizeof request))
    fail("a server has ended");
  for (int i = 0; i < 2; i++) both.ask(both.files[i], answers[i]);
  if (request.function == k_lowp_casts_select) answers[0].reply.result = answers[1].reply.result;  // each its own sets
  std::atomic<int64_t>* const count = counts() + 3 * request.function;
  count[0] += 1;
  for (const auto& [address, bytes] : answers[1].runs) count[1] += static_cast<int64_t>(bytes.size());
  if (answers[0].reply.result != answers[1].reply.result || answers[0].runs != answers[1].runs) {
    count[2] += 1;
    tell(request, answers[0], answers[1]);
  }
  for (const auto& [address, bytes] : answers[1].runs)
    memcpy(reinterpret_cast<void*>(address), bytes.data(), bytes.size());
  return answers[1].reply;
}

template <class R, class... A>
R forward(int64_t function, A... given) {
  Request request{0, function, {to_word(given)...}};
  constexpr bool names_kernel = std::is_same_v<std::tuple_element_t<0, std::tuple<A..., void>>, const char*>;
  const Reply reply = call(request, names_kernel);
  if constexpr (std::is_same_v<R, const char*>) {
    static char text[sizeof reply.text];
    return strcpy(text, reply.text);
  } else if constexpr (!std::is_void_v<R>) {
    return from_word<R>(reply.result);
  }
}

}  // namespace

#define CALL(name, result, parameters, arguments) \
  extern "C" result name parameters { return forward<result> arguments; }
#include "calls.inc"
#undef CALL
