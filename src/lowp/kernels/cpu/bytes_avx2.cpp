// The byte products for AVX2. vpmaddubsw multiplies 32 unsigned bytes by signed ones and adds neighbours in 16 bits, with
// saturation: it is used only where the weights of a chunk prove that no sum saturates (bytes.hpp).
#include <immintrin.h>

#include "bytes_block.hpp"

namespace lowp {
namespace {

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline void store(void* to, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }

inline __m256i broadcast(const uint8_t* from) {
  int32_t four;
  __builtin_memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}

void extremes(const float* x, int64_t count, float* low, float* high) {
  __m256 least = _mm256_setzero_ps(), most = least, nan = least;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 some = _mm256_loadu_ps(x + i);
    least = _mm256_min_ps(least, some), most = _mm256_max_ps(most, some);
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(some, some, _CMP_UNORD_Q));
  }
  kPortableBytes.extremes(x + i, count - i, low, high);
  for (int j = 0; j < 8; j++) {  // NaN stays NaN
    *low = least[j] < *low ? least[j] : *low;
    *high = most[j] > *high ? most[j] : *high;
  }
  if (_mm256_movemask_ps(nan)) *low = *high = __builtin_nanf("");
}

void quantize(const float* x, int64_t count, float scale, int32_t zero, int32_t highest, uint8_t* out) {
  const __m256 by = _mm256_set1_ps(scale);
  const __m256 low = _mm256_set1_ps(static_cast<float>(-zero)), high = _mm256_set1_ps(static_cast<float>(highest - zero));
  const __m256i shift = _mm256_set1_epi32(zero), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const auto eight = [&](const float* from) {
    __m256 rounded = _mm256_round_ps(_mm256_div_ps(_mm256_loadu_ps(from), by), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rounded = _mm256_max_ps(rounded, low);  // for a NaN the second operand
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

// Sums of pairs of products of bytes a with weights b, in 16 bits, for two times four elements, added modulo 2^16.
inline __attribute__((always_inline)) __m256i four(__m256i a0, __m256i b0, __m256i a1, __m256i b1) {
  return _mm256_add_epi16(_mm256_maddubs_epi16(a0, b0), _mm256_maddubs_epi16(a1, b1));
}

inline __attribute__((always_inline)) __m256i widened(__m256i sums) {
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

// Four single elements: even and odd ones separately.
inline __attribute__((always_inline)) __m256i apart(__m256i a, __m256i b) {
  const __m256i even = _mm256_set1_epi16(0xff);
  return _mm256_add_epi32(widened(_mm256_maddubs_epi16(a, _mm256_and_si256(b, even))),
                          widened(_mm256_maddubs_epi16(a, _mm256_andnot_si256(even, b))));
}

template <int way>
inline __attribute__((always_inline)) __m256i products(__m256i a0, __m256i b0, __m256i a1, __m256i b1,
                                                       const int16_t* centres) {
  if (way == kFour) return widened(four(a0, b0, a1, b1));
  if (way == kCentred) return widened(_mm256_sub_epi16(four(a0, b0, a1, b1), load(centres)));
  if (way == kTwo)
    return _mm256_add_epi32(widened(_mm256_maddubs_epi16(a0, b0)), widened(_mm256_maddubs_epi16(a1, b1)));
  return _mm256_add_epi32(apart(a0, b0), apart(a1, b1));
}

void centre(const int8_t* panel, const uint8_t* ways, int64_t depth, int16_t* centres, int32_t* sums) {
  const __m256i by = _mm256_set1_epi8(64);
  for (int64_t k = 0; k < depth; k += kEight, panel += kEight * kPanel, centres += 2 * kPanel) {
    if (ways[k / kChunk] != kCentred) continue;
    for (int64_t j = 0; j < kPanel; j += 8) {
      const __m256i found = four(by, load(panel + 4 * j), by, load(panel + 4 * (kPanel + j)));
      store(centres + 2 * j, found);
      store(sums + j, _mm256_add_epi32(load(sums + j), widened(found)));
    }
  }
}

template <int way, int count>
inline __attribute__((always_inline)) void chunks(const uint8_t* const* rows, int64_t begin, int64_t end,
                                                  const int8_t* panel, const int16_t* centres, __m256i (*c)[2]) {
  for (int64_t k = begin; k < end; k += kEight, panel += kEight * kPanel, centres += 2 * kPanel) {
    const __m256i b00 = load(panel), b01 = load(panel + 32), b10 = load(panel + 64), b11 = load(panel + 96);
#pragma GCC unroll 3
    for (int i = 0; i < count; i++) {
      const __m256i a0 = broadcast(rows[i] + k), a1 = broadcast(rows[i] + k + 4);
      c[i][0] = _mm256_add_epi32(c[i][0], products<way>(a0, b00, a1, b10, centres));
      c[i][1] = _mm256_add_epi32(c[i][1], products<way>(a0, b01, a1, b11, way == kCentred ? centres + kPanel : nullptr));
    }
  }
}

// Not inlined, since next to other vector code the accumulators would be spilled.
template <int count>
__attribute__((noinline, noclone)) void add_rows(const uint8_t* const* given, const Piece& piece, int32_t* sums,
                                                 float* const* out) {
  const uint8_t* rows[count];
  __m256i c[count][2];
#pragma GCC unroll 3
  for (int i = 0; i < count; i++) {
    rows[i] = given[i];
    c[i][0] = load(piece.starts), c[i][1] = load(piece.starts + 8);
    if (!piece.continues) continue;
    c[i][0] = _mm256_add_epi32(c[i][0], load(sums + i * kPanel));
    c[i][1] = _mm256_add_epi32(c[i][1], load(sums + i * kPanel + 8));
  }
  int64_t k = 0;
  for (const uint8_t* ways = piece.ways; k < piece.depth; ways++) {
    const int64_t end = piece.ends[ways - piece.ways];
    const int8_t* from = piece.weights + k * kPanel;
    const int16_t* by = piece.centres ? piece.centres + k / kEight * 2 * kPanel : nullptr;
    const int way = *ways;
    if (way == kCentred)
      chunks<kCentred, count>(rows, k, end, from, by, c);
    else if (way == kFour)
      chunks<kFour, count>(rows, k, end, from, by, c);
    else if (way == kTwo)
      chunks<kTwo, count>(rows, k, end, from, by, c);
    else
      chunks<kOne, count>(rows, k, end, from, by, c);
    k = end;
  }
#pragma GCC unroll 3
  for (int i = 0; i < count; i++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      if (!piece.to) {
        store(sums + i * kPanel + 8 * h, c[i][h]);
        continue;
      }
      __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(c[i][h]), _mm256_loadu_ps(piece.to->scales + 8 * h));
      if (piece.to->biased) value = _mm256_add_ps(value, _mm256_loadu_ps(piece.to->bias + 8 * h));
      _mm256_storeu_ps(out[i] + 8 * h, value);
    }
}

struct Sums {
  static void centre(const int8_t* panel, const uint8_t* ways, int64_t depth, int16_t* centres, int32_t* starts) {
    lowp::centre(panel, ways, depth, centres, starts);
  }
  static void add(const uint8_t* const* rows, int64_t count, const Piece& piece, int32_t* sums, float* const* out) {
    (count == 1 ? add_rows<1> : count == 2 ? add_rows<2> : add_rows<3>)(rows, piece, sums, out);
  }
};

inline __m128i scale_bytes(const CodePanel& panel, int64_t at) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(panel.scales) + at));
}

// Eight scales of a panel. `minus`: those of the second table.
template <int tables>
inline __m256 scales_at(const CodePanel& panel, int64_t at, __m256i minus) {
  if (tables == 1 && panel.shift == kWholeScales) return _mm256_loadu_ps(static_cast<const float*>(panel.scales) + at);
  __m128i bytes = scale_bytes(panel, at);
  __m256 factor = _mm256_set1_ps(panel.factor);
  if (tables == 2) {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(127));
    factor = _mm256_blendv_ps(factor, _mm256_set1_ps(panel.other_factor), _mm256_castsi256_ps(minus));
  }
  if (panel.shift != kExponentBytes)
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_sll_epi16(_mm_cvtepu8_epi16(bytes), _mm_cvtsi32_si128(panel.shift))), factor);
  const __m256i exponents = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
  const __m256i none = _mm256_cmpeq_epi32(exponents, _mm256_setzero_si256());  // 2^-127 is subnormal
  return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(exponents, _mm256_srli_epi32(_mm256_slli_epi32(none, 31), 9))), factor);
}

// The 16-bit sums of one unit of memory cannot saturate: levels are at most 128 with four bits and 2 with fewer, and
// digits at least -64.
template <int bits, int planes, int tables>
void sum_codes(const Digits& row, const CodePanel& panel, float* out) {
  constexpr int per = 8 / bits;
  const auto table = [&](int at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.levels + 16 * at)));
  };
  const __m256i levels = table(0), others = table(tables - 1);
  const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
  const uint8_t* memory = panel.memory;
  const int8_t* digits = row.numbers;
  __m256 total[2] = {};
  for (int64_t g = 0; g < panel.groups; g++) {
    __m256i minus[2] = {};
    if (tables == 2)
      for (int h = 0; h < 2; h++)
        minus[h] = _mm256_srai_epi32(_mm256_cvtepi8_epi32(scale_bytes(panel, g * kPanel + 8 * h)), 31);
    __m256i sums[2][planes] = {};
    sums[0][0] = sums[1][0] = _mm256_set1_epi32(static_cast<int32_t>(-static_cast<int64_t>(panel.offset) * row.sums[g]));
    for (int64_t k = 0; k < panel.group; k += 4 * per, memory += 4 * kPanel, digits += 4 * per) {
      __builtin_prefetch(memory + 4096);
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m256i units = load(memory + 32 * h);
        __m256i some[planes];
#pragma GCC unroll 8
        for (int i = 0; i < per; i++) {
          const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(units, bits * i), mask);
          __m256i values = _mm256_shuffle_epi8(levels, codes);
          if (tables == 2) values = _mm256_blendv_epi8(values, _mm256_shuffle_epi8(others, codes), minus[h]);
#pragma GCC unroll 3
          for (int p = 0; p < planes; p++) {
            const uint8_t* from = reinterpret_cast<const uint8_t*>(digits) + p * row.depth + 4 * i;
            const __m256i products = _mm256_maddubs_epi16(values, broadcast(from));
            some[p] = i ? _mm256_add_epi16(some[p], products) : products;
          }
        }
#pragma GCC unroll 3
        for (int p = 0; p < planes; p++) sums[h][p] = _mm256_add_epi32(sums[h][p], widened(some[p]));
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      __m256i sum = sums[h][planes - 1];
      for (int p = planes - 2; p >= 0; p--) sum = _mm256_add_epi32(_mm256_slli_epi32(sum, 7), sums[h][p]);
      const __m256 scales = _mm256_mul_ps(_mm256_set1_ps(row.scales[g]), scales_at<tables>(panel, g * kPanel + 8 * h, minus[h]));
      total[h] = _mm256_add_ps(total[h], _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scales));
    }
  }
  _mm256_storeu_ps(out, total[0]), _mm256_storeu_ps(out + 8, total[1]);
}

struct CodeSums {
  template <int bits, int planes, int tables>
  static void add(const Digits& row, const CodePanel& panel, float* out) {
    sum_codes<bits, planes, tables>(row, panel, out);
  }
};

}  // namespace

const ByteKernels kAvx2Bytes = {extremes, quantize, multiply_panels<Sums>, numbers, dispatch_codes<CodeSums>, differing};

}  // namespace lowp
