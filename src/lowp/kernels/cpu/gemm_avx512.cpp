// The micro-kernel for AVX-512 with VNNI: vpdpwssd multiplies 32 pairs' elements and adds them in one instruction. It
// wraps like vpmaddwd plus vpaddd, so the same bounds make it exact.
// GCC 12's own header for AVX-512 reads a variable that it leaves undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "gemm.hpp"

namespace {

constexpr int ROWS = 12, COLUMNS = 32;

typedef int32_t Lanes __attribute__((vector_size(64)));

inline __m512i shifted(__m512i sums) { return (__m512i)((Lanes)sums >> lowp::TOP_SHIFT); }

// All chains in 24 accumulators; 2 registers of B, A is broadcast from memory.
inline __attribute__((always_inline)) void sum_chains(__m512i c[ROWS][2], const int64_t* chains, int64_t count,
                                                      const int32_t* a, const int32_t* b, int32_t* tops) {
  __mmask16 kept = 0;  // the first chain finds no tops
  for (int64_t chain = 0; chain < count; chain++) {
    if (chain > 0) {
#pragma GCC unroll 12
      for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          int32_t* top = tops + i * COLUMNS + 16 * h;
          _mm512_store_si512(top, _mm512_add_epi32(_mm512_maskz_load_epi32(kept, top), shifted(c[i][h])));
          c[i][h] = _mm512_and_si512(c[i][h], _mm512_set1_epi32((1 << lowp::TOP_SHIFT) - 1));
        }
      }
      kept = 0xffff;
    }
    for (int64_t k = 0; k < chains[chain]; k++, a += ROWS, b += COLUMNS) {
      const __m512i left = _mm512_loadu_si512(b);
      const __m512i right = _mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
      for (int i = 0; i < ROWS; i++) {
        const __m512i pair = _mm512_set1_epi32(a[i]);
        c[i][0] = _mm512_dpwssd_epi32(c[i][0], pair, left);
        c[i][1] = _mm512_dpwssd_epi32(c[i][1], pair, right);
      }
    }
  }
}

__attribute__((noinline, noclone)) void multiply(const int64_t* chains, int64_t count, const int32_t* __restrict a,
                                                 const int32_t* __restrict b, int32_t* __restrict tops,
                                                 int32_t* __restrict sums) {
  __m512i c[ROWS][2];
  for (auto& row : c) row[0] = row[1] = _mm512_setzero_si512();
  sum_chains(c, chains, count, a, b, tops);
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++) {
    _mm512_store_si512(sums + i * COLUMNS, c[i][0]);
    _mm512_store_si512(sums + i * COLUMNS + 16, c[i][1]);
  }
}

// sums + 2^TOP_SHIFT * tops as fp32: exact in fp64, and rounded once
inline __m512 joined(__m512i sums, __m512i tops) {
  const __m512d shift = _mm512_set1_pd(1 << lowp::TOP_SHIFT);
  const __m512d low = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(tops)), shift,
                                      _mm512_cvtepi32_pd(_mm512_castsi512_si256(sums)));
  const __m512d high = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(tops, 1)), shift,
                                       _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(sums, 1)));
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

// What is not kept counts as 0.
inline void add_to(float* sums, __mmask16 kept, __m512 sum) {
  _mm512_store_ps(sums, _mm512_add_ps(_mm512_maskz_load_ps(kept, sums), sum));
}

__attribute__((noinline, noclone)) void multiply_block(const int64_t* chains, int64_t count,
                                                       const int32_t* __restrict a, const int32_t* __restrict b,
                                                       int32_t* __restrict tops, bool begin, float* __restrict sums) {
  __m512i c[ROWS][2];
  for (auto& row : c) row[0] = row[1] = _mm512_setzero_si512();
  sum_chains(c, chains, count, a, b, tops);
  const __mmask16 kept = begin ? 0 : 0xffff;
  if (count == 1) {
#pragma GCC unroll 24
    for (int v = 0; v < 2 * ROWS; v++)
      add_to(sums + 16 * v, kept, _mm512_cvtepi32_ps(c[v / 2][v % 2]));
  } else {
#pragma GCC unroll 24
    for (int v = 0; v < 2 * ROWS; v++)
      add_to(sums + 16 * v, kept, joined(c[v / 2][v % 2], _mm512_load_si512(tops + 16 * v)));
  }
}

__attribute__((noinline, noclone)) void approximate(int64_t groups, const int32_t* __restrict a,
                                                    const int32_t* __restrict b, int32_t* __restrict sums) {
  __m512i c[ROWS][2];
  for (auto& row : c) row[0] = row[1] = _mm512_setzero_si512();
  for (int64_t k = 0; k < groups; k++, a += ROWS, b += COLUMNS) {
    const __m512i left = _mm512_loadu_si512(b);
    const __m512i right = _mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
      const __m512i digits = _mm512_set1_epi32(a[i]);
      c[i][0] = _mm512_dpbusd_epi32(c[i][0], digits, left);
      c[i][1] = _mm512_dpbusd_epi32(c[i][1], digits, right);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < ROWS; i++) {
    _mm512_storeu_si512(sums + i * COLUMNS, c[i][0]);
    _mm512_storeu_si512(sums + i * COLUMNS + 16, c[i][1]);
  }
}

}  // namespace

#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_avx512() {
  static constexpr Micro micro = make_micro("avx512");
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni");
  return supported ? &micro : nullptr;
}

}  // namespace lowp
