// Loops of the byte products that the compiler vectorizes, compiled once for each instruction set.
#pragma once
#include "bits.hpp"
#include "bytes.hpp"

namespace lowp {
namespace {

constexpr int kTopBits = 18;          // bits of the largest number of a group below the leading one
constexpr int kLeastExponent = -100;  // exponent of a group: its scale and the scale's inverse are normal numbers

// Round to the nearest integer, ties to even, for numbers below 2^22.
inline float rounded(float x) {
  constexpr float kMiddle = 0x1.8p23f;
  return (x + kMiddle) - kMiddle;
}

inline float power_of_two(int exponent) {
  return bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// The bits of the largest magnitude of count numbers: bits of non-negative floats are ordered like the numbers.
inline uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

bool numbers(const float* x, int64_t count, int64_t group, int32_t* numbers, float* scales) {
  for (int64_t begin = 0; begin < count; begin += group) {
    const int64_t size = group < count - begin ? group : count - begin;
    const uint32_t largest = largest_bits(x + begin, size);
    if (largest >= 0x7f800000) return false;
    const int exponent = static_cast<int>(largest >> 23) - 127;
    const int shift = kTopBits - (exponent < kLeastExponent ? kLeastExponent : exponent);
    const float by = power_of_two(shift);
    for (int64_t i = 0; i < size; i++) numbers[begin + i] = static_cast<int32_t>(rounded(x[begin + i] * by));
    *scales++ = power_of_two(-shift);
  }
  return true;
}

// Round to the nearest integer, ties to even, for numbers below 2^51.
inline double rounded(double x) {
  constexpr double kMiddle = 0x1.8p52;
  return (x + kMiddle) - kMiddle;
}

// `codes` of ByteKernels: Sum::add<bits, planes, tables> for the bits of a code, the number of planes of digits, and of tables.
template <class Sum>
void dispatch_codes(const Digits& row, const CodePanel& panel, float* out) {
  if (panel.bits == 4)
    (panel.tables == 2 ? Sum::template add<4, 3, 2> : Sum::template add<4, 3, 1>)(row, panel, out);
  else if (panel.bits == 2)
    (row.planes == 1 ? Sum::template add<2, 1, 1> : Sum::template add<2, 2, 1>)(row, panel, out);
  else
    (row.planes == 1 ? Sum::template add<1, 1, 1> : Sum::template add<1, 2, 1>)(row, panel, out);
}

int64_t differing(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t i = 0; i < words; i++) count += __builtin_popcountll(a[i] ^ b[i]);
  return count;
}

}  // namespace
}  // namespace lowp
