// Masks with one bit per element, and gradients under masks. Included once per instruction set.
// Bit i % 8 of byte i / 8 belongs to element i. Elements that pass keep their bits, including NaN; others become +0.
#pragma once

#include "mantissas.hpp"

namespace lowp {
namespace LOWP_ISA {

// The bits of in[0 .. 8): set for nonzero elements, including NaN and subnormal numbers.
static inline uint8_t nonzero_byte(const float* in, int64_t count) {
  uint32_t byte = 0;
  for (int64_t i = 0; i < count; ++i) byte |= static_cast<uint32_t>((bits_of(in[i]) & 0x7fffffff) != 0) << i;
  return static_cast<uint8_t>(byte);
}

// `begin` is a multiple of 8 here and below
static void pack_nonzero(const float* in, uint8_t* bits, int64_t begin, int64_t end) {
  int64_t i = begin;
#if defined(__AVX512F__)
  for (; i + 16 <= end; i += 16) {
    const __mmask16 set = _mm512_test_epi32_mask(_mm512_loadu_si512(in + i), _mm512_set1_epi32(0x7fffffff));
    const uint16_t pair = static_cast<uint16_t>(set);
    std::memcpy(bits + i / 8, &pair, sizeof pair);
  }
#elif defined(__AVX2__)
  for (; i + 8 <= end; i += 8) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __m256i zero = _mm256_cmpeq_epi32(_mm256_slli_epi32(word, 1), _mm256_setzero_si256());
    bits[i / 8] = static_cast<uint8_t>(~_mm256_movemask_ps(_mm256_castsi256_ps(zero)));
  }
#endif
  for (; i < end; i += 8) bits[i / 8] = nonzero_byte(in + i, end - i < 8 ? end - i : 8);
}

static void pass_bits(const float* in, const uint8_t* bits, float* out, int64_t begin, int64_t end) {
  int64_t i = begin;
#if defined(__AVX512F__)
  for (; i + 16 <= end; i += 16) {
    uint16_t pair;
    std::memcpy(&pair, bits + i / 8, sizeof pair);
    _mm512_storeu_si512(out + i, _mm512_maskz_loadu_epi32(pair, in + i));
  }
#elif defined(__AVX2__)
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (; i + 8 <= end; i += 8) {
    const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), places), places);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_and_si256(word, set));
  }
#endif
  for (; i < end; ++i) {
    const bool passes = bits[i / 8] >> (i % 8) & 1;
    out[i] = passes ? in[i] : 0.0f;
  }
}

__attribute__((noinline)) static void pass_positive_block(const uint32_t* in, const int16_t* mantissas, uint32_t* out,
                                                          int64_t count) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] & -static_cast<uint32_t>(mantissas[i] > 0);
}

// Elements with a positive mantissa pass.
static void pass_positive(const float* in, const int16_t* mantissas, float* out, int64_t begin, int64_t end) {
  pass_positive_block(reinterpret_cast<const uint32_t*>(in) + begin, mantissas + begin,
                      reinterpret_cast<uint32_t*>(out) + begin, end - begin);
}

__attribute__((noinline)) static bool relu_block(const float* in, const int16_t* mantissas, float unit, int16_t* to,
                                                 float* values, int64_t count) {
  int32_t wrong = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    wrong |= static_cast<float>(mantissas[i]) * unit != in[i];
    const int32_t positive = mantissas[i] > 0 ? mantissas[i] : 0;
    to[i] = static_cast<int16_t>(positive);
    values[i] = static_cast<float>(positive) * unit;
  }
  return wrong == 0;
}

// ReLU of mantissas and of their values. False if they are not those of x; the output is then partly written.
static bool relu_int16(const float* in, const int16_t* mantissas, int exponent, int16_t* to, float* values,
                       int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const float unit = power_of_two<F32>(exponent);
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    if (!relu_block(in + first, mantissas + first, unit, to + first, values + first, count)) return false;
  }
  return true;
}

}  // namespace LOWP_ISA
}  // namespace lowp
