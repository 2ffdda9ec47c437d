// Tensors written as int16 mantissas under a power of two, and read back. Included once per instruction set.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// x * 2**-exponent, rounded, saturated; NaN becomes 0. The product is exact in fp64 for every fp32, fp16 and bf16.
template <class C>
__attribute__((noinline)) static void write_mantissas(const typename C::Bits* in, const typename C::Bits* values,
                                                      const lowp_cast& cast, int16_t* out, int64_t count,
                                                      Mantissas* seen) {
  using Number = typename C::Number;
  const Number upper = static_cast<Number>(cast.maximum), lower = static_cast<Number>(cast.minimum);
  typename C::Int saturated = 0, non_finite = 0;
  typename C::Bits any = 0;
  int32_t largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const bool finite = (in[i] & Constants<C>::kMagnitude) < Constants<C>::kInf;
    Number value = number(values[i]);
    saturated += finite & ((value > upper) | (value < lower));
    non_finite += !finite;
    any |= in[i] & Constants<C>::kMagnitude;
    value = value > upper ? upper : value;
    value = value < lower ? lower : value;
    const int32_t mantissa = static_cast<int32_t>(value != value ? Number{0} : value);
    const int32_t size = finite ? (mantissa < 0 ? -mantissa : mantissa) : 0;  // only a maximum is vectorized
    largest = size > largest ? size : largest;
    out[i] = static_cast<int16_t>(mantissa);
  }
  seen->maximum = largest > seen->maximum ? largest : seen->maximum;
  seen->saturated += static_cast<int64_t>(saturated);
  seen->non_finite += static_cast<int64_t>(non_finite);
  seen->any |= any != 0;
}

template <class C>
__attribute__((noinline)) static void multiply(const typename C::Bits* in, typename C::Bits* out, int64_t count,
                                               typename C::Number factor) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) out[i] = bits_of(number(in[i]) * factor);
}

template <class C>
__attribute__((noinline)) static void multiply_and_round(const typename C::Bits* in, typename C::Bits* out,
                                                         int64_t count, typename C::Number factor) {
  // 1.5 * 2**kMantissa: the ulp there is 1. Beyond 2**20 everything saturates.
  constexpr typename C::Number kMagic = sizeof(typename C::Number) == 4 ? 0x1.8p23 : 0x1.8p52;
  constexpr typename C::Number kFar = 0x1p20;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const typename C::Number x = number(in[i]) * factor;
    typename C::Number value = x > kFar ? kFar : x;
    value = value < -kFar ? -kFar : value;
    out[i] = bits_of((value + kMagic) - kMagic);
  }
}

// m * 2**exponent, exact unless it leaves the range of fp32.
__attribute__((noinline)) static void read_mantissas(const int16_t* in, int exponent, float* out, int64_t count) {
  if (exponent < -100 || exponent > 100) {
    const double factor = power_of_two<F64>(exponent);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i] * factor);
    return;
  }
  const float factor = power_of_two<F32>(exponent);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]) * factor;
}

// An infinity or a NaN has no mantissa, and is not modified.
template <class C>
static void keep_nonfinite(const typename C::Bits* in, float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if ((in[i] & Constants<C>::kMagnitude) >= Constants<C>::kInf) values[i] = static_cast<float>(number(in[i]));
}

__attribute__((noinline)) static uint32_t largest_magnitude(const uint32_t* in, int64_t count) {
  int32_t largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(in[i] & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

// Mantissas to nearest even, and their values, for numbers without saturation.
template <bool kValues>
__attribute__((noinline)) static void round_block(const uint32_t* in, float factor, float unit, int16_t* out,
                                                  float* values, int64_t count) {
  constexpr float kMagic = 0x1.8p23;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = (number(in[i]) * factor + kMagic) - kMagic;
    out[i] = static_cast<int16_t>(static_cast<int32_t>(rounded));
    if (kValues) values[i] = rounded * unit;
  }
}

// A block to nearest even if all of x is finite and nothing saturates: the largest magnitude then determines the largest
// mantissa, and no counts are needed. Returns false and writes nothing for any other block.
static bool write_fitting(const uint32_t* in, const lowp_cast& cast, int exponent, int16_t* out, float* values,
                          int64_t count, Mantissas* seen) {
  if (exponent < -100 || exponent > 100 || (values != nullptr && !is_aligned(values, sizeof(float)))) return false;
  const uint32_t largest = largest_magnitude(in, count);
  const float factor = power_of_two<F32>(-exponent), unit = power_of_two<F32>(exponent);
  if (largest >= Constants<F32>::kInf || !(number(largest) * factor < static_cast<float>(cast.maximum))) return false;
  if (values == nullptr)
    round_block<false>(in, factor, unit, out, nullptr, count);
  else
    round_block<true>(in, factor, unit, out, values, count);
  const int64_t mantissa = static_cast<int64_t>((number(largest) * factor + 0x1.8p23f) - 0x1.8p23f);
  seen->maximum = mantissa > seen->maximum ? mantissa : seen->maximum;
  seen->any |= largest != 0;
  return true;
}

template <class C>
static void to_int16_in(const Task& task, int exponent, float* values, Mantissas* seen, int64_t begin, int64_t end) {
  lowp_cast wide = *task.cast;  // round first, saturate and count afterwards
  wide.bits = C::kMantissa + 1;
  wide.maximum = 0x1p22, wide.minimum = -0x1p22;
  const Caster<C> caster(wide, task.seed);
  const auto factor = power_of_two<C>(-exponent);
  alignas(64) typename C::Bits buffer[kBlock], rounded[kBlock];
  alignas(64) int16_t unkept[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* in = load<C>(task.in, task.in_type, first, count, buffer);
    int16_t* const out = task.out == nullptr ? unkept : static_cast<int16_t*>(task.out) + first;
    float* const block_values = values == nullptr ? nullptr : values + first;
    if constexpr (sizeof(typename C::Bits) == 4) {
      if (wide.rounding == kNearestEven && write_fitting(in, *task.cast, exponent, out, block_values, count, seen)) continue;
    }
    if (wide.rounding == kNearestEven) {
      multiply_and_round<C>(in, rounded, count, factor);
    } else {
      multiply<C>(in, rounded, count, factor);
      caster(rounded, rounded, first, count);
    }
    const int64_t before = seen->non_finite;
    write_mantissas<C>(in, rounded, *task.cast, out, count, seen);
    if (values == nullptr) continue;
    // `values` may be `task.in`: this block has been read, except for infinities and NaNs
    if (seen->non_finite == before && is_aligned(values, sizeof(float))) {
      read_mantissas(out, exponent, block_values, count);
    } else {
      alignas(64) float block[kBlock];
      read_mantissas(out, exponent, block, count);
      keep_nonfinite<C>(in, block, count);
      std::memcpy(block_values, block, sizeof(float) * static_cast<size_t>(count));
    }
  }
}

// With `values`, also writes the values of the mantissas; without `task.out` only these.
static void to_int16(const Task& task, int exponent, float* values, Mantissas* seen, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  // In fp32 the product may lose bits below 2**-126, which matter to all modes except nearest.
  const bool near = task.cast->rounding == kNearestEven && exponent >= -126 && exponent <= 126;
  const bool narrow = task.in_type != kFp64 && near;
  if (narrow) return to_int16_in<F32>(task, exponent, values, seen, begin, end);
  to_int16_in<F64>(task, exponent, values, seen, begin, end);
}

// Writes x in place as the sum of two words: its mantissa, and that of the rest of x, at most half a unit, in units
// 2**-low_bits times as large. Infinities and NaNs become the positive quiet NaN (a difference of infinities has another sign on
// another processor). The counts are those of the first words.
__attribute__((noinline)) static void add_low_words(float* x, const int16_t* high, int exponent, int low_bits,
                                                    int64_t count) {
  constexpr float kMagic = 0x1.8p23;
  const float unit = power_of_two<F32>(exponent), half = power_of_two<F32>(exponent - 1);
  const float low_unit = power_of_two<F32>(exponent - low_bits), low_factor = power_of_two<F32>(low_bits - exponent);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float first = static_cast<float>(high[i]) * unit;
    float rest = x[i] - first;
    rest = rest > half ? half : rest;
    rest = rest < -half ? -half : rest;
    const float low = ((rest * low_factor + kMagic) - kMagic) * low_unit;
    x[i] = x[i] - x[i] == 0 ? low + first : number(Constants<F32>::kQuietNan);
  }
}

static void words_int16(float* x, int exponent, int low_bits, int lowest, Mantissas* seen, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  lowp_cast cast{};
  cast.maximum = 32767, cast.minimum = lowest;
  const float factor = power_of_two<F32>(-exponent);
  alignas(64) uint32_t rounded[kBlock];
  alignas(64) int16_t high[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const uint32_t* in = reinterpret_cast<const uint32_t*>(x + first);
    multiply_and_round<F32>(in, rounded, count, factor);
    write_mantissas<F32>(in, rounded, cast, high, count, seen);
    add_low_words(x + first, high, exponent, low_bits, count);
  }
}

// Writes x in place as squares of values of the format: of its roots, rounded to nearest even, of which none but those of
// zeros vanishes: less than half a unit becomes a unit. NaN, and what has no root, becomes the positive quiet NaN.
static void roots_int16(float* x, int exponent, const lowp_cast& cast, Mantissas* seen, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const double factor = power_of_two<F64>(-exponent);
  const float unit = static_cast<float>(power_of_two<F64>(exponent));
  alignas(64) uint64_t roots[kBlock], rounded[kBlock];
  alignas(64) int16_t mantissas[kBlock];
  alignas(64) float values[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    for (int64_t i = 0; i < count; ++i) roots[i] = bits_of(__builtin_sqrt(static_cast<double>(x[first + i])));
    multiply_and_round<F64>(roots, rounded, count, factor);
    write_mantissas<F64>(roots, rounded, cast, mantissas, count, seen);
    read_mantissas(mantissas, exponent, values, count);
    keep_nonfinite<F64>(roots, values, count);
    for (int64_t i = 0; i < count; ++i) {
      const float value = number(roots[i]) > 0 && values[i] == 0 ? unit : values[i];
      x[first + i] = value != value ? number(Constants<F32>::kQuietNan) : value * value;
    }
  }
}

static void from_int16(const int16_t* in, int exponent, float* out, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  read_mantissas(in + begin, exponent, out + begin, end - begin);
}

}  // namespace LOWP_ISA
}  // namespace lowp
