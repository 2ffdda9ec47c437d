// Rows of fp32 times a matrix in 16 bits, or in codes of 8 or 6 bits under scales: a dot product for each number of the
// result in a fixed order, so that every instruction set gives the same bits: of 16 bits in fp64, where a product of fp32
// and such a number is exact, of codes in fp32. Included once per instruction set; provides `RowKernels`.
#pragma once

#include <cstdint>
#include <cstring>

namespace lowp {

constexpr int64_t kRowSums = 16;    // partial sums, each of every 16th product; added by halves
constexpr int64_t kRowBlock = 512;  // weights that are widened at a time, for several rows
constexpr int64_t kColumns = 4;     // columns of the result that are computed together for one row of fp32, 2 of fp64
constexpr int64_t kAhead = 2048;    // distance of prefetches in bytes: a matrix is streamed
constexpr int64_t kFarthest = 1 << 15;
constexpr int64_t kMostRows = 8;
constexpr int64_t kRowScales = kRowBlock / kRowSums;  // groups that a block may touch

// How weights are stored. Codes of floats become fp16 by a shift, whose exponent is the code's plus a constant.
enum RowKind : int64_t { kRowFp16 = 0, kRowBf16 = 1, kRowFloat8 = 2, kRowFloat6 = 3, kRowInt8 = 4, kRowNan8 = 5 };
enum ScaleKind : int64_t { kNoScales = 0, kFp32Scales = 1, kExponents = 2 };  // an exponent: 2^(byte - 127); 255 is NaN

struct RowMatrix {
  const uint8_t* memory;  // rows of weights [n][k], `line` bytes apart, the lowest bits of a byte first
  int64_t kind, n, k, line;
  int64_t group;          // weights under a scale: a multiple of 16
  int64_t scale_kind, groups, together;  // scales [n / together][groups]: rows together have the same ones
  int64_t shift;          // of a float: 10 - the bits of its mantissa
  int64_t last;           // of kRowNan8: the largest code without its sign that is no NaN
  const void* scales;
  double factor;          // of all weights

};

struct RowKernels {
  // sums[columns][rows] of the products of `columns` rows of weights from `first` on with x[rows][stride], which is zero
  // from k to a multiple of 16, in fp64 for weights of 16 bits, else fp32; at most kColumns and kMostRows, or as many columns
  // as both together for one row.
  void (*multiply)(const RowMatrix& weights, int64_t first, int64_t columns, const void* x, int64_t stride, int64_t rows,
                   double* sums);
  // out[k]: a row of weights in fp32.
  void (*values)(const RowMatrix& weights, int64_t row, float* out);
};

extern const RowKernels kPortableRows, kAvx2Rows, kAvx512Rows;

}  // namespace lowp

#if defined(LOWP_ISA)
#include "carrier.hpp"

namespace lowp {
namespace LOWP_ISA {

#if defined(__AVX512F__)
constexpr int64_t kBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kBytes = 32;
#else
constexpr int64_t kBytes = 16;
#endif

// Sixteen numbers in vectors.
template <class T>
struct Sixteen {
  static constexpr int64_t kLanes = kBytes / static_cast<int64_t>(sizeof(T)), kParts = kRowSums / kLanes;
  typedef T Vector __attribute__((vector_size(kBytes)));
  typedef T Loose __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));  // begins at any number
  Vector parts[kParts];

  void load(const T* from) {
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; p++) parts[p] = *reinterpret_cast<const Loose*>(from + p * kLanes);
  }
  void store(T* to) const {
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; p++) *reinterpret_cast<Loose*>(to + p * kLanes) = parts[p];
  }
  // this += a * from[16]. In fp64 the product is exact: one instruction has the bits of two.
  void add_product(const Sixteen& a, const T* from) {
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; p++) {
      const Vector other = *reinterpret_cast<const Loose*>(from + p * kLanes);
#if defined(__AVX512F__)
      if constexpr (sizeof(T) == 8) parts[p] = _mm512_fmadd_pd(a.parts[p], other, parts[p]);
#elif defined(__AVX2__)
      if constexpr (sizeof(T) == 8) parts[p] = _mm256_fmadd_pd(a.parts[p], other, parts[p]);
#else
      if constexpr (sizeof(T) == 8) parts[p] += a.parts[p] * other;
#endif
      if constexpr (sizeof(T) == 4) parts[p] += a.parts[p] * other;
    }
  }
  void add_scaled(const Sixteen& a, T scale) {
#pragma GCC unroll 8
    for (int64_t p = 0; p < kParts; p++) parts[p] += a.parts[p] * scale;
  }
};

constexpr bool is_wide(int64_t kind) { return kind <= kRowBf16; }

template <bool wide>
struct SumOf {
  using Type = double;
};
template <>
struct SumOf<false> {
  using Type = float;
};
template <int64_t kind>
using Sum = typename SumOf<is_wide(kind)>::Type;

template <int64_t kind>
constexpr int64_t bytes_of(int64_t count) {
  return is_wide(kind) ? 2 * count : kind == kRowFloat6 ? (6 * count + 7) / 8 : count;
}

// Eight codes of 6 bits as the upper bits of eight bytes.
static inline uint64_t spread_six(const uint8_t* from) {
  uint32_t low;
  uint16_t high;
  std::memcpy(&low, from, sizeof(low)), std::memcpy(&high, from + 4, sizeof(high));
  const uint64_t word = low | static_cast<uint64_t>(high) << 32;
#if defined(__BMI2__)
  return _pdep_u64(word, 0xfcfcfcfcfcfcfcfc);
#else
  uint64_t found = 0;
  for (int i = 0; i < 8; i++) found |= (word >> 6 * i & 63) << (8 * i + 2);
  return found;
#endif
}

#if defined(__AVX2__)
// Sixteen weights as fp16 or bf16: codes of floats by a shift.
template <int64_t kind>
static inline __m256i halves_of(const uint8_t* from, const RowMatrix& w) {
  if constexpr (is_wide(kind)) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m128i bytes = kind == kRowFloat6 ? _mm_set_epi64x(static_cast<int64_t>(spread_six(from + 6)),
                                                            static_cast<int64_t>(spread_six(from)))
                                           : _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i shifted = _mm256_sll_epi16(_mm256_cvtepi8_epi16(bytes), _mm_cvtsi64_si128(w.shift));
  const __m256i code = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0x8000 | 127 << w.shift)));
  if constexpr (kind != kRowNan8) return code;
  const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7fff));
  const __m256i nan = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(static_cast<short>(w.last << w.shift)));
  return _mm256_or_si256(code, _mm256_srli_epi16(nan, 1));
}
#endif

// Sixteen weights: every conversion is exact. By address, since no ABI defines the return of vectors.
template <int64_t kind>
static inline void widen_weights(const uint8_t* from, const RowMatrix& w, Sixteen<Sum<kind>>* out) {
#if defined(__AVX2__)
  if constexpr (kind == kRowInt8) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
#if defined(__AVX512F__)
    out->parts[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
    out->parts[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    out->parts[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
#endif
  } else {
    const __m256i halves = halves_of<kind>(from, w);
#if defined(__AVX512F__)
    const __m512 numbers = kind == kRowBf16
                               ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))
                               : _mm512_cvtph_ps(halves);
    if constexpr (is_wide(kind)) {
      out->parts[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(numbers));
      out->parts[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(numbers, 1));
    } else {
      out->parts[0] = numbers;
    }
#else
    const __m128i first = _mm256_castsi256_si128(halves), second = _mm256_extracti128_si256(halves, 1);
    __m256 low, high;
    if constexpr (kind == kRowBf16) {
      low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(first), 16));
      high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(second), 16));
    } else {
      low = _mm256_cvtph_ps(first), high = _mm256_cvtph_ps(second);
    }
    if constexpr (is_wide(kind)) {
      out->parts[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(low));
      out->parts[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(low, 1));
      out->parts[2] = _mm256_cvtps_pd(_mm256_castps256_ps128(high));
      out->parts[3] = _mm256_cvtps_pd(_mm256_extractf128_ps(high, 1));
    } else {
      out->parts[0] = low, out->parts[1] = high;
    }
#endif
  }
#else
  uint8_t bytes[kRowSums];
  uint16_t halves[kRowSums];
  Sum<kind> numbers[kRowSums];
  if (is_wide(kind))
    std::memcpy(halves, from, sizeof(halves));
  else if (kind == kRowFloat6)
    for (int64_t i = 0; i < 2; i++) {
      const uint64_t eight = spread_six(from + 6 * i);
      for (int64_t t = 0; t < 8; t++) bytes[8 * i + t] = static_cast<uint8_t>(eight >> 8 * t);
    }
  else
    std::memcpy(bytes, from, sizeof(bytes));
  for (int64_t t = 0; t < kRowSums; t++) {
    if (kind == kRowInt8) {
      numbers[t] = static_cast<int8_t>(bytes[t]);
      continue;
    }
    if (!is_wide(kind)) {
      const int64_t code = bytes[t] & 127;
      const bool is_nan = kind == kRowNan8 && code > w.last;
      halves[t] = static_cast<uint16_t>((bytes[t] & 128) << 8 | (is_nan ? 0x7fff : code << w.shift));
    }
    const uint32_t bits = kind == kRowBf16 ? static_cast<uint32_t>(halves[t]) << 16 : fp32_from_fp16(halves[t]);
    numbers[t] = static_cast<Sum<kind>>(bit_cast<float>(bits));
  }
  out->load(numbers);
#endif
  (void)w;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The scales of a row from group g on, times the factor.
template <class T>
static void read_scales(const RowMatrix& w, int64_t row, int64_t g, int64_t count, T* out) {
  const int64_t at = row / w.together * w.groups + g;
  if (w.scale_kind == kFp32Scales) {
    const float* const from = static_cast<const float*>(w.scales) + at;
    for (int64_t i = 0; i < count; i++) out[i] = static_cast<T>(static_cast<double>(from[i]) * w.factor);
  } else if (w.scale_kind == kExponents) {
    const uint8_t* const from = static_cast<const uint8_t*>(w.scales) + at;
    for (int64_t i = 0; i < count; i++) {
      const uint64_t bits = from[i] == 255 ? 0x7ff8000000000000 : static_cast<uint64_t>(from[i] + 896) << 52;
      out[i] = static_cast<T>(bit_cast<double>(bits) * w.factor);
    }
  } else {
    for (int64_t i = 0; i < count; i++) out[i] = static_cast<T>(w.factor);
  }
}

// The last weights of a row, which are fewer than 16, with zeros behind them.
template <int64_t kind>
struct LastWeights {
  uint8_t memory[2 * kRowSums] = {};
  LastWeights(const RowMatrix& w, int64_t row, int64_t even) {
    const int64_t begin = bytes_of<kind>(even);
    std::memcpy(memory, w.memory + row * w.line + begin, static_cast<size_t>(bytes_of<kind>(w.k) - begin));
  }
};

// One row times several columns: numbers of the row are read once for all of them, in as many memory streams.
template <int64_t kind, int64_t columns>
static void multiply_row(const RowMatrix& w, int64_t first, const Sum<kind>* row, Sum<kind>* sums) {
  using Numbers = Sixteen<Sum<kind>>;
  Numbers total[columns] = {};
  const int64_t even = w.k / kRowSums * kRowSums, line = w.line;
  const uint8_t* const memory = w.memory + first * line;
  const int64_t ahead = columns * line <= kFarthest ? columns * line : kAhead;  // the same place of the next columns
  Sum<kind> scales[columns][kRowScales];
  for (int64_t begin = 0, g = 0; begin < w.k; begin += w.group, g++) {
    if (g % kRowScales == 0)
      for (int64_t c = 0; c < columns; c++) read_scales(w, first + c, g, least(w.groups - g, kRowScales), scales[c]);
    Numbers some[columns] = {}, wide = {};
    const int64_t end = least(begin + w.group, even);
    const bool is_last = even < w.k && begin + w.group >= w.k;
    for (int64_t i = begin; i < end; i += kRowSums) {
      const uint8_t* const at = memory + bytes_of<kind>(i);
#pragma GCC unroll 4
      for (int64_t c = 0; c < columns; c++) {
        __builtin_prefetch(at + c * line + ahead);
        widen_weights<kind>(at + c * line, w, &wide);
        some[c].add_product(wide, row + i);
      }
    }
#pragma GCC unroll 4
    for (int64_t c = 0; c < columns; c++) {
      if (is_last) {
        widen_weights<kind>(LastWeights<kind>(w, first + c, even).memory, w, &wide);
        some[c].add_product(wide, row + even);
      }
      total[c].add_scaled(some[c], scales[c][g % kRowScales]);
    }
  }
  for (int64_t c = 0; c < columns; c++) total[c].store(sums + c * kRowSums);
}

// Weights of a row from `begin` on, without their scales; `count` of them, with zeros up to a multiple of 16.
template <int64_t kind>
static void widen_row(const RowMatrix& w, int64_t row, int64_t begin, int64_t count, Sum<kind>* out) {
  const uint8_t* const from = w.memory + row * w.line + bytes_of<kind>(begin);
  Sixteen<Sum<kind>> wide = {};
  int64_t t = 0;
  for (; t + kRowSums <= count; t += kRowSums) {
    if (t % 32 == 0) __builtin_prefetch(from + bytes_of<kind>(t) + kAhead);
    widen_weights<kind>(from + bytes_of<kind>(t), w, &wide);
    wide.store(out + t);
  }
  if (t == count) return;
  widen_weights<kind>(LastWeights<kind>(w, row, begin + t).memory, w, &wide);
  wide.store(out + t);
}

// Several rows times one column, whose weights are widened once. sums[2][rows][16]: totals, and those of a group.
template <int64_t kind>
static void multiply_column(const RowMatrix& w, int64_t column, const Sum<kind>* x, int64_t stride, int64_t rows,
                            Sum<kind>* sums) {
  using Numbers = Sixteen<Sum<kind>>;
  alignas(64) Sum<kind> wide[kRowBlock], scales[kRowScales];
  Sum<kind>* const parts = sums + rows * kRowSums;
  std::memset(sums, 0, 2 * sizeof(*sums) * static_cast<size_t>(rows * kRowSums));
  for (int64_t begin = 0; begin < w.k; begin += kRowBlock) {
    const int64_t count = least(kRowBlock, w.k - begin), group = begin / w.group;
    widen_row<kind>(w, column, begin, count, wide);
    read_scales(w, column, group, (begin + count - 1) / w.group + 1 - group, scales);
    for (int64_t i = 0; i < rows; i++) {
      Numbers total, some, weights;
      const Sum<kind>* const row = x + i * stride + begin;
      total.load(sums + i * kRowSums), some.load(parts + i * kRowSums);
      for (int64_t t = 0, g = group; t < count; g++) {
        const int64_t whole = (g + 1) * w.group - begin, end = least(whole, count);
        for (; t < end; t += kRowSums) weights.load(wide + t), some.add_product(weights, row + t);
        if (whole > count && begin + count < w.k) break;  // the group goes on in the next block
        total.add_scaled(some, scales[g - group]);
        some = {};
      }
      total.store(sums + i * kRowSums), some.store(parts + i * kRowSums);
    }
  }
}

// The sixteen sums of each of `count` numbers, added by halves.
template <class T>
static void add_halves(T* sums, int64_t count, double* out) {
  int64_t i = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    for (; i + 4 <= count; i += 4) {
      __m128 four[4];
#pragma GCC unroll 4
      for (int64_t c = 0; c < 4; c++) {
        const float* const from = sums + (i + c) * kRowSums;
        const __m256 eight = _mm256_add_ps(_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8));
        four[c] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
      }
      _MM_TRANSPOSE4_PS(four[0], four[1], four[2], four[3]);
      const __m128 found = _mm_add_ps(_mm_add_ps(four[0], four[2]), _mm_add_ps(four[1], four[3]));
      _mm256_storeu_pd(out + i, _mm256_cvtps_pd(found));
    }
#endif
  for (; i < count; i++) {
    T* const some = sums + i * kRowSums;
    for (int64_t half = kRowSums / 2; half; half /= 2)
      for (int64_t t = 0; t < half; t++) some[t] += some[t + half];
    out[i] = static_cast<double>(some[0]);
  }
}

template <int64_t kind>
static void multiply_in(const RowMatrix& w, int64_t first, int64_t columns, const void* given, int64_t stride, int64_t rows,
                        double* out) {
  constexpr int64_t kTogether = is_wide(kind) ? kColumns / 2 : kColumns;
  const Sum<kind>* const x = static_cast<const Sum<kind>*>(given);
  Sum<kind> sums[2 * kColumns * kMostRows * kRowSums];
  int64_t c = 0;
  if (rows == 1)
    for (; c + kTogether <= columns; c += kTogether) multiply_row<kind, kTogether>(w, first + c, x, sums + c * kRowSums);
  for (; c < columns; c++) {
    if (rows == 1)
      multiply_row<kind, 1>(w, first + c, x, sums + c * kRowSums);
    else
      multiply_column<kind>(w, first + c, x, stride, rows, sums + c * rows * kRowSums);
  }
  add_halves(sums, columns * rows, out);
}

template <int64_t kind>
static void values_in(const RowMatrix& w, int64_t row, float* out) {
  alignas(64) Sum<kind> wide[kRowBlock];
  for (int64_t begin = 0; begin < w.k; begin += kRowBlock) {
    const int64_t count = least(kRowBlock, w.k - begin);
    const int64_t group = begin / w.group;
    double scales[kRowScales];
    widen_row<kind>(w, row, begin, count, wide);
    read_scales(w, row, group, (begin + count - 1) / w.group + 1 - group, scales);
    for (int64_t t = 0, g = group; t < count; g++) {
      const int64_t end = least((g + 1) * w.group - begin, count);
      const double scale = scales[g - group];
      for (; t < end; t++) out[begin + t] = static_cast<float>(static_cast<double>(wide[t]) * scale);
    }
  }
}

static void multiply_rows(const RowMatrix& w, int64_t first, int64_t columns, const void* x, int64_t stride, int64_t rows,
                          double* sums) {
  constexpr decltype(&multiply_rows) run[] = {multiply_in<0>, multiply_in<1>, multiply_in<2>,
                                              multiply_in<3>, multiply_in<4>, multiply_in<5>};
  run[w.kind](w, first, columns, x, stride, rows, sums);
}

static void row_values(const RowMatrix& w, int64_t row, float* out) {
  constexpr decltype(&row_values) run[] = {values_in<0>, values_in<1>, values_in<2>, values_in<3>, values_in<4>, values_in<5>};
  run[w.kind](w, row, out);
}

}  // namespace LOWP_ISA
}  // namespace lowp
#endif
