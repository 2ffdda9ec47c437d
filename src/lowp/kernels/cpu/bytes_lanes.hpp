// What the byte products do in loops that the compiler makes vectors of, compiled once for each instruction set.
#pragma once
#include <cstring>

#include "bytes.hpp"

namespace lowp {
namespace {

constexpr int kTopBits = 18;          // of the largest number of a group, below the leading one
constexpr int kLeastExponent = -100;  // of a group: its scale and the scale's inverse are normal numbers

// To the nearest whole number, even in the middle, of numbers below 2^22.
inline float rounded(float x) {
  constexpr float kMiddle = 0x1.8p23f;
  return (x + kMiddle) - kMiddle;
}

inline float power_of_two(int exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

bool numbers(const float* x, int64_t count, int64_t group, int32_t* numbers, float* scales) {
  for (int64_t begin = 0; begin < count; begin += group) {
    const int64_t size = group < count - begin ? group : count - begin;
    uint32_t largest = 0;
    for (int64_t i = 0; i < size; i++) {
      uint32_t bits;
      std::memcpy(&bits, x + begin + i, 4);
      bits &= 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7f800000) return false;
    const int exponent = static_cast<int>(largest >> 23) - 127;
    const int shift = kTopBits - (exponent < kLeastExponent ? kLeastExponent : exponent);
    const float by = power_of_two(shift);
    for (int64_t i = 0; i < size; i++) numbers[begin + i] = static_cast<int32_t>(rounded(x[begin + i] * by));
    *scales++ = power_of_two(-shift);
  }
  return true;
}

// To the nearest whole number, even in the middle, of numbers below 2^51.
inline double rounded(double x) {
  constexpr double kMiddle = 0x1.8p52;
  return (x + kMiddle) - kMiddle;
}

bool row(const float* x, int64_t count, int32_t zero, uint8_t* out, float* scale) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= 0x7f800000) return false;
  float most;
  std::memcpy(&most, &largest, 4);
  const float found = static_cast<float>(static_cast<double>(most) / 127);
  *scale = largest == 0 ? 1 : found < 0x1p-126f ? 0x1p-126f : found;
  const double by = *scale;  // in fp64: a quotient in fp32 might be rounded to the middle of two numbers
  for (int64_t i = 0; i < count; i++) out[i] = static_cast<uint8_t>(static_cast<int32_t>(rounded(x[i] / by)) + zero);
  return true;
}

int64_t differing(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t i = 0; i < words; i++) count += __builtin_popcountll(a[i] ^ b[i]);
  return count;
}

}  // namespace
}  // namespace lowp
