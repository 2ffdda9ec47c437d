// The micro-kernel for AVX2: vpmaddwd computes 16 products per instruction, twice as many as an fp32 multiply-add.
#include <immintrin.h>

#include <cstring>

#include "gemm.hpp"
#include "levels.hpp"

namespace {

// 12 sums; with 2 registers of B, one broadcast pair of A and one product they use all 16 registers.
constexpr int ROWS = 6, LANES = 8;

}  // namespace

#include "gemm_vector.hpp"

namespace {

inline Ints add_pairs(Ints sums, Ints a, Ints b) { return sums + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

template <int half>
inline HalfDoubles widened(Ints lanes) {
  return _mm256_cvtepi32_pd(_mm256_extracti128_si256((__m256i)lanes, half));
}

inline HalfDoubles multiply_add(HalfDoubles a, HalfDoubles b, HalfDoubles c) { return _mm256_fmadd_pd(a, b, c); }

inline Floats narrowed(HalfDoubles lower, HalfDoubles upper) {
  return _mm256_set_m128(_mm256_cvtpd_ps(upper), _mm256_cvtpd_ps(lower));
}

// The sums of products of four unsigned bytes of each lane of a with signed ones of b, two lanes of sums of 16 bits:
// each is at most 2 * 127 * 64, so that two of them can be added up.
inline __m256i byte_pairs(int32_t a, Ints b) { return _mm256_maddubs_epi16(_mm256_set1_epi32(a), (__m256i)b); }

inline Ints add_halves(Ints sums, __m256i words) { return sums + (Ints)_mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// Three rows at a time: 6 sums, 4 registers of B, 2 of A, the ones and two products.
__attribute__((noinline, noclone)) void approximate(int64_t groups, const int32_t* __restrict a,
                                                    const int32_t* __restrict b, int32_t* __restrict sums) {
  for (int first = 0; first < ROWS; first += 3, sums += 3 * COLUMNS) {
    const int32_t* rows = a + first;
    const int32_t* columns = b;
    Ints c[3][2] = {};
    for (int64_t k = 0; k + 1 < groups; k += 2, rows += 2 * ROWS, columns += 2 * COLUMNS) {
      const Ints b00 = load(columns), b01 = load(columns + 8), b10 = load(columns + 16), b11 = load(columns + 24);
#pragma GCC unroll 3
      for (int i = 0; i < 3; i++) {
        c[i][0] = add_halves(c[i][0], _mm256_add_epi16(byte_pairs(rows[i], b00), byte_pairs(rows[ROWS + i], b10)));
        c[i][1] = add_halves(c[i][1], _mm256_add_epi16(byte_pairs(rows[i], b01), byte_pairs(rows[ROWS + i], b11)));
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {
      if (groups % 2) {
        c[i][0] = add_halves(c[i][0], byte_pairs(rows[i], load(columns)));
        c[i][1] = add_halves(c[i][1], byte_pairs(rows[i], load(columns + 8)));
      }
      store(sums + i * COLUMNS, c[i][0]);
      store(sums + i * COLUMNS + 8, c[i][1]);
    }
  }
}

}  // namespace

#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_avx2() {
  static constexpr Micro micro = make_micro("avx2");
  return best_level() >= kAvx2 ? &micro : nullptr;
}

}  // namespace lowp
