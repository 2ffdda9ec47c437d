// What the two ends of a forwarded call agree on; calls.inc has a row CALL(name, result, (parameters), (number, arguments)) for
// every function of the library, made from abi.py.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>

struct Request {
  int64_t process;  // whose memory the pointers are of
  int64_t function;
  uint64_t arguments[24];
};

// followed by `runs` times a Run and its bytes
struct Reply {
  uint64_t result;
  char text[256];  // of a function that returns a string
  int64_t runs;
};

struct Run {  // bytes that the call has changed
  uint64_t address;
  uint64_t size;
};

template <class T>
inline uint64_t to_word(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  return word;
}

template <class T>
inline T from_word(uint64_t word) {
  T value;
  memcpy(&value, &word, sizeof value);
  return value;
}

// Reads or writes all of it; false if the other end is gone.
template <class Step>
inline bool whole(Step step, int file, void* memory, size_t size) {
  for (char* at = static_cast<char*>(memory); size > 0;) {
    const ssize_t count = step(file, at, size);
    if (count <= 0) return false;
    at += count;
    size -= static_cast<size_t>(count);
  }
  return true;
}

inline bool receive(int file, void* memory, size_t size) { return whole(read, file, memory, size); }
inline bool send(int file, const void* memory, size_t size) { return whole(write, file, const_cast<void*>(memory), size); }
