// int16 mantissas under a shared power of two: sums, detection, optimizer steps. Included once per instruction set.
#pragma once

#include "mantissas_write.hpp"

namespace lowp {
namespace LOWP_ISA {

// -- sums of channels -----------------------------------------------------------------------------------------------

constexpr int64_t kSummed = 32768;  // number of int16 whose sum is below 2**31

// sums[c] += the sums of columns over `rows` rows `stride` apart
__attribute__((noinline)) static void add_columns(const int16_t* in, int64_t rows, int64_t stride, int64_t count,
                                                  int64_t* sums) {
  alignas(64) int32_t totals[kBlock];
  for (int64_t c = 0; c < count; ++c) totals[c] = 0;
  for (int64_t r = 0; r < rows; ++r, in += stride) {
    LOWP_VECTOR_LOOP
    for (int64_t c = 0; c < count; ++c) totals[c] += in[c];
  }
  for (int64_t c = 0; c < count; ++c) sums[c] += totals[c];
}

__attribute__((noinline)) static int32_t sum_row(const int16_t* in, int64_t count) {
  int32_t total = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) total += in[i];
  return total;
}

static void sum_int16(const int16_t* in, int64_t outer, int64_t channels, int64_t inner, int64_t* out, int64_t begin,
                      int64_t end) {
  for (int64_t c = begin; c < end; ++c) out[c] = 0;
  if (inner == 1) {
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t count = end - first < kBlock ? end - first : kBlock;
      for (int64_t r = 0; r < outer; r += kSummed)
        add_columns(in + r * channels + first, outer - r < kSummed ? outer - r : kSummed, channels, count, out + first);
    }
    return;
  }
  for (int64_t n = 0; n < outer; ++n) {
    for (int64_t c = begin; c < end; ++c) {
      const int16_t* const row = in + (n * channels + c) * inner;
      for (int64_t i = 0; i < inner; i += kSummed)
        out[c] += sum_row(row + i, inner - i < kSummed ? inner - i : kSummed);
    }
  }
}

// -- the power of two of a tensor -----------------------------------------------------------------------------------

// The smallest biased exponent of a lowest set bit; 1000 for zeros. Numbers below 2**-103 are not distinguished: they
// count as 0.
__attribute__((noinline)) static int32_t lowest_bit(const uint32_t* in, int64_t count) {
  int32_t lowest = 1000;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(in[i] & 0x7fffffff);
    const int32_t significand = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t bit = bits_of(static_cast<float>(significand & -significand)) >> 23;  // 127 .. 150
    int32_t exponent = (magnitude >> 23) + static_cast<int32_t>(bit) - 150;
    exponent = exponent < 0 ? 0 : exponent;
    exponent = magnitude == 0 ? 1000 : exponent;
    lowest = exponent < lowest ? exponent : lowest;
  }
  return lowest;
}

// With `lowest`, stops if int16 cannot represent the numbers: `maximum` is then not the largest.
static void grid(const float* in, bool lowest, Grid* seen, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  alignas(64) uint32_t buffer[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const uint32_t* const bits = load<F32>(in, kFp32, first, count, buffer);
    const uint32_t largest = largest_magnitude(bits, count);
    seen->maximum = largest > seen->maximum ? largest : seen->maximum;
    if (!lowest) continue;
    const int32_t bit = lowest_bit(bits, count);
    seen->lowest = bit < seen->lowest ? bit : seen->lowest;
    const int32_t highest = static_cast<int32_t>(seen->maximum >> 23);
    if (highest == 255 || (seen->lowest < 1000 && highest - seen->lowest > 15)) return;
  }
}

// Numbers of an fp32 tensor, which may begin at any byte: in place, or copied into `buffer`.
static const float* numbers(const float* in, int64_t first, int64_t count, uint32_t* buffer) {
  return reinterpret_cast<const float*>(load<F32>(in, kFp32, first, count, buffer));
}

// Writes x * 2**-exponent if all are int16, and returns whether they are.
__attribute__((noinline)) static bool write_exactly(const float* in, float factor, float unit, int16_t* out,
                                                    int64_t count, int64_t* largest) {
  int32_t wrong = 0, highest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    float value = in[i] * factor;
    const float bounded = value > 32767.0f ? 32767.0f : value < -32768.0f ? -32768.0f : value;
    const int32_t mantissa = static_cast<int32_t>(bounded == bounded ? bounded : 0.0f);
    wrong |= static_cast<float>(mantissa) * unit != in[i];
    const int32_t size = mantissa < 0 ? -mantissa : mantissa;
    highest = size > highest ? size : highest;
    out[i] = static_cast<int16_t>(mantissa);
  }
  *largest = highest > *largest ? highest : *largest;
  return wrong == 0;
}

static bool exact_int16(const float* in, int exponent, int16_t* out, int64_t* largest, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const float factor = power_of_two<F32>(-exponent), unit = power_of_two<F32>(exponent);
  alignas(64) uint32_t buffer[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    if (!write_exactly(numbers(in, first, count, buffer), factor, unit, out + first, count, largest)) return false;
  }
  return true;
}

// Whether the mantissas are those of x: exactly, or x * 2**-exponent rounded to nearest even and saturated.
__attribute__((noinline)) static bool same_block(const float* in, const int16_t* mantissas, float unit, int64_t count) {
  int32_t wrong = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) wrong |= static_cast<float>(mantissas[i]) * unit != in[i];
  return wrong == 0;
}

__attribute__((noinline)) static bool same_rounded_block(const float* in, const int16_t* mantissas, float factor,
                                                         float lower, int64_t count, uint32_t* largest) {
  constexpr float kMagic = 0x1.8p23, kFar = 0x1p20;
  int32_t wrong = 0, highest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(in[i]) & 0x7fffffff);
    highest = magnitude > highest ? magnitude : highest;
    float value = in[i] * factor;
    value = value > kFar ? kFar : value;
    value = value < -kFar ? -kFar : value;
    value = (value + kMagic) - kMagic;
    value = value > 32767.0f ? 32767.0f : value;
    value = value < lower ? lower : value;
    wrong |= static_cast<float>(mantissas[i]) != value;
  }
  *largest = static_cast<uint32_t>(highest) > *largest ? static_cast<uint32_t>(highest) : *largest;
  return wrong == 0;
}

// Rounded if `largest` is given, which then receives the bits of the largest |x|.
static bool same_int16(const float* in, const int16_t* mantissas, int exponent, float lower, uint32_t* largest,
                       int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const float factor = power_of_two<F32>(-exponent), unit = power_of_two<F32>(exponent);
  alignas(64) uint32_t buffer[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const float* const x = numbers(in, first, count, buffer);
    const bool same = largest == nullptr
                          ? same_block(x, mantissas + first, unit, count)
                          : same_rounded_block(x, mantissas + first, factor, lower, count, largest);
    if (!same) return false;
  }
  return true;
}

// -- a weight and its update ----------------------------------------------------------------------------------------

// value * 2**-exponent to nearest even, not yet saturated. Beyond 2**20 everything saturates.
static inline double rounded_once(double value, double factor) {
  constexpr double kMagic = 0x1.8p52, kFar = 0x1p20;
  double scaled = value * factor;
  scaled = scaled > kFar ? kFar : scaled;
  scaled = scaled < -kFar ? -kFar : scaled;
  return (scaled + kMagic) - kMagic;
}

static inline double saturated(double value, double lower) {
  value = value > 32767.0 ? 32767.0 : value;
  return value < lower ? lower : value;
}

// The update and the new weight as mantissas that are not yet saturated. Loops over numbers of one width are vectorized by
// the compiler: counts are taken afterwards, in integers.
__attribute__((noinline)) static void step_sums(const Step& step, const float* weight, const int16_t* old,
                                                int64_t count, int32_t* updates, int32_t* mantissas, Stepped* seen) {
  const double before = power_of_two<F64>(step.old_exponent), lower = step.lowest;
  const double update_unit = power_of_two<F64>(step.update_exponent);
  const double update_factor = power_of_two<F64>(-step.update_exponent), factor = power_of_two<F64>(-step.exponent);
  uint64_t moves = 0, any = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const double was = static_cast<double>(old[i]) * before;
    const double difference = static_cast<double>(weight[i]) - was;
    const double update = rounded_once(difference, update_factor);
    const double sum = was + saturated(update, lower) * update_unit;
    updates[i] = static_cast<int32_t>(update);
    mantissas[i] = static_cast<int32_t>(rounded_once(sum, factor));
    moves |= bits_of(difference) & Constants<F64>::kMagnitude;
    any |= bits_of(sum) & Constants<F64>::kMagnitude;
  }
  seen->update.any |= moves != 0, seen->weight.any |= any != 0;
}

// Saturates mantissas in place and counts.
__attribute__((noinline)) static void saturate(int32_t* mantissas, int32_t lower, int64_t count, Mantissas* seen) {
  int32_t cut = 0, largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    int32_t mantissa = mantissas[i] > 32767 ? 32767 : mantissas[i];
    mantissa = mantissa < lower ? lower : mantissa;
    cut += mantissa != mantissas[i];
    const int32_t size = mantissa < 0 ? -mantissa : mantissa;
    largest = size > largest ? size : largest;
    mantissas[i] = mantissa;
  }
  seen->maximum = largest > seen->maximum ? largest : seen->maximum;
  seen->saturated += cut;
}

__attribute__((noinline)) static int64_t nonfinite_of(const float* in, int64_t count) {
  int32_t found = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i)
    found += (bits_of(in[i]) & Constants<F32>::kMagnitude) >= Constants<F32>::kInf;
  return found;
}

// An infinity or a NaN counts as a 0 without a change, and is not modified.
static void step_block(const Step& step, float* weight, int16_t* old, int64_t count, Stepped* seen) {
  alignas(64) uint32_t given[kBlock];
  alignas(64) int32_t updates[kBlock], mantissas[kBlock];
  const int64_t nonfinite = nonfinite_of(weight, count);
  if (nonfinite > 0) {
    for (int64_t i = 0; i < count; ++i) {
      given[i] = bits_of(weight[i]);
      if ((given[i] & Constants<F32>::kMagnitude) >= Constants<F32>::kInf) weight[i] = 0, old[i] = 0;
    }
  }
  step_sums(step, weight, old, count, updates, mantissas, seen);
  saturate(updates, step.lowest, count, &seen->update);
  saturate(mantissas, step.lowest, count, &seen->weight);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) old[i] = static_cast<int16_t>(mantissas[i]);
  read_mantissas(old, step.exponent, weight, count);
  seen->update.non_finite += nonfinite, seen->weight.non_finite += nonfinite;
  if (nonfinite > 0) keep_nonfinite<F32>(given, weight, count);
}

static void step_int16(const Step& step, Stepped* seen, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    step_block(step, step.weight + first, step.old + first, count, seen);
  }
}

}  // namespace LOWP_ISA
}  // namespace lowp
