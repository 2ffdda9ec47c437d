// Rows of fp32 times a matrix in 16 bits: a dot product for each number of the result, in fp64 and in a fixed order, so that
// every instruction set gives the same bits; a product of fp32 and 16-bit numbers is exact in fp64. Included once per
// instruction set; provides `Rows`.
#pragma once

#include <cstdint>
#include <cstring>

namespace lowp {

constexpr int64_t kRowSums = 16;   // partial sums, each of every 16th product; added by halves
constexpr int64_t kRowBlock = 512;  // weights that are widened at a time, for several rows
constexpr int64_t kColumns = 2;     // columns of the result that are computed together for one row
constexpr int64_t kAhead = 1024;    // distance of prefetches in weights: a matrix is streamed
constexpr int64_t kMostRows = 8;

// sums[columns][rows] of the products of weights[columns][k], fp16 or bf16, with x[rows][stride], which is zero from k to
// a multiple of 16; at most kColumns and kMostRows. `sums` has room for 16 times as many.
using Rows = void (*)(const uint16_t* weights, bool is_fp16, int64_t columns, int64_t k, const double* x, int64_t stride,
                      int64_t rows, double* sums);

extern const Rows kPortableRows, kAvx2Rows, kAvx512Rows;

}  // namespace lowp

#if defined(LOWP_ISA)
#include "carrier.hpp"

namespace lowp {
namespace LOWP_ISA {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 8;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 4;
#else
constexpr int64_t kLanes = 2;
#endif
constexpr int64_t kParts = kRowSums / kLanes;  // vectors for 16 numbers

using Sums = double __attribute__((vector_size(8 * kLanes)));
// unaligned; Clang ignores the alignment in `using Loose = double __attribute__(...)`
typedef double Loose __attribute__((vector_size(8 * kLanes), aligned(8), may_alias));
static_assert(alignof(Loose) == 8, "rows may begin at any number");

// A vector of weights in fp64: every conversion is exact. By address, since no ABI defines the return of vectors.
template <bool is_fp16>
static inline void widen_weights(const uint16_t* weights, Sums* out) {
#if defined(__AVX512F__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights));
  const __m256 wide =
      is_fp16 ? _mm256_cvtph_ps(halves) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  *out = _mm512_cvtps_pd(wide);
#elif defined(__AVX2__)
  const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(weights));
  const __m128 wide = is_fp16 ? _mm_cvtph_ps(halves) : _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
  *out = _mm256_cvtps_pd(wide);
#else
  for (int64_t t = 0; t < kLanes; t++) {
    const uint32_t bits = is_fp16 ? fp32_from_fp16(weights[t]) : static_cast<uint32_t>(weights[t]) << 16;
    (*out)[t] = static_cast<double>(bit_cast<float>(bits));
  }
#endif
}

// Adds the products of 16 weights of each of several columns, `apart` from one another, with 16 numbers of a row.
template <bool is_fp16, int64_t columns>
static inline void add_sixteen(const uint16_t* weights, int64_t apart, const double* row, Sums (&total)[columns][kParts]) {
#pragma GCC unroll 8
  for (int64_t p = 0; p < kParts; p++)
#pragma GCC unroll 8
    for (int64_t c = 0; c < columns; c++) {
      Sums wide;
      widen_weights<is_fp16>(weights + c * apart + p * kLanes, &wide);
      total[c][p] += wide * *reinterpret_cast<const Loose*>(row + p * kLanes);
    }
}

// One row times several columns: numbers of the row are read once for all of them, in as many memory streams.
template <bool is_fp16, int64_t columns>
static void multiply_row(const uint16_t* weights, int64_t k, const double* row, double* sums) {
  Sums total[columns][kParts] = {};
  const int64_t even = k / kRowSums * kRowSums;
  for (int64_t i = 0; i < even; i += kRowSums) {
    for (int64_t c = 0; c < columns; c++) __builtin_prefetch(weights + c * k + i + kAhead);
    add_sixteen<is_fp16>(weights + i, k, row + i, total);
  }
  if (even < k) {
    uint16_t last[columns * kRowSums] = {};
    for (int64_t c = 0; c < columns; c++)
      std::memcpy(last + c * kRowSums, weights + c * k + even, sizeof(uint16_t) * static_cast<size_t>(k - even));
    add_sixteen<is_fp16>(last, kRowSums, row + even, total);
  }
  std::memcpy(sums, total, sizeof(total));
}

// Several rows times one column, whose weights are widened once.
template <bool is_fp16>
static void multiply_column(const uint16_t* weights, int64_t k, const double* x, int64_t stride, int64_t rows,
                            double* sums) {
  alignas(64) double wide[kRowBlock];
  std::memset(sums, 0, sizeof(double) * static_cast<size_t>(rows * kRowSums));
  for (int64_t begin = 0; begin < k; begin += kRowBlock) {
    const int64_t count = k - begin < kRowBlock ? k - begin : kRowBlock;
    for (int64_t t = 0; t < count; t += kLanes) {
      uint16_t some[kLanes] = {};
      const bool whole = t + kLanes <= count;
      if (!whole) std::memcpy(some, weights + begin + t, sizeof(uint16_t) * static_cast<size_t>(count - t));
      if (t % 32 == 0) __builtin_prefetch(weights + begin + t + kAhead);
      widen_weights<is_fp16>(whole ? weights + begin + t : some, reinterpret_cast<Sums*>(wide + t));
    }
    const int64_t filled = (count + kLanes - 1) / kLanes * kLanes, vectors = (count + kRowSums - 1) / kRowSums;
    std::memset(wide + filled, 0, sizeof(double) * static_cast<size_t>(vectors * kRowSums - filled));
    for (int64_t i = 0; i < rows; i++) {
      Sums total[kParts];
      double* const some = sums + i * kRowSums;
      const double* const row = x + i * stride + begin;
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; p++) total[p] = *reinterpret_cast<const Loose*>(some + p * kLanes);
      for (int64_t t = 0; t < vectors * kRowSums; t += kRowSums)
#pragma GCC unroll 8
        for (int64_t p = 0; p < kParts; p++)
          total[p] += *reinterpret_cast<const Loose*>(wide + t + p * kLanes) *
                      *reinterpret_cast<const Loose*>(row + t + p * kLanes);
#pragma GCC unroll 8
      for (int64_t p = 0; p < kParts; p++) *reinterpret_cast<Loose*>(some + p * kLanes) = total[p];
    }
  }
}

template <bool is_fp16>
static void multiply_in(const uint16_t* weights, int64_t columns, int64_t k, const double* x, int64_t stride, int64_t rows,
                        double* sums) {
  if (rows == 1 && columns == kColumns)
    multiply_row<is_fp16, kColumns>(weights, k, x, sums);
  else if (rows == 1)
    for (int64_t c = 0; c < columns; c++) multiply_row<is_fp16, 1>(weights + c * k, k, x, sums + c * kRowSums);
  else
    for (int64_t c = 0; c < columns; c++)
      multiply_column<is_fp16>(weights + c * k, k, x, stride, rows, sums + c * rows * kRowSums);
  for (int64_t i = 0; i < columns * rows; i++) {
    double* const some = sums + i * kRowSums;
    for (int64_t half = kRowSums / 2; half; half /= 2)
      for (int64_t t = 0; t < half; t++) some[t] += some[t + half];
    sums[i] = some[0];
  }
}

static void multiply_rows(const uint16_t* weights, bool is_fp16, int64_t columns, int64_t k, const double* x,
                          int64_t stride, int64_t rows, double* sums) {
  (is_fp16 ? multiply_in<true> : multiply_in<false>)(weights, columns, k, x, stride, rows, sums);
}

}  // namespace LOWP_ISA
}  // namespace lowp
#endif
