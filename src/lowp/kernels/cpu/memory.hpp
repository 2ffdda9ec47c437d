// Memory that begins at a multiple of a power of two, which Windows frees by a function of its own, and memory in large pages.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(_WIN32)
#include <malloc.h>
#elif defined(__linux__)
#include <sys/mman.h>
#endif

namespace lowp {

static inline void free_aligned(void* memory) {
#if defined(_WIN32)
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

// Throws std::bad_alloc. `alignment` is a power of two and at least the size of a pointer.
static inline void* allocate_aligned(size_t alignment, size_t bytes) {
  void* memory = nullptr;
#if defined(_WIN32)
  memory = _aligned_malloc(bytes, alignment);
#else
  if (posix_memalign(&memory, alignment, bytes) != 0) memory = nullptr;
#endif
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// A large result is often new memory, whose pages the system makes and clears where they are first written: of 2 MiB, where it
// does so on request, that takes a fraction of the time. Pages at the ends, which have other bytes, stay as they are.
static inline void expect_writes(void* out, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kOwnMapping = int64_t{32} << 20;  // from here on malloc of glibc always gives memory of its own
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  if (bytes < kOwnMapping) return;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(out) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(out) + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)out, (void)bytes;
#endif
}

}  // namespace lowp
