// The C functions of the byte products: packing and distribution over threads.
#define LOWP_ISA portable
#include "bytes.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "carrier.hpp"
#include "export.hpp"
#include "levels.hpp"
#include "parallel.hpp"

namespace lowp {
namespace {

int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// The values of a group of codes of a column, of which `count` are written.
template <int bits, class Number>
void group_values(const uint8_t* from, const float* levels, Number scale, int64_t group, int64_t count, float* out) {
  constexpr int kPer = 8 / bits, kUnit = 4 * kPer, kMask = (1 << bits) - 1;
  float values[kMask + 1];
  for (int code = 0; code <= kMask; code++) values[code] = static_cast<float>(levels[code] * scale);
  for (int64_t at = 0; at < group; at += kUnit, from += 4 * kPanel) {
    float some[kUnit];
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    for (int i = 0; i < kUnit; i++) some[i] = values[word >> (8 * (i % 4) + bits * (i / 4)) & kMask];
    if (at + kUnit <= count)
      std::memcpy(out + at, some, sizeof(some));
    else if (at < count)
      std::memcpy(out + at, some, sizeof(float) * static_cast<size_t>(count - at));
  }
}

const ByteKernels& kernels(int level) {
#if defined(__x86_64__)
  const Level used = usable_level(level);
  if (used != kPortable) return used == kAvx2 ? kAvx2Bytes : kAvx512Bytes;
#endif
  (void)level;
  return kPortableBytes;
}

// The largest magnitude of a sum of products with numbers in 0 .. 1: the sum of all weights of one sign.
int32_t reach(const int32_t* weights, int count) {
  int32_t positive = 0, negative = 0;
  for (int t = 0; t < count; t++) (weights[t] > 0 ? positive : negative) += std::abs(weights[t]);
  return std::max(positive, negative);
}

// The widest way for 32 elements of 16 columns; `at` returns an element.
template <class At>
Way way_of(At at, int64_t begin, int64_t end, int32_t highest) {
  bool four = true, two = true, centred = highest < 128;
  for (int64_t j = 0; j < kPanel; j++)
    for (int64_t k = begin; k < end; k += kEight)
      for (int64_t t = 0; t < 4; t += 2) {
        const int32_t some[] = {at(j, k + t), at(j, k + t + 1), at(j, k + 4 + t), at(j, k + 5 + t)};
        four &= reach(some, 4) * highest <= 32767;
        two &= std::max(reach(some, 2), reach(some + 2, 2)) * highest <= 32767;
        centred &= *std::min_element(some, some + 4) > -128;
      }
  return four ? kFour : centred ? kCentred : two ? kTwo : kOne;
}

// Four lines of 16 bytes as 16 columns of four.
void interleave(const int8_t (*lines)[kPanel], int8_t* to) {
#if defined(__SSE2__)
  __m128i x[4];
  for (int t = 0; t < 4; t++) x[t] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lines[t]));
  const __m128i pairs[] = {_mm_unpacklo_epi8(x[0], x[1]), _mm_unpackhi_epi8(x[0], x[1])};
  const __m128i others[] = {_mm_unpacklo_epi8(x[2], x[3]), _mm_unpackhi_epi8(x[2], x[3])};
  for (int half = 0; half < 2; half++) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 * half), _mm_unpacklo_epi16(pairs[half], others[half]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 * half + 16), _mm_unpackhi_epi16(pairs[half], others[half]));
  }
#else
  for (int64_t j = 0; j < kPanel; j++)
    for (int64_t t = 0; t < 4; t++) *to++ = lines[t][j];
#endif
}

// One panel of up to 16 columns, and their sums; see lowp_bytes_pack.
void pack(const int8_t* from, int64_t columns, int64_t k, int64_t line, int64_t step, int8_t* panel, int32_t* sums) {
  const int64_t depth = up(k, kEight);
  std::fill(sums, sums + kPanel, 0);
  if (step == 1) {
    for (int64_t j = 0; j < kPanel; j++) {
      const int8_t* numbers = from + (j < columns ? j : 0) * line;
      const int64_t count = j < columns ? k : 0;
      int8_t* to = panel + 4 * j;
      int32_t sum = 0;
      for (int64_t t = 0; t < count; t++) sum += numbers[t];
      sums[j] = sum;
      int64_t t = 0;
      for (; t + 4 <= count; t += 4, to += 4 * kPanel) std::memcpy(to, numbers + t, 4);
      for (; t < depth; t += 4, to += 4 * kPanel)
        for (int64_t i = 0; i < 4; i++) to[i] = t + i < count ? numbers[t + i] : int8_t{0};
    }
    return;
  }
  for (int64_t index = 0; index < depth; index += 4, panel += 4 * kPanel) {
    int8_t lines[4][kPanel] = {};
    for (int64_t t = 0; t < std::min<int64_t>(4, k - index); t++) {
      const int8_t* numbers = from + (index + t) * step;
      if (line == 1 && columns == kPanel)
        std::memcpy(lines[t], numbers, kPanel);
      else
        for (int64_t j = 0; j < columns; j++) lines[t][j] = numbers[j * line];
      for (int64_t j = 0; j < kPanel; j++) sums[j] += lines[t][j];
    }
    interleave(lines, panel);
  }
}

// The smaller and the larger of two numbers; NaN if one of them is NaN.
float least(float a, float b) { return a != a || b >= a ? a : b; }
float most(float a, float b) { return a != a || b <= a ? a : b; }

}  // namespace
}  // namespace lowp

using namespace lowp;

// Packs int8 weights [n][k], element (j, t) at weights[j * line + t * step], one of which is 1, for activations up to
// `highest`: panels [n / 16][depth][16] with depth k rounded up to 8, and the sum of every column; panels and sums are
// padded with zeros. `ways`: one for every 32 of depth; null for activations whose ways are single elements.
LOWP_EXPORT void lowp_bytes_pack(const int8_t* weights, int64_t n, int64_t k, int64_t line, int64_t step, int highest,
                                 int8_t* panels, uint8_t* ways, int32_t* sums, int threads) {
  const int64_t depth = up(k, kEight), chunks = up(depth, kChunk) / kChunk;
  parallel_for(up(n, kPanel) / kPanel, 1, threads, [=](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      const int64_t first = p * kPanel, columns = std::min(kPanel, n - first);
      const int8_t* from = weights + first * line;
      pack(from, columns, k, line, step, panels + p * depth * kPanel, sums + first);
      if (ways == nullptr) continue;
      const auto at = [&](int64_t j, int64_t index) -> int32_t {
        return j < columns && index < k ? weights[(first + j) * line + index * step] : 0;
      };
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        ways[p * chunks + chunk] = way_of(at, chunk * kChunk, std::min(depth, (chunk + 1) * kChunk), highest);
    }
  });
}

// Rows of fp32 [rows][k], `stride` apart, as bytes [rows][depth], padded with `zero`.
LOWP_EXPORT void lowp_bytes_quantize(int level, const float* x, int64_t rows, int64_t k, int64_t stride, float scale,
                                     int zero, int highest, int64_t depth, uint8_t* out, int threads) {
  const ByteKernels& run = kernels(level);
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(k, 1));
  parallel_for(rows, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      run.quantize(x + i * stride, k, scale, zero, highest, out + i * depth);
      std::fill(out + i * depth + k, out + (i + 1) * depth, static_cast<uint8_t>(zero));
    }
  });
}

// The minimum and maximum of fp32 [rows][k] and 0, rows `stride` apart, in low and high[0]. Both are NaN if a number is.
LOWP_EXPORT void lowp_bytes_extremes(int level, const float* x, int64_t rows, int64_t k, int64_t stride, float* found,
                                     int threads) {
  const ByteKernels& run = kernels(level);
  constexpr int64_t kPieces = 64;
  float low[kPieces] = {}, high[kPieces] = {};
  if (stride == k) k *= rows, rows = 1, stride = k;  // one line, split anywhere
  const int64_t lines = rows == 1 ? k : rows, piece = up((lines + kPieces - 1) / kPieces, rows == 1 ? 65536 : 1);
  parallel_for(up(lines, piece) / piece, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++)
      for (int64_t i = p * piece; i < std::min(lines, (p + 1) * piece); i += rows == 1 ? piece : 1) {
        float some[2];
        run.extremes(rows == 1 ? x + i : x + i * stride, rows == 1 ? std::min(piece, lines - i) : k, some, some + 1);
        low[p] = least(low[p], some[0]), high[p] = most(high[p], some[1]);
      }
  });
  found[0] = found[1] = 0;
  for (int64_t p = 0; p < kPieces; p++) found[0] = least(found[0], low[p]), found[1] = most(found[1], high[p]);
}

// out[m][n] = (a[m][depth] - zero) times the panels, by the scales; see Finish. Arrays of columns are padded to 16. With
// `row_scales` [m] each result is then multiplied by that of its row, and the bias is added last.
LOWP_EXPORT void lowp_bytes_multiply(int level, const uint8_t* a, int64_t m, int64_t depth, const int8_t* panels,
                                     const uint8_t* ways, int64_t n, float row_scale, int zero,
                                     const float* column_scales, const int32_t* column_sums, const float* row_scales,
                                     const float* bias, float* out, int threads) {
  const ByteKernels& run = kernels(level);
  const int64_t chunks = up(depth, kChunk) / kChunk, width = up(n, kPanel) / kPanel, pairs = up(width, kPair) / kPair;
  const int64_t blocks = up(m, kRows) / kRows;
  if (m * n * depth < (1 << 18)) threads = 1;
  parallel_for(pairs * blocks, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      const int64_t pair = task % pairs * kPair, first = task / pairs * kRows, count = std::min(kPair, width - pair);
      Panel some[kPair];
      for (int64_t p = 0; p < count; p++) {
        const int64_t column = (pair + p) * kPanel;
        some[p] = {panels + column * depth, ways + (pair + p) * chunks, {}, std::min(kPanel, n - column), {}};
        Finish& to = some[p].finish;
        to.biased = bias != nullptr && row_scales == nullptr;
        for (int64_t j = 0; j < kPanel; j++) {
          some[p].starts[j] = -zero * column_sums[column + j];
          to.scales[j] = row_scale * column_scales[column + j];
          to.bias[j] = bias ? bias[column + j] : 0;
        }
      }
      const Rows rows{a + first * depth, std::min(kRows, m - first), depth};
      float* to = out + first * n + pair * kPanel;
      run.multiply(rows, some, count, to, n);
      if (row_scales == nullptr) continue;
      const int64_t columns = std::min(count * kPanel, n - pair * kPanel);
      for (int64_t i = 0; i < rows.count; i++, to += n) {
        const float by = row_scales[first + i];
        const float* added = bias == nullptr ? nullptr : bias + pair * kPanel;
        for (int64_t j = 0; j < columns; j++) to[j] = added == nullptr ? to[j] * by : to[j] * by + added[j];
      }
    }
  });
}

// fp32 x[m][k], rows `stride` apart, as bytes (in `bytes` [m][depth], a buffer of this call), times the panels:
// lowp_bytes_extremes, _quantize and _multiply in one call. With a `scale` of 0 the range is that of x, as computed by
// `range_of` in byte_products.py.
LOWP_EXPORT void lowp_bytes_linear(int level, const float* x, int64_t m, int64_t k, int64_t stride, float scale, int zero,
                                   int highest, const int8_t* panels, const uint8_t* ways, int64_t n,
                                   const float* column_scales, const int32_t* column_sums, const float* bias,
                                   uint8_t* bytes, float* out, int threads) {
  const int64_t depth = up(k, kEight);
  if (scale == 0) {
    float found[2];
    lowp_bytes_extremes(level, x, m, k, stride, found, threads);
    const double low = found[0], high = found[1];
    scale = static_cast<float>((high - low) / highest);
    zero = 0;
    if (scale == 0)
      scale = 1;
    else if (std::isfinite(low) && std::isfinite(high))
      zero = static_cast<int>(std::min<double>(std::nearbyint(-low / scale), highest));
    else
      scale = NAN;
  }
  lowp_bytes_quantize(level, x, m, k, stride, scale, zero, highest, depth, bytes, threads);
  lowp_bytes_multiply(level, bytes, m, depth, panels, ways, n, scale, zero, column_scales, column_sums, nullptr, bias, out,
                      threads);
}

// The windows of a convolution: x [batch][height][width][channels] of bytes to rows [batch * positions][depth], in the
// order kernel row, kernel column, channel of the group; elements outside of x are `zero`.
//   numbers: batch, height, width, channels, first channel, channels of the group, kernel height and width,
//            output height and width, stride, padding, dilation (two each), depth
LOWP_EXPORT void lowp_bytes_windows(const uint8_t* x, const int64_t* numbers, int zero, uint8_t* out, int threads) {
  const int64_t height = numbers[1], width = numbers[2], channels = numbers[3], first = numbers[4], taken = numbers[5];
  const int64_t* kernel = numbers + 6;
  const int64_t* output = numbers + 8;
  const int64_t* stride = numbers + 10;
  const int64_t* padding = numbers + 12;
  const int64_t* dilation = numbers + 14;
  const int64_t depth = numbers[16], used = kernel[0] * kernel[1] * taken;
  const uint8_t fill = static_cast<uint8_t>(zero);
  parallel_for(numbers[0] * output[0], 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; line++) {
      const int64_t image = line / output[0], top = line % output[0] * stride[0] - padding[0];
      for (int64_t column = 0; column < output[1]; column++) {
        uint8_t* to = out + (line * output[1] + column) * depth;
        for (int64_t i = 0; i < kernel[0]; i++)
          for (int64_t j = 0; j < kernel[1]; j++, to += taken) {
            const int64_t y = top + i * dilation[0], z = column * stride[1] - padding[1] + j * dilation[1];
            if (y < 0 || y >= height || z < 0 || z >= width) {
              std::fill(to, to + taken, fill);
            } else {
              const uint8_t* from = x + ((image * height + y) * width + z) * channels + first;
              std::copy(from, from + taken, to);
            }
          }
        std::fill(to, to + (depth - used), fill);
      }
    }
  });
}

namespace lowp {
namespace {

// Whole numbers [count] as digits [planes][depth] (see Digits) and their sums by groups.
void split(const int32_t* numbers, int64_t count, int64_t group, int planes, int64_t depth, int8_t* digits, int32_t* sums) {
  for (int64_t begin = 0; begin < count; begin += group) {
    int32_t sum = 0;
    for (int64_t i = begin; i < std::min(count, begin + group); i++) {
      int32_t left = numbers[i];
      sum += left;
      for (int p = 0; p < planes; p++) {
        const int32_t digit = p + 1 < planes ? ((left + 64) & 127) - 64 : left;
        digits[p * depth + i] = static_cast<int8_t>(digit);
        left = (left - digit) >> 7;
      }
    }
    *sums++ = sum;
  }
}

// How the rows of a product become digits.
struct CodedRows {
  const void* x;
  int64_t m, k, stride, depth, group;
  int planes;     // 3: x is fp32
  int32_t zero;   // of bytes
  float scale;    // of bytes
  int8_t* digits;   // [m][planes][depth], zeros
  float* scales;    // [m][groups]
  int32_t* sums;    // [m][groups]

  // Of m bytes less their zero, under one scale.
  void from_bytes(int32_t* numbers) const {
    for (int64_t i = 0; i < m; i++) {
      const uint8_t* from = static_cast<const uint8_t*>(x) + i * stride;
      for (int64_t t = 0; t < k; t++) numbers[t] = from[t] - zero;
      split(numbers, k, group, planes, depth, digits + i * planes * depth, sums + i);
      scales[i] = scale;
    }
  }

  // False if a number is infinite or NaN.
  bool from_floats(const ByteKernels& run, int32_t* numbers) const {
    const int64_t groups = depth / group;
    for (int64_t i = 0; i < m; i++) {
      if (!run.numbers(static_cast<const float*>(x) + i * stride, k, group, numbers, scales + i * groups)) return false;
      split(numbers, k, group, planes, depth, digits + i * planes * depth, sums + i * groups);
    }
    return true;
  }
};

// The scales of codes, as CodePanel has them, one by one: those of the second table with a minus, in fp64.
struct ScaleReader {
  const void* memory;
  int shift, tables;
  float factor;
  double most[2];  // the largest levels

  float of_one_table(int64_t at) const {
    if (shift == kWholeScales) return static_cast<const float*>(memory)[at];
    return magnitude(static_cast<const uint8_t*>(memory)[at]) * factor;
  }

  double of_two_tables(int64_t at) const {
    const uint32_t byte = static_cast<const uint8_t*>(memory)[at];
    const double by = static_cast<double>(magnitude(byte & 127)) * factor;
    return byte > 128 ? -(by * most[0] / most[1]) : by;
  }

 private:
  float magnitude(uint32_t byte) const {
    const uint32_t exponent = byte ? byte << 23 : 1 << 22;  // 2^-127 is subnormal
    return bit_cast<float>(shift == kExponentBytes ? exponent : portable::fp32_from_fp16(byte << shift));
  }
};

int largest(const int8_t* levels, int count) { return *std::max_element(levels, levels + count); }

}  // namespace
}  // namespace lowp

// out[m][n] = rows times panels of codes (see bytes.hpp), plus bias. x[m][k], rows `stride` apart, is fp32, or bytes less
// `zero` under `row_scale`; arrays of columns are padded to 16. Of scales in bytes `factor` is one number. Returns 0 if a
// number is infinite or NaN.
//   numbers: m, n, k, stride, depth, group, planes (3 of fp32, 1 or 2 of bytes), zero, bits, shift, tables
//   levels: [tables][2^bits]
LOWP_EXPORT int lowp_codes_multiply(int level, const int64_t* numbers, const void* x, float row_scale, const uint8_t* memory,
                                    const int8_t* levels, const void* column_scales, const float* factor,
                                    const float* bias, float* out, int threads) {
  const ByteKernels& run = kernels(level);
  const int64_t m = numbers[0], n = numbers[1], k = numbers[2], depth = numbers[4], group = numbers[5], groups = depth / group;
  const int planes = static_cast<int>(numbers[6]), bits = static_cast<int>(numbers[8]);
  const int shift = static_cast<int>(numbers[9]), tables = static_cast<int>(numbers[10]), codes = 1 << bits;
  const size_t of_digits = static_cast<size_t>(m * planes * depth), of_groups = static_cast<size_t>(m * groups);
  void* const room = std::calloc(of_digits + 8 * of_groups + sizeof(int32_t) * static_cast<size_t>(k) + 1, 1);
  if (room == nullptr) return 0;
  float* const scales = static_cast<float*>(room);
  int32_t* const sums = reinterpret_cast<int32_t*>(scales + of_groups);
  int8_t* const digits = reinterpret_cast<int8_t*>(sums + of_groups + k);
  const CodedRows rows{x, m, k, numbers[3], depth, group, planes, static_cast<int32_t>(numbers[7]), row_scale, digits, scales, sums};
  bool fit = true;
  if (planes == 3)
    fit = rows.from_floats(run, sums + of_groups);
  else
    rows.from_bytes(sums + of_groups);
  const int32_t offset = -*std::min_element(levels, levels + tables * codes);
  uint8_t table[32] = {};
  for (int i = 0; i < tables * codes; i++) table[i] = static_cast<uint8_t>(levels[i] + offset);
  const double by = shift == kWholeScales ? 0 : *factor;
  const double ratio = tables == 1 ? 1 : by * largest(levels, codes) / largest(levels + codes, codes);
  const int64_t size = depth * kPanel * bits / 8;
  if (fit)
    parallel_for(up(n, kPanel) / kPanel, 4, threads, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; p++) {
        const int64_t before = p * groups * kPanel * static_cast<int64_t>(shift == kWholeScales ? sizeof(float) : 1);
        const CodePanel panel{memory + p * size, table, static_cast<const uint8_t*>(column_scales) + before, shift,
                              static_cast<float>(by), static_cast<float>(ratio), offset, tables, bits, groups, group};
        for (int64_t i = 0; i < m; i++) {
          const Digits row{digits + i * planes * depth, planes, depth, scales + i * groups, sums + i * groups};
          float found[kPanel];
          run.codes(row, panel, found);
          for (int64_t j = p * kPanel; j < std::min(n, (p + 1) * kPanel); j++)
            out[i * n + j] = bias ? found[j - p * kPanel] + bias[j] : found[j - p * kPanel];
        }
      }
    });
  std::free(room);
  return fit;
}

// out[n][k]: the values of rows of panels of codes: of each code the number of its table times its group's scale, rounded
// once. Row i is that of number rows[i], or i without them. Returns 0 if a number is not below `height`.
//   numbers: n, k, depth, group, bits, shift, tables, height
LOWP_EXPORT int lowp_codes_values(const int64_t* numbers, const int64_t* rows, const uint8_t* memory, const int8_t* levels,
                                  const void* scales, const float* factor, float* out, int threads) {
  const int64_t n = numbers[0], k = numbers[1], depth = numbers[2], group = numbers[3], groups = depth / group;
  const int bits = static_cast<int>(numbers[4]), shift = static_cast<int>(numbers[5]);
  const int tables = static_cast<int>(numbers[6]), codes = 1 << bits;
  for (int64_t i = 0; rows != nullptr && i < n; i++)
    if (rows[i] < 0 || rows[i] >= numbers[7]) return 0;
  float table[32];
  for (int i = 0; i < tables * codes; i++) table[i] = levels[i];
  ScaleReader reader{scales, shift, tables, shift == kWholeScales ? 0 : *factor, {}};
  for (int i = 0; i < tables; i++) reader.most[i] = largest(levels + i * codes, codes);
  const auto values_of = bits == 4 ? group_values<4, float> : bits == 2 ? group_values<2, float> : group_values<1, float>;
  parallel_for(n, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = rows ? rows[i] : i;
      const uint8_t* from = memory + row / kPanel * (depth * kPanel * bits / 8) + row % kPanel * 4;
      for (int64_t g = 0; g < groups; g++, from += group * kPanel * bits / 8) {
        const int64_t at = (row / kPanel * groups + g) * kPanel + row % kPanel, count = std::min(group, k - g * group);
        float* const to = out + i * k + g * group;
        if (tables == 1) {
          values_of(from, table, reader.of_one_table(at), group, count, to);
        } else {
          const double scale = reader.of_two_tables(at);
          group_values<4>(from, scale < 0 ? table + codes : table, scale < 0 ? -scale : scale, group, count, to);
        }
      }
    }
  });
  return 1;
}

// out[m][n] = length - 2 * (number of different bits in rows of a and b): the product of rows of +1 (bit 0) and -1 (bit 1).
LOWP_EXPORT void lowp_bits_multiply(int level, const uint64_t* a, int64_t m, const uint64_t* b, int64_t n, int64_t words,
                                    int64_t length, int32_t* out, int threads) {
  const ByteKernels& run = kernels(level);
  parallel_for(n, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++)
      for (int64_t i = 0; i < m; i++)
        out[i * n + j] = static_cast<int32_t>(length - 2 * run.differing(a + i * words, b + j * words, words));
  });
}
