// The micro-kernel for AVX2: vpmaddwd takes 16 products an instruction, twice as many as an fp32 multiply-add takes.
#include <immintrin.h>

#include "gemm.hpp"

namespace {

constexpr int ROWS = 6, COLUMNS = 16;

inline __m256i load(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

inline void store(int32_t* to, __m256i value) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), value); }

// All chains in 12 accumulators; with 2 registers of B, one broadcast pair of A and one product these are the 16
// registers there are.
inline __attribute__((always_inline)) void sum_chains(__m256i c[ROWS][2], const int64_t* chains, int64_t count,
                                                      const int32_t* a, const int32_t* b, int32_t* tops) {
  __m256i kept = _mm256_setzero_si256();  // the first chain finds no tops
  for (int64_t chain = 0; chain < count; chain++) {
    if (chain > 0) {
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          int32_t* top = tops + i * COLUMNS + 8 * h;
          const __m256i before = _mm256_and_si256(load(top), kept);
          store(top, _mm256_add_epi32(before, _mm256_srai_epi32(c[i][h], lowp::TOP_SHIFT)));
          c[i][h] = _mm256_and_si256(c[i][h], _mm256_set1_epi32((1 << lowp::TOP_SHIFT) - 1));
        }
      }
      kept = _mm256_set1_epi32(-1);
    }
    for (int64_t k = 0; k < chains[chain]; k++, a += ROWS, b += COLUMNS) {
      const __m256i left = load(b), right = load(b + 8);
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; i++) {
        const __m256i pair = _mm256_set1_epi32(a[i]);
        c[i][0] = _mm256_add_epi32(c[i][0], _mm256_madd_epi16(pair, left));
        c[i][1] = _mm256_add_epi32(c[i][1], _mm256_madd_epi16(pair, right));
      }
    }
  }
}

// Kept out of line, since beside other vector code the accumulators would be spilled.
__attribute__((noinline, noclone)) void multiply(const int64_t* chains, int64_t count, const int32_t* __restrict a,
                                                 const int32_t* __restrict b, int32_t* __restrict tops,
                                                 int32_t* __restrict sums) {
  __m256i c[ROWS][2];
  for (auto& row : c) row[0] = row[1] = _mm256_setzero_si256();
  sum_chains(c, chains, count, a, b, tops);
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) {
    store(sums + i * COLUMNS, c[i][0]);
    store(sums + i * COLUMNS + 8, c[i][1]);
  }
}

// sums + 2^TOP_SHIFT * tops as fp32: exact in fp64, and rounded once
inline __m256 joined(__m256i sums, __m256i tops) {
  const __m256d shift = _mm256_set1_pd(1 << lowp::TOP_SHIFT);
  const __m256d low = _mm256_fmadd_pd(_mm256_cvtepi32_pd(_mm256_castsi256_si128(tops)), shift,
                                      _mm256_cvtepi32_pd(_mm256_castsi256_si128(sums)));
  const __m256d high = _mm256_fmadd_pd(_mm256_cvtepi32_pd(_mm256_extracti128_si256(tops, 1)), shift,
                                       _mm256_cvtepi32_pd(_mm256_extracti128_si256(sums, 1)));
  return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
}

// What is not kept counts as 0.
inline void add_to(float* sums, __m256 kept, __m256 sum) {
  _mm256_store_ps(sums, _mm256_add_ps(_mm256_and_ps(_mm256_load_ps(sums), kept), sum));
}

__attribute__((noinline, noclone)) void multiply_block(const int64_t* chains, int64_t count,
                                                       const int32_t* __restrict a, const int32_t* __restrict b,
                                                       int32_t* __restrict tops, bool begin, float* __restrict sums) {
  __m256i c[ROWS][2];
  for (auto& row : c) row[0] = row[1] = _mm256_setzero_si256();
  sum_chains(c, chains, count, a, b, tops);
  const __m256 kept = _mm256_castsi256_ps(_mm256_set1_epi32(begin ? 0 : -1));
  if (count == 1) {
#pragma GCC unroll 12
    for (int v = 0; v < 2 * ROWS; v++)
      add_to(sums + 8 * v, kept, _mm256_cvtepi32_ps(c[v / 2][v % 2]));
  } else {
#pragma GCC unroll 12
    for (int v = 0; v < 2 * ROWS; v++)
      add_to(sums + 8 * v, kept, joined(c[v / 2][v % 2], load(tops + 8 * v)));
  }
}

// Three rows at a time: 6 accumulators, 4 registers of B, 2 of A, the ones and two products. Two products of 16 bits
// add up to at most 4 * 127 * 64.
__attribute__((noinline, noclone)) void approximate(int64_t groups, const int32_t* __restrict a,
                                                    const int32_t* __restrict b, int32_t* __restrict sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int first = 0; first < ROWS; first += 3, sums += 3 * COLUMNS) {
    const int32_t* rows = a + first;
    const int32_t* columns = b;
    __m256i c[3][2];
    for (auto& row : c) row[0] = row[1] = _mm256_setzero_si256();
    for (int64_t k = 0; k + 1 < groups; k += 2, rows += 2 * ROWS, columns += 2 * COLUMNS) {
      const __m256i b00 = load(columns), b01 = load(columns + 8), b10 = load(columns + 16), b11 = load(columns + 24);
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) {
        const __m256i a0 = _mm256_set1_epi32(rows[i]), a1 = _mm256_set1_epi32(rows[ROWS + i]);
        const __m256i left = _mm256_add_epi16(_mm256_maddubs_epi16(a0, b00), _mm256_maddubs_epi16(a1, b10));
        const __m256i right = _mm256_add_epi16(_mm256_maddubs_epi16(a0, b01), _mm256_maddubs_epi16(a1, b11));
        c[i][0] = _mm256_add_epi32(c[i][0], _mm256_madd_epi16(left, ones));
        c[i][1] = _mm256_add_epi32(c[i][1], _mm256_madd_epi16(right, ones));
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {
      if (groups % 2) {
        const __m256i a0 = _mm256_set1_epi32(rows[i]);
        c[i][0] = _mm256_add_epi32(c[i][0], _mm256_madd_epi16(_mm256_maddubs_epi16(a0, load(columns)), ones));
        c[i][1] = _mm256_add_epi32(c[i][1], _mm256_madd_epi16(_mm256_maddubs_epi16(a0, load(columns + 8)), ones));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * COLUMNS), c[i][0]);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * COLUMNS + 8), c[i][1]);
    }
  }
}

}  // namespace

#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_avx2() {
  static constexpr Micro micro = make_micro("avx2");
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &micro : nullptr;
}

}  // namespace lowp
