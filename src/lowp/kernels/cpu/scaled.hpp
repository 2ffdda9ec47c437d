// Values under a shared scale. Included once per instruction set.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// The cast whose integers, shifted by the zero point, are those of `cast`.
static inline lowp_cast moved(const lowp_cast& cast, int32_t zero_point) {
  lowp_cast result = cast;
  result.maximum -= zero_point;
  result.minimum -= zero_point;
  return result;
}

// round(x / scale) within one group, in fp64; then times scale. `index`: of the first element. Under a scale of NaN all
// results are that NaN: in a product of two NaNs the compiler would determine the sign.
static void scale_group(const Caster<F64>& caster, double scale, uint64_t* values, const uint32_t* words, int64_t index,
                        int64_t count) {
  if (scale != scale) {
    for (int64_t i = 0; i < count; ++i) values[i] = Constants<F64>::kQuietNan;
    return;
  }
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) values[i] = bits_of(number(values[i]) / scale);
  caster.with_words(values, values, index, count, words);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) values[i] = bits_of(number(values[i]) * scale);
}

// One rounding from fp64 to the type of the tensor.
static void narrow_exactly(uint64_t* values, int type, int64_t count) {
  if (type == kFp64) return;
  if (type == kFp32) {  // the conversion to fp32 is that rounding, except for overflow
    constexpr double kLargest = 0x1.fffffep127;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) {
      const double value = number(values[i]);
      const double above = value < -kLargest ? -kLargest : value;
      values[i] = bits_of(above > kLargest ? kLargest : above);
    }
    return;
  }
  lowp_cast cast{};
  cast.bits = 16;
  cast.is_signed = cast.subnormals = cast.has_zero = cast.has_nan = cast.minus_zero = 1;
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
  const Caster<F64> common(*task.cast, task.seed, task.index);
  alignas(64) uint64_t values[kBlock];
  alignas(64) uint32_t buffer[kBlock + 4];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const uint64_t* in = load<F64>(task.in, task.in_type, first, count, values);
    if (in != values) std::memcpy(values, in, sizeof(values[0]) * count);
    const uint32_t* words = buffer;
    if (draws(task.cast->rounding)) words = words_from(task.seed, task.index + first, count, buffer);
    for (int64_t done = 0; done < count;) {
      const int64_t row = (first + done) / scales.row, column = (first + done) % scales.row;
      const int64_t group = column / scales.group, at_group = row * groups_of_row + group;
      const int64_t group_end = (group + 1) * scales.group < scales.row ? (group + 1) * scales.group : scales.row;
      const int64_t size = group_end - column < count - done ? group_end - column : count - done;
      if (scales.zero_point == nullptr) {
        scale_group(common, scales.scale[at_group], values + done, words + done, first + done, size);
      } else {
        const lowp_cast cast = moved(*task.cast, scales.zero_point[at_group]);
        const Caster<F64> caster(cast, task.seed, task.index);
        scale_group(caster, scales.scale[at_group], values + done, words + done, first + done, size);
      }
      done += size;
    }
    narrow_exactly(values, task.out_type, count);
    store<F64>(values, task.out, task.out_type, first, count, task.stream);
  }
  if (task.stream) finish_streaming();
}

}  // namespace LOWP_ISA
}  // namespace lowp
