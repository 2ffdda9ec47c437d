// The byte products for AVX2. vpmaddubsw multiplies 32 unsigned bytes by signed ones and adds neighbours in 16 bits, with
// saturation: it is used only as far as the weights of a chunk prove that nothing saturates (bytes.hpp).
#include <immintrin.h>

#include "bytes.hpp"

namespace lowp {
namespace {

using Sums = __m256i[kTriple][2];

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i broadcast(const uint8_t* from) {
  int32_t four;
  __builtin_memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}

void quantize(const float* x, int64_t count, float scale, int32_t zero, int32_t highest, uint8_t* out) {
  const __m256 by = _mm256_set1_ps(scale);
  const __m256 low = _mm256_set1_ps(static_cast<float>(-zero)), high = _mm256_set1_ps(static_cast<float>(highest - zero));
  const __m256i shift = _mm256_set1_epi32(zero), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto eight = [&](const float* from) {
    __m256 rounded = _mm256_round_ps(_mm256_div_ps(_mm256_loadu_ps(from), by), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rounded = _mm256_max_ps(rounded, low);  // of a NaN the second operand
    rounded = _mm256_min_ps(rounded, high);
    return _mm256_add_epi32(_mm256_cvtps_epi32(rounded), shift);
  };
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i words = _mm256_packs_epi32(eight(x + i), eight(x + i + 8));
    const __m256i more = _mm256_packs_epi32(eight(x + i + 16), eight(x + i + 24));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, more), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), bytes);
  }
  if (i < count) kPortableBytes.quantize(x + i, count - i, scale, zero, highest, out + i);
}

// Of two times four elements: added up in 16 bits all together, four by four, or odd and even ones apart.
template <int way>
inline __attribute__((always_inline)) __m256i products(__m256i a0, __m256i b0, __m256i a1, __m256i b1) {
  const __m256i ones = _mm256_set1_epi16(1);
  if (way == kFour)
    return _mm256_madd_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(a0, b0), _mm256_maddubs_epi16(a1, b1)), ones);
  if (way == kTwo)
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(a0, b0), ones),
                            _mm256_madd_epi16(_mm256_maddubs_epi16(a1, b1), ones));
  const __m256i even = _mm256_set1_epi16(0xff);
  const __m256i first = _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(a0, _mm256_and_si256(b0, even)), ones),
                                         _mm256_madd_epi16(_mm256_maddubs_epi16(a0, _mm256_andnot_si256(even, b0)), ones));
  const __m256i second = _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(a1, _mm256_and_si256(b1, even)), ones),
                                          _mm256_madd_epi16(_mm256_maddubs_epi16(a1, _mm256_andnot_si256(even, b1)), ones));
  return _mm256_add_epi32(first, second);
}

template <int way>
inline __attribute__((always_inline)) void chunk(const uint8_t* const* rows, int64_t begin, int64_t end,
                                                 const int8_t* panel, Sums& c) {
  for (int64_t k = begin; k < end; k += kEight, panel += kEight * kPanel) {
    const __m256i b00 = load(panel), b01 = load(panel + 32), b10 = load(panel + 64), b11 = load(panel + 96);
#pragma GCC unroll 3
    for (int i = 0; i < kTriple; i++) {
      const __m256i a0 = broadcast(rows[i] + k), a1 = broadcast(rows[i] + k + 4);
      c[i][0] = _mm256_add_epi32(c[i][0], products<way>(a0, b00, a1, b10));
      c[i][1] = _mm256_add_epi32(c[i][1], products<way>(a0, b01, a1, b11));
    }
  }
}

// Kept out of line, since beside other vector code the accumulators would be spilled.
__attribute__((noinline, noclone)) void multiply(const uint8_t* const* given, const int8_t* panel, const uint8_t* ways,
                                                 int64_t depth, int32_t* sums) {
  const uint8_t* const rows[kTriple] = {given[0], given[1], given[2]};
  Sums c;
#pragma GCC unroll 3
  for (int i = 0; i < kTriple; i++) c[i][0] = load(sums + i * kPanel), c[i][1] = load(sums + i * kPanel + 8);
  for (int64_t k = 0; k < depth;) {
    // chunks of one way are taken together
    const uint8_t way = *ways;
    int64_t end = k;
    do end += kChunk, ways++;
    while (end < depth && *ways == way);
    end = end < depth ? end : depth;
    if (way == kFour)
      chunk<kFour>(rows, k, end, panel + k * kPanel, c);
    else if (way == kTwo)
      chunk<kTwo>(rows, k, end, panel + k * kPanel, c);
    else
      chunk<kOne>(rows, k, end, panel + k * kPanel, c);
    k = end;
  }
#pragma GCC unroll 3
  for (int i = 0; i < kTriple; i++) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * kPanel), c[i][0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * kPanel + 8), c[i][1]);
  }
}

void finish(const int32_t* sums, float row_scale, int32_t zero, const Finish& to, float* out) {
  const __m256i shift = _mm256_set1_epi32(zero);
  const __m256 scale = _mm256_set1_ps(row_scale);
  for (int64_t j = 0; j < kPanel; j += 8) {
    const __m256i sum = _mm256_sub_epi32(load(sums + j), _mm256_mullo_epi32(shift, load(to.column_sums + j)));
    __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, _mm256_loadu_ps(to.column_scales + j)));
    if (to.bias) value = _mm256_add_ps(value, _mm256_loadu_ps(to.bias + j));
    _mm256_storeu_ps(out + j, value);
  }
}

// The values of eight nibbles, that at `place` of every word.
template <bool by_table>
inline __attribute__((always_inline)) __m256 values(__m256i words, int place, __m256 low, __m256 high) {
  const __m256i above = _mm256_slli_epi32(words, 28 - 4 * place);  // the nibble is on top
  if (!by_table) return _mm256_cvtepi32_ps(_mm256_srai_epi32(above, 28));
  const __m256i index = _mm256_srli_epi32(words, 4 * place);  // of which three bits count
  const __m256 first = _mm256_permutevar8x32_ps(low, index), second = _mm256_permutevar8x32_ps(high, index);
  return _mm256_blendv_ps(first, second, _mm256_castsi256_ps(above));
}

// No fused multiply-add, since other machines round twice; see bytes_portable.cpp for the order of the sum.
template <bool by_table, int steps>
void sum_nibbles(const uint8_t* const* codes, const float* table, const float* const* scales, int64_t blocks,
                 const float* x, float* out) {
  const __m256 low = by_table ? _mm256_loadu_ps(table) : _mm256_setzero_ps();
  const __m256 high = by_table ? _mm256_loadu_ps(table + 8) : low;
  __m256 total[kQuad];
#pragma GCC unroll 4
  for (int j = 0; j < kQuad; j++) total[j] = _mm256_setzero_ps();
  for (int64_t block = 0; block < blocks; block++, x += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < kQuad; j++) {
      const __m256i words = load(codes[j] + 32 * block);
      const float* scale = scales[j] + 8 / steps * block;
#pragma GCC unroll 8
      for (int first = 0; first < 8; first += steps, scale++) {
        __m256 sum = _mm256_setzero_ps();
#pragma GCC unroll 8
        for (int s = first; s < first + steps; s++) {
          const __m256 product = _mm256_mul_ps(values<by_table>(words, s, low, high), _mm256_loadu_ps(x + 8 * s));
          sum = _mm256_add_ps(sum, product);
        }
        total[j] = _mm256_add_ps(total[j], _mm256_mul_ps(sum, _mm256_set1_ps(*scale)));
      }
    }
  }
  for (int j = 0; j < kQuad; j++) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(total[j]), _mm256_extractf128_ps(total[j], 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    out[j] = _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_shuffle_ps(two, two, 1));
  }
}

void nibbles(const uint8_t* const* codes, const float* table, const float* const* scales, int64_t blocks, int64_t group,
             const float* x, float* out) {
  const auto run = group == 16   ? (table ? sum_nibbles<true, 2> : sum_nibbles<false, 2>)
                   : group == 32 ? (table ? sum_nibbles<true, 4> : sum_nibbles<false, 4>)
                                 : (table ? sum_nibbles<true, 8> : sum_nibbles<false, 8>);
  run(codes, table, scales, blocks, x, out);
}

int64_t differing(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t i = 0; i < words; i++) count += _mm_popcnt_u64(a[i] ^ b[i]);
  return count;
}

}  // namespace

const ByteKernels kAvx2Bytes = {quantize, multiply, finish, nibbles, differing};

}  // namespace lowp
