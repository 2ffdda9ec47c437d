// The byte products for AVX-512 with VNNI: vpdpbusd multiplies 64 unsigned bytes by signed ones and adds four
// products each to a sum in 32 bits, without saturation: all ways of bytes.hpp are the same here.
#include <immintrin.h>

#include <algorithm>

#include "bytes_lanes.hpp"

namespace lowp {
namespace {

constexpr int kSix = 6;  // rows of a tile: 12 sums, more than the latency of vpdpbusd needs

inline __m512i broadcast(const uint8_t* from) {
  int32_t four;
  __builtin_memcpy(&four, from, 4);
  return _mm512_set1_epi32(four);
}

inline __mmask16 first(int64_t count) { return static_cast<__mmask16>((1u << std::min<int64_t>(count, 16)) - 1); }

void extremes(const float* x, int64_t count, float* low, float* high) {
  __m512 least = _mm512_setzero_ps(), most = least;
  __mmask16 nan = 0;
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512 one = _mm512_loadu_ps(x + i), two = _mm512_loadu_ps(x + i + 16);
    nan |= _mm512_cmp_ps_mask(one, two, _CMP_UNORD_Q);
    least = _mm512_min_ps(least, _mm512_min_ps(one, two)), most = _mm512_max_ps(most, _mm512_max_ps(one, two));
  }
  for (; i < count; i += 16) {
    const __m512 some = _mm512_maskz_loadu_ps(first(count - i), x + i);
    nan |= _mm512_cmp_ps_mask(some, some, _CMP_UNORD_Q);
    least = _mm512_min_ps(least, some), most = _mm512_max_ps(most, some);
  }
  *low = nan ? __builtin_nanf("") : _mm512_reduce_min_ps(least);
  *high = nan ? *low : _mm512_reduce_max_ps(most);
}

// Sixteen quotients to bytes. x * (1 / scale) differs from x / scale, both rounded, by less than 1e-4 in the range of bytes,
// so that a division is needed only near the midpoint of two integers, once in some hundred vectors.
struct Quantizer {
  __m512 scale, inverse, low, high;
  __m512i zero;
  bool always;  // the inverse is not a normal number

  Quantizer(float scale, int32_t zero, int32_t highest)
      : scale(_mm512_set1_ps(scale)),
        inverse(_mm512_set1_ps(1 / scale)),
        low(_mm512_set1_ps(static_cast<float>(-zero))),
        high(_mm512_set1_ps(static_cast<float>(highest - zero))),
        zero(_mm512_set1_epi32(zero)),
        always(!(scale > 0x1p-120f && scale < 0x1p120f)) {}

  // for a NaN the second operand; the bounds are integers, so that rounding after them gives the same result
  __m512 bounded(__m512 value) const { return _mm512_min_ps(_mm512_max_ps(value, low), high); }

  __m128i operator()(__m512 x) const {
    __m512 value = bounded(_mm512_mul_ps(x, inverse));
    const __m512 off = _mm512_abs_ps(_mm512_reduce_ps(value, _MM_FROUND_TO_NEAREST_INT));  // value - round(value)
    if (_mm512_cmp_ps_mask(off, _mm512_set1_ps(0.4999f), _CMP_GT_OQ) || always) value = bounded(_mm512_div_ps(x, scale));
    const __m512i number = _mm512_cvt_roundps_epi32(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_cvtepi32_epi8(_mm512_add_epi32(number, zero));
  }
};

void quantize(const float* x, int64_t count, float scale, int32_t zero, int32_t highest, uint8_t* out) {
  const Quantizer run(scale, zero, highest);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), run(_mm512_loadu_ps(x + i)));
  if (i < count) _mm_mask_storeu_epi8(out + i, first(count - i), run(_mm512_maskz_loadu_ps(first(count - i), x + i)));
}

// Not inlined, so that all sums stay in registers.
template <int rows, int panels>
__attribute__((noinline, noclone)) void tile(const uint8_t* a, int64_t depth, const Panel* right, float* out,
                                             int64_t stride) {
  __m512i sums[rows][panels];
#pragma GCC unroll 2
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) sums[i][p] = _mm512_loadu_si512(right[p].starts);
  const int8_t* const weights = right[0].weights;
  const int8_t* const more = right[panels - 1].weights;
  const uint8_t* const below = a + 3 * depth;
  for (int64_t k = 0; k < depth; k += 4) {
    const __m512i one = _mm512_loadu_si512(weights + k * kPanel);
    const __m512i two = panels > 1 ? _mm512_loadu_si512(more + k * kPanel) : one;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
      const __m512i given = broadcast((i < 3 ? a : below) + i % 3 * depth + k);
      sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], given, one);
      if (panels > 1) sums[i][panels - 1] = _mm512_dpbusd_epi32(sums[i][panels - 1], given, two);
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < panels; p++) {
    const Finish& to = right[p].finish;
    const __m512 scales = _mm512_loadu_ps(to.scales), bias = _mm512_loadu_ps(to.bias);
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++) {
      __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i][p]), scales);
      if (to.biased) value = _mm512_add_ps(value, bias);
      _mm512_mask_storeu_ps(out + i * stride + p * kPanel, first(right[p].columns), value);
    }
  }
}

template <int panels>
void multiply_tiles(const Rows& a, const Panel* right, float* out, int64_t stride) {
  constexpr void (*last[])(const uint8_t*, int64_t, const Panel*, float*, int64_t) = {
      tile<1, panels>, tile<2, panels>, tile<3, panels>, tile<4, panels>, tile<5, panels>};
  int64_t i = 0;
  for (; i + kSix <= a.count; i += kSix) tile<kSix, panels>(a.bytes + i * a.depth, a.depth, right, out + i * stride, stride);
  if (i < a.count) last[a.count - i - 1](a.bytes + i * a.depth, a.depth, right, out + i * stride, stride);
}

void multiply(const Rows& a, const Panel* panels, int64_t count, float* out, int64_t stride) {
  (count == 1 ? multiply_tiles<1> : multiply_tiles<2>)(a, panels, out, stride);
}

inline __m128i scale_bytes(const CodePanel& panel, int64_t at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(panel.scales) + at));
}

// Sixteen scales of a panel. `minus`: those of the second table.
template <int tables>
inline __m512 scales_at(const CodePanel& panel, int64_t at, __mmask16 minus) {
  if (tables == 1 && panel.shift == kWholeScales) return _mm512_loadu_ps(static_cast<const float*>(panel.scales) + at);
  __m128i bytes = scale_bytes(panel, at);
  __m512 factor = _mm512_set1_ps(panel.factor);
  if (tables == 2) {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(127));
    factor = _mm512_mask_mov_ps(factor, minus, _mm512_set1_ps(panel.other_factor));
  }
  if (panel.shift != kExponentBytes)
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_sll_epi16(_mm256_cvtepu8_epi16(bytes), _mm_cvtsi32_si128(panel.shift))), factor);
  const __m512i exponents = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
  const __mmask16 none = _mm512_testn_epi32_mask(exponents, exponents);  // 2^-127 is subnormal
  return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_mask_mov_epi32(exponents, none, _mm512_set1_epi32(1 << 22))), factor);
}

template <int bits, int planes, int tables>
void sum_codes(const Digits& row, const CodePanel& panel, float* out) {
  constexpr int per = 8 / bits, chains = per < 4 ? per : 4;  // independent sums
  const auto table = [&](int at) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(panel.levels + 16 * at)));
  };
  const __m512i levels = table(0), others = table(tables - 1);
  const __m512i mask = _mm512_set1_epi8((1 << bits) - 1);
  const uint8_t* memory = panel.memory;
  const uint8_t* digits = reinterpret_cast<const uint8_t*>(row.numbers);
  __m512 total = _mm512_setzero_ps();
  for (int64_t g = 0; g < panel.groups; g++) {
    const __mmask16 minus = tables == 1 ? 0 : static_cast<__mmask16>(_mm_movemask_epi8(scale_bytes(panel, g * kPanel)));
    __m512i sums[planes][chains];
    for (auto& one : sums)
      for (auto& sum : one) sum = _mm512_setzero_si512();
    sums[0][0] = _mm512_set1_epi32(static_cast<int32_t>(-static_cast<int64_t>(panel.offset) * row.sums[g]));
    for (int64_t k = 0; k < panel.group; k += 4 * per, memory += 4 * kPanel, digits += 4 * per) {
      __builtin_prefetch(memory + 4096);
      const __m512i units = _mm512_loadu_si512(memory);
#pragma GCC unroll 8
      for (int i = 0; i < per; i++) {
        const __m512i codes = _mm512_and_si512(_mm512_srli_epi16(units, bits * i), mask);
        __m512i values = _mm512_shuffle_epi8(levels, codes);
        if (tables == 2) values = _mm512_mask_mov_epi32(values, minus, _mm512_shuffle_epi8(others, codes));
#pragma GCC unroll 3
        for (int p = 0; p < planes; p++) {
          __m512i& sum = sums[p][i % chains];
          sum = _mm512_dpbusd_epi32(sum, values, broadcast(digits + p * row.depth + 4 * i));
        }
      }
    }
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 3
    for (int p = planes - 1; p >= 0; p--) {
      sum = _mm512_slli_epi32(sum, 7);
#pragma GCC unroll 4
      for (int c = 0; c < chains; c++) sum = _mm512_add_epi32(sum, sums[p][c]);
    }
    const __m512 scales = _mm512_mul_ps(_mm512_set1_ps(row.scales[g]), scales_at<tables>(panel, g * kPanel, minus));
    total = _mm512_add_ps(total, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scales));
  }
  _mm512_storeu_ps(out, total);
}

struct CodeSums {
  template <int bits, int planes, int tables>
  static void add(const Digits& row, const CodePanel& panel, float* out) {
    sum_codes<bits, planes, tables>(row, panel, out);
  }
};

}  // namespace

const ByteKernels kAvx512Bytes = {extremes, quantize, multiply, numbers, dispatch_codes<CodeSums>, differing};

}  // namespace lowp
