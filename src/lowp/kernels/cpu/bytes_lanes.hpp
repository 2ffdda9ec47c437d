// What the byte products do in eight lanes, compiled once for each instruction set: a vector of GCC and Clang is eight
// numbers on every processor, so that the order of every sum is the same. No fused multiply-add: it would round once.
#pragma once
#include "bytes.hpp"

namespace lowp {
namespace {

typedef float Floats __attribute__((vector_size(32), aligned(4)));
typedef int32_t Words __attribute__((vector_size(32), aligned(1), may_alias));

constexpr int64_t kLanes = 8;

// Eight sums in lanes for every row of codes, then theirs; `Table` gives the values of the eight nibbles at a place of
// every word.
template <class Table, int steps>
void sum_nibbles(const uint8_t* const* codes, const Table& table, const float* const* scales, int64_t blocks,
                 const float* x, float* out) {
  Floats total[kQuad] = {};
  for (int64_t block = 0; block < blocks; block++, x += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < kQuad; j++) {
      const uint8_t* from = codes[j] + 32 * block;
      __builtin_prefetch(from + 32 * kQuad * blocks);  // the next rows': four short streams are more than is foreseen
      const Words words = *reinterpret_cast<const Words*>(from);
      const float* scale = scales[j] + 8 / steps * block;
#pragma GCC unroll 8
      for (int first = 0; first < 8; first += steps, scale++) {
        Floats sum = {};
#pragma GCC unroll 8
        for (int s = first; s < first + steps; s++) {
          Floats values;
          table.values(words, s, values);
          sum = sum + values * *reinterpret_cast<const Floats*>(x + kLanes * s);
        }
        total[j] = total[j] + sum * *scale;
      }
    }
  }
  for (int j = 0; j < kQuad; j++) {
    const Floats& t = total[j];
    out[j] = ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
  }
}

// Codes in two's complement.
struct Complement {
  void values(const Words& words, int place, Floats& found) const {
    found = __builtin_convertvector((words << (28 - 4 * place)) >> 28, Floats);
  }
};

template <class Table>
void sum_groups(const uint8_t* const* codes, const Table& table, const float* const* scales, int64_t blocks,
                int64_t group, const float* x, float* out) {
  const auto run = group == 16 ? sum_nibbles<Table, 2> : group == 32 ? sum_nibbles<Table, 4> : sum_nibbles<Table, 8>;
  run(codes, table, scales, blocks, x, out);
}

int64_t differing(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t i = 0; i < words; i++) count += __builtin_popcountll(a[i] ^ b[i]);
  return count;
}

}  // namespace
}  // namespace lowp
