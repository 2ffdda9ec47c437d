// The micro-kernel for AVX-512 with VNNI: vpdpwssd multiplies 32 pairs' elements and adds them in one instruction. It
// wraps like vpmaddwd plus vpaddd, so the same bounds make it exact.
#include <immintrin.h>

#include <cstring>

#include "gemm.hpp"
#include "levels.hpp"

namespace {

constexpr int ROWS = 12, LANES = 16;  // 24 sums and 2 registers of B; A is broadcast from memory

}  // namespace

#include "gemm_vector.hpp"

namespace {

inline Ints add_pairs(Ints sums, Ints a, Ints b) {
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
}

inline Ints add_bytes(Ints sums, Ints a, Ints b) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
}

template <int half>
inline HalfDoubles widened(Ints lanes) {
  return _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64((__m512i)lanes, half));
}

inline HalfDoubles multiply_add(HalfDoubles a, HalfDoubles b, HalfDoubles c) { return _mm512_fmadd_pd(a, b, c); }

inline Floats narrowed(HalfDoubles lower, HalfDoubles upper) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(lower)), _mm512_cvtpd_ps(upper), 1);
}

__attribute__((noinline, noclone)) void approximate(int64_t groups, const int32_t* __restrict a,
                                                    const int32_t* __restrict b, int32_t* __restrict sums) {
  Ints c[ROWS][2];
  clear(c);
  add_depth<add_bytes>(c, groups, a, b);
  store_tile(sums, c);
}

}  // namespace

#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_avx512() {
  static constexpr Micro micro = make_micro("avx512");
  return best_level() >= kAvx512 ? &micro : nullptr;
}

}  // namespace lowp
