// Values under a shared scale, and int16 mantissas under a shared power of two. Included once per instruction set.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// The cast whose integers, moved by the zero point, are those of `cast`.
static inline lowp_cast moved(const lowp_cast& cast, int32_t zero_point) {
  lowp_cast result = cast;
  result.maximum -= zero_point;
  result.minimum -= zero_point;
  return result;
}

// round(x / scale) within one group, in fp64; then times scale. `index` is that of the first element.
static void scale_group(const Caster<F64>& caster, double scale, uint64_t* values, const uint32_t* words, int64_t index,
                        int64_t count) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) values[i] = bits_of(number(values[i]) / scale);
  caster.with_words(values, values, index, count, words);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) values[i] = bits_of(number(values[i]) * scale);
}

// One rounding from fp64 to the type of the tensor.
static void narrow_exactly(uint64_t* values, int type, int64_t count) {
  if (type == kFp64 || type == kFp32) return;  // the conversion to fp32 is that rounding
  lowp_cast cast{};
  cast.bits = 16;
  cast.is_signed = cast.subnormals = cast.has_zero = 1;
  cast.mantissa_bits = type == kFp16 ? 10 : 7;
  cast.bias = type == kFp16 ? 15 : 127;
  cast.min_exponent = 1 - cast.bias;
  cast.maximum = type == kFp16 ? 65504.0 : 0x1.fep127;
  cast.minimum = -cast.maximum;
  cast_numbers<F64, kNearestEven, kPlain>(values, values, count, nullptr, make_lane<F64>(cast));
}

static void quantize_scaled(const Task& task, const Scales& scales, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const int64_t groups_of_row = (scales.row + scales.group - 1) / scales.group;
  const Caster<F64> common(*task.cast, task.seed);
  alignas(64) uint64_t values[kBlock];
  alignas(64) uint32_t words[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const uint64_t* in = load<F64>(task.in, task.in_type, first, count, values);
    if (in != values) std::memcpy(values, in, sizeof(values[0]) * count);
    if (task.cast->rounding == kStochastic)
      random_words(task.seed, static_cast<uint64_t>(first) / 4, (count + 3) / 4, words);
    for (int64_t done = 0; done < count;) {
      const int64_t row = (first + done) / scales.row, column = (first + done) % scales.row;
      const int64_t group = column / scales.group, at_group = row * groups_of_row + group;
      const int64_t group_end = (group + 1) * scales.group < scales.row ? (group + 1) * scales.group : scales.row;
      const int64_t size = group_end - column < count - done ? group_end - column : count - done;
      if (scales.zero_point == nullptr) {
        scale_group(common, scales.scale[at_group], values + done, words + done, first + done, size);
      } else {
        const lowp_cast cast = moved(*task.cast, scales.zero_point[at_group]);
        const Caster<F64> caster(cast, task.seed);
        scale_group(caster, scales.scale[at_group], values + done, words + done, first + done, size);
      }
      done += size;
    }
    narrow_exactly(values, task.out_type, count);
    store<F64>(values, task.out, task.out_type, first, count, task.stream);
  }
  if (task.stream) finish_streaming();
}

// x * 2**-exponent, rounded, saturated; NaN becomes 0. The product is exact in fp64 for every fp32, fp16 and bf16.
template <class C>
__attribute__((noinline)) static void write_mantissas(const typename C::Bits* in, const typename C::Bits* values,
                                                      const lowp_cast& cast, int16_t* out, int64_t count,
                                                      Mantissas* seen) {
  using Number = typename C::Number;
  const Number upper = static_cast<Number>(cast.maximum), lower = static_cast<Number>(cast.minimum);
  typename C::Int saturated = 0, non_finite = 0;
  int32_t largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const bool finite = (in[i] & Constants<C>::kMagnitude) < Constants<C>::kInf;
    Number value = number(values[i]);
    saturated += finite & ((value > upper) | (value < lower));
    non_finite += !finite;
    value = value > upper ? upper : value;
    value = value < lower ? lower : value;
    const int32_t mantissa = static_cast<int32_t>(value != value ? Number{0} : value);
    const int32_t size = mantissa < 0 ? -mantissa : mantissa;
    largest = size > largest ? size : largest;
    out[i] = static_cast<int16_t>(mantissa);
  }
  seen->maximum = largest > seen->maximum ? largest : seen->maximum;
  seen->saturated += static_cast<int64_t>(saturated);
  seen->non_finite += static_cast<int64_t>(non_finite);
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

template <class C>
static void to_int16_in(const Task& task, int exponent, Mantissas* seen, int64_t begin, int64_t end) {
  lowp_cast wide = *task.cast;  // round first, saturate and count afterwards
  wide.bits = C::kMantissa + 1;
  wide.maximum = 0x1p22, wide.minimum = -0x1p22;
  const Caster<C> caster(wide, task.seed);
  const auto factor = power_of_two<C>(-exponent);
  alignas(64) typename C::Bits buffer[kBlock], values[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* in = load<C>(task.in, task.in_type, first, count, buffer);
    if (wide.rounding == kNearestEven) {
      multiply_and_round<C>(in, values, count, factor);
    } else {
      multiply<C>(in, values, count, factor);
      caster(values, values, first, count);
    }
    write_mantissas<C>(in, values, *task.cast, static_cast<int16_t*>(task.out) + first, count, seen);
  }
}

static void to_int16(const Task& task, int exponent, Mantissas* seen, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  // In fp32 the product may lose bits below 2**-126, which only the nearest mode does not see.
  const bool near = task.cast->rounding == kNearestEven && exponent >= -126 && exponent <= 126;
  const bool narrow = task.in_type != kFp64 && near;
  if (narrow) return to_int16_in<F32>(task, exponent, seen, begin, end);
  to_int16_in<F64>(task, exponent, seen, begin, end);
}

}  // namespace LOWP_ISA
}  // namespace lowp
