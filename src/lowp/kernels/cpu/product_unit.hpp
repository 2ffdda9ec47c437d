// One unit of a matrix product in fp32: packing, the tiles, and writing. Included once per instruction set, with LOWP_ISA
// and LOWP_MULTIPLIER defined.
#pragma once

#include <cmath>
#include <cstring>

#include "narrow.hpp"
#include "product.hpp"

namespace lowp {
namespace LOWP_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 14;
using Vector = __m512;
static inline Vector load_lanes(const float* p) { return _mm512_loadu_ps(p); }
static inline void store_lanes(float* p, Vector v) { _mm512_storeu_ps(p, v); }
static inline Vector all_lanes(float x) { return _mm512_set1_ps(x); }
static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vector add_lanes(Vector a, Vector b) { return _mm512_add_ps(a, b); }
static inline Vector one_nan(Vector v) {
  return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}
// To nearest even; NaN must be one_nan's.
static inline void store_fp16(char* p, Vector v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline void store_bf16(char* p, Vector v) {
  const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
}
template <int TYPE>
static inline Vector widened(const char* p) {
  if (TYPE == kFp32) return _mm512_loadu_ps(p);
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return TYPE == kFp16 ? _mm512_cvtph_ps(x) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRows = 6;
using Vector = __m256;
static inline Vector load_lanes(const float* p) { return _mm256_loadu_ps(p); }
static inline void store_lanes(float* p, Vector v) { _mm256_storeu_ps(p, v); }
static inline Vector all_lanes(float x) { return _mm256_set1_ps(x); }
static inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vector add_lanes(Vector a, Vector b) { return _mm256_add_ps(a, b); }
static inline Vector one_nan(Vector v) {
  return _mm256_blendv_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}
// To nearest even; NaN must be one_nan's.
static inline void store_fp16(char* p, Vector v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline void store_bf16(char* p, Vector v) {
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  const __m256i upper = _mm256_srli_epi32(sum, 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
}
template <int TYPE>
static inline Vector widened(const char* p) {
  if (TYPE == kFp32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return TYPE == kFp16 ? _mm256_cvtph_ps(x) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
#else
constexpr int kLanes = 4, kRows = 6;
typedef float Vector __attribute__((vector_size(16)));
static inline Vector load_lanes(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline void store_lanes(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }
static inline Vector all_lanes(float x) { return Vector{x, x, x, x}; }
static inline Vector multiply_add(Vector a, Vector b, Vector c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
static inline Vector add_lanes(Vector a, Vector b) { return a + b; }
static inline Vector one_nan(Vector v) {
  for (int i = 0; i < kLanes; ++i) v[i] = v[i] != v[i] ? number(uint32_t{0x7fc00000}) : v[i];
  return v;
}
#endif
constexpr int kVectors = 2, kColumns = kVectors * kLanes;

// One number of a type, at any address.
template <int TYPE>
static inline float widened_once(const char* p) {
  uint32_t bits = 0;
  std::memcpy(&bits, p, TYPE == kFp32 ? 4 : 2);
  return number(TYPE == kFp32 ? bits : TYPE == kFp16 ? fp32_from_fp16(static_cast<uint16_t>(bits)) : bits << 16);
}

#if !defined(__AVX2__)
static inline void store_fp16(char* p, Vector v) {
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t bits = static_cast<uint16_t>(fp16_bits(bits_of(v[i])));
    std::memcpy(p + 2 * i, &bits, sizeof bits);
  }
}
static inline void store_bf16(char* p, Vector v) {
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t bits = static_cast<uint16_t>(bf16_bits(bits_of(v[i])));
    std::memcpy(p + 2 * i, &bits, sizeof bits);
  }
}
template <int TYPE>
static inline Vector widened(const char* p) {
  Vector v;
  for (int i = 0; i < kLanes; ++i) v[i] = widened_once<TYPE>(p + i * (TYPE == kFp32 ? 4 : 2));
  return v;
}
#endif

// -- packing --------------------------------------------------------------------------------------------------------
//
// A panel of A of one block is [kRows][kDepth] where lines run along the depth, or [kDepth][kAcross] where they lie side by
// side; one of B is [kDepth][kColumns]. The results of missing rows and columns are not written. Numbers to be rounded are
// read into a buffer first; all others become fp32 on their way into the panel.

constexpr int64_t kStrip = 64;  // numbers of a line that are turned at a time
constexpr int kAcross = kLanes * ((kRows + kLanes - 1) / kLanes);

// kLanes lines of as many numbers, `line` bytes apart, as lines along the other side.
template <int TYPE>
static inline void turn(const char* from, int64_t line, float* to, int64_t stride) {
#if defined(__AVX512F__)
  __m512 r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = widened<TYPE>(from + i * line);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)), r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)), r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_ps(to + i * stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_ps(to + (i + 8) * stride, _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd));
  }
#elif defined(__AVX2__)
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = widened<TYPE>(from + i * line);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44), r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#else
  constexpr int64_t kSize = TYPE == kFp32 ? 4 : 2;
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[j * stride + i] = widened_once<TYPE>(from + i * line + j * kSize);
#endif
}

// One operand of a unit: `count` lines from `first` on, of the matrix that begins at element `base`.
struct Side {
  const Product& product;
  const lowp_operand& operand;
  const void* data;
  uint64_t seed;
  int64_t base, first, count;

  int64_t at(int64_t line, int64_t k) const { return base + (first + line) * operand.line + k * operand.step; }

  // Rounds lines [line, line + lines) over [k, k + length), or with `across` the lines along the other side.
  void read(int64_t line, int64_t lines, int64_t k, int64_t length, bool across, float* to, int64_t stride) const {
    const int64_t step = across ? operand.step : operand.line;
    product.read({data, static_cast<int32_t>(operand.type), operand.cast, seed, at(line, k), step, across ? length : lines,
                  across ? lines : length, at(line, k), step, operand.keeps != 0},
                 to, stride);
  }
};

// The panel of columns [column, column + kColumns) of B over [k, k + depth), whose lines run along the depth.
template <int TYPE>
static void pack_lines(const Side& side, int64_t column, int64_t k, int64_t depth, float* panel) {
  constexpr int64_t kSize = TYPE == kFp32 ? 4 : 2;
  const int64_t lines = side.count - column < kColumns ? side.count - column : kColumns;
  alignas(64) float strip[kColumns * kStrip];
  const bool direct = side.operand.cast == nullptr && lines == kColumns;
  if (!direct) std::memset(strip, 0, sizeof strip);
  for (int64_t done = 0; done < depth; done += kStrip) {
    const int64_t length = depth - done < kStrip ? depth - done : kStrip;
    float* to = panel + done * kColumns;
    int64_t i = 0;
    if (direct) {
      const int64_t line = side.operand.line * kSize;
      const char* from = static_cast<const char*>(side.data) + side.at(column, k + done) * kSize;
      for (; i + kLanes <= length; i += kLanes)
        for (int v = 0; v < kVectors; ++v)
          turn<TYPE>(from + v * kLanes * line + i * kSize, line, to + i * kColumns + v * kLanes, kColumns);
    }
    if (i == length) continue;
    side.read(column, lines, k + done + i, length - i, false, strip, kStrip);
    const int64_t from = i;
    for (; i + kLanes <= length; i += kLanes)
      for (int v = 0; v < kVectors; ++v)
        turn<kFp32>(reinterpret_cast<const char*>(strip + v * kLanes * kStrip + i - from), kStrip * 4,
                    to + i * kColumns + v * kLanes, kColumns);
    for (; i < length; ++i)
      for (int j = 0; j < kColumns; ++j) to[i * kColumns + j] = strip[j * kStrip + i - from];
  }
}

// `length` lines of numbers side by side, `line` bytes apart, as lines of a panel that are WIDTH apart; `readable` numbers of
// each may be read, of which the first WIDTH count.
template <int TYPE, int WIDTH>
static inline void spread(const char* from, int64_t line, int64_t length, int64_t readable, float* to) {
  constexpr int64_t kSize = TYPE == kFp32 ? 4 : 2;
  for (int64_t i = 0; i < length; ++i, from += line, to += WIDTH)
    if (readable >= WIDTH) {
#pragma GCC unroll 2
      for (int v = 0; v < WIDTH; v += kLanes) store_lanes(to + v, widened<TYPE>(from + v * kSize));
    } else {
      for (int64_t j = 0; j < readable; ++j) to[j] = widened_once<TYPE>(from + j * kSize);
    }
}

// All panels, of `width` lines in [kDepth][WIDTH], over [k, k + depth), from an operand whose lines lie side by side.
template <int TYPE, int WIDTH>
static void pack_across(const Side& side, int width, int64_t k, int64_t depth, float* panels) {
  constexpr int64_t kWide = 480, kDeep = 8, kSize = TYPE == kFp32 ? 4 : 2;
  alignas(64) float buffer[kDeep * kWide];
  const int64_t whole = kWide / width * width;  // lines that are rounded at a time
  for (int64_t line = 0; line < side.count; line += whole) {
    const int64_t lines = side.count - line < whole ? side.count - line : whole;
    for (int64_t done = 0; done < depth; done += kDeep) {
      const int64_t length = depth - done < kDeep ? depth - done : kDeep;
      const bool rounds = side.operand.cast != nullptr;
      if (rounds) side.read(line, lines, k + done, length, true, buffer, kWide);
      const char* from = static_cast<const char*>(side.data) + side.at(line, k + done) * kSize;
      for (int64_t at = 0; at < lines; at += width) {
        float* to = panels + (line + at) / width * WIDTH * kDepth + done * WIDTH;
        if (rounds)
          spread<kFp32, WIDTH>(reinterpret_cast<const char*>(buffer + at), kWide * 4, length, lines - at, to);
        else
          spread<TYPE, WIDTH>(from + at * kSize, side.operand.step * kSize, length, side.count - line - at, to);
      }
    }
  }
}

template <int TYPE>
static void pack_left_of(const Side& side, int64_t k, int64_t depth, float* to) {
  constexpr int64_t kSize = TYPE == kFp32 ? 4 : 2;
  if (side.operand.step != 1) return pack_across<TYPE, kAcross>(side, kRows, k, depth, to);
  if (side.operand.cast != nullptr) return side.read(0, side.count, k, depth, false, to, kDepth);
  for (int64_t i = 0; i < side.count; ++i, to += kDepth) {
    const char* from = static_cast<const char*>(side.data) + side.at(i, k) * kSize;
    int64_t j = 0;
    for (; j + kLanes <= depth; j += kLanes) store_lanes(to + j, widened<TYPE>(from + j * kSize));
    for (; j < depth; ++j) to[j] = widened_once<TYPE>(from + j * kSize);
  }
}

template <int TYPE>
static void pack_right_of(const Side& side, int64_t k, int64_t depth, float* to) {
  if (side.operand.step != 1) return pack_across<TYPE, kColumns>(side, kColumns, k, depth, to);
  for (int64_t column = 0; column < side.count; column += kColumns)
    pack_lines<TYPE>(side, column, k, depth, to + column * kDepth);
}

using Pack = void (*)(const Side&, int64_t k, int64_t depth, float* to);
constexpr Pack kPackLeft[] = {pack_left_of<kFp32>, nullptr, pack_left_of<kFp16>, pack_left_of<kBf16>};
constexpr Pack kPackRight[] = {pack_right_of<kFp32>, nullptr, pack_right_of<kFp16>, pack_right_of<kBf16>};

// -- tiles ----------------------------------------------------------------------------------------------------------

// sums[H][kColumns] = (begin ? 0 : sums) + a panel of A, of which H rows count, times a panel of B; `STEP` and `LINE`: the
// distances of neighbours along the depth and of rows in A's panel.
template <int H, int STEP, int LINE>
__attribute__((noinline)) static void multiply(int64_t depth, const float* a, const float* b, bool begin, float* sums) {
  Vector c[H][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) c[i][v] = all_lanes(0);
  const float* next = a + (STEP == 1 ? kRows * kDepth : kDepth * STEP);  // the panel of the next tile
  for (int64_t k = 0; k < depth; ++k, a += STEP, b += kColumns, next += 64 / sizeof(float)) {
    __builtin_prefetch(next);
    Vector right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = load_lanes(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      const Vector left = all_lanes(a[i * LINE]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) c[i][v] = multiply_add(left, right[v], c[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < H; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + i * kColumns + v * kLanes;
      store_lanes(to, begin ? c[i][v] : add_lanes(load_lanes(to), c[i][v]));
    }
}

using Multiply = void (*)(int64_t, const float*, const float*, bool, float*);

// The functions for 1 to kRows rows, of panels along the depth and across it.
template <int H>
static void fill(Multiply (*of)[kRows + 1]) {
  of[0][H] = &multiply<H, 1, kDepth>;
  of[1][H] = &multiply<H, kAcross, 1>;
  if constexpr (H > 1) fill<H - 1>(of);
}

struct Multiplies {
  Multiply of[2][kRows + 1];
  Multiplies() { fill<kRows>(of); }
};

// -- writing --------------------------------------------------------------------------------------------------------

// Adds the bias to a tile of sums, rounds it and writes it.
template <int TYPE>
static void write(const Product& product, float* sums, int64_t matrix, int64_t row, int64_t rows, int64_t column,
                  int64_t columns) {
  constexpr int64_t kSize = TYPE == kFp32 ? 4 : 2;
  const lowp_plan& plan = product.plan;
  const bool adds = product.bias != nullptr;
  alignas(64) float bias[kColumns] = {};
  if (adds) std::memcpy(bias, product.bias + column, static_cast<size_t>(columns) * sizeof(float));
  if (plan.cast != nullptr) {
    for (int64_t i = 0; i < rows * kColumns; i += kLanes)
      store_lanes(sums + i, one_nan(adds ? add_lanes(load_lanes(sums + i), load_lanes(bias + i % kColumns)) : load_lanes(sums + i)));
    const int64_t index = matrix + row * plan.out_line + column;
    product.read({sums, kFp32, plan.cast, product.seed, 0, kColumns, rows, columns, index, plan.out_line, false}, sums, kColumns);
  }
  char* to = static_cast<char*>(product.out) + (matrix + row * plan.out_line + column) * kSize;
  for (int64_t i = 0; i < rows; ++i, sums += kColumns, to += plan.out_line * kSize) {
    alignas(64) char edge[kColumns * kSize];
    char* line = columns == kColumns ? to : edge;
#pragma GCC unroll 2
    for (int v = 0; v < kColumns; v += kLanes) {
      Vector x = load_lanes(sums + v);
      if (plan.cast == nullptr) x = one_nan(adds ? add_lanes(x, load_lanes(bias + v)) : x);
      char* at = line + v * kSize;
      if (TYPE == kFp16)
        store_fp16(at, x);
      else if (TYPE == kBf16)
        store_bf16(at, x);
      else
        std::memcpy(at, &x, sizeof x);
    }
    if (line == edge) std::memcpy(to, edge, static_cast<size_t>(columns * kSize));
  }
}

using Write = void (*)(const Product&, float*, int64_t, int64_t, int64_t, int64_t, int64_t);
constexpr Write kWrite[] = {write<kFp32>, nullptr, write<kFp16>, write<kBf16>};

// Fetches where a tile will be written, while it is summed.
static inline void prefetch(const Product& product, int64_t matrix, int64_t row, int64_t rows, int64_t column) {
  const int64_t size = product.plan.type == kFp32 ? 4 : 2;
  const char* to = static_cast<const char*>(product.out) + (matrix + row * product.plan.out_line + column) * size;
  for (int64_t i = 0; i < rows; ++i, to += product.plan.out_line * size)
    for (int64_t line = 0; line < kColumns * size; line += 64) __builtin_prefetch(to + line, 1);
}

// -- a unit ---------------------------------------------------------------------------------------------------------
//
// Block by block along the depth all panels of the unit are packed, into the second-level cache. A panel of B, in the
// first-level cache, meets all panels of A. The sums of all tiles stay in memory from block to block.

static inline int64_t up(int64_t count, int64_t width) { return (count + width - 1) / width; }

static int64_t floats(const Unit& unit, int64_t depth) {
  const int64_t row_panels = up(unit.rows, kRows), columns = up(unit.columns, kColumns) * kColumns;
  const int64_t sums = row_panels * kRows * (depth > kDepth ? columns : kColumns);
  return row_panels * kAcross * kDepth + columns * kDepth + sums;
}

static int64_t place(const int64_t* strides, const Unit& unit) {
  return unit.batch[0] * strides[0] + unit.batch[1] * strides[1];
}

static void run(const Product& product, const Unit& unit, float* memory) {
  static const Multiplies multiplies;
  const ExactArithmetic exact;
  const lowp_plan& plan = product.plan;
  const Side left{product, plan.left, product.left, product.left_seed, place(plan.left.batch, unit), unit.row, unit.rows};
  const Side right{product,     plan.right,   product.right, product.right_seed, place(plan.right.batch, unit),
                   unit.column, unit.columns};
  const int64_t row_panels = up(unit.rows, kRows), panels = up(unit.columns, kColumns);
  const int64_t matrix = place(plan.out_batch, unit);
  const bool across = plan.left.step != 1;
  const int64_t panel_size = (across ? kAcross : kRows) * kDepth;
  const Multiply* of = multiplies.of[across ? 1 : 0];
  float* a = memory;
  float* b = a + row_panels * kAcross * kDepth;
  float* sums = b + panels * kColumns * kDepth;
  int64_t k = 0;
  do {  // once for a depth of 0
    const int64_t depth = plan.depth - k < kDepth ? plan.depth - k : kDepth;
    const bool last = k + depth == plan.depth;
    kPackLeft[plan.left.type](left, k, depth, a);
    kPackRight[plan.right.type](right, k, depth, b);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t column = panel * kColumns, width = unit.columns - column < kColumns ? unit.columns - column : kColumns;
      const float* rows = a;
      float* tile = sums + (plan.depth > kDepth ? panel * row_panels * kRows * kColumns : 0);
      for (int64_t i = 0; i < unit.rows; i += kRows, rows += panel_size, tile += kRows * kColumns) {
        const int64_t height = unit.rows - i < kRows ? unit.rows - i : kRows;
        if (last) prefetch(product, matrix, unit.row + i, height, unit.column + column);
        of[height](depth, rows, b + column * kDepth, k == 0, tile);
        if (last) kWrite[plan.type](product, tile, matrix, unit.row + i, height, unit.column + column, width);
      }
    }
    k += depth;
  } while (k < plan.depth);
}

}  // namespace LOWP_ISA

const Multiplier LOWP_MULTIPLIER = {LOWP_ISA::kRows, LOWP_ISA::kColumns, LOWP_ISA::run, LOWP_ISA::floats};

}  // namespace lowp
