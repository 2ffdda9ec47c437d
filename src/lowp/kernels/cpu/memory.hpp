// Memory that begins at a multiple of a power of two. Windows frees such memory by a function of its own.
#pragma once

#include <cstdlib>
#include <new>

#if defined(_WIN32)
#include <malloc.h>
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

}  // namespace lowp
