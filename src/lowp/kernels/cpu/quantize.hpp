// Values of a format in the type of the tensor, a block at a time. Included once per instruction set.
#pragma once

#include "convert.hpp"

namespace lowp {
namespace LOWP_ISA {

// A cast prepared for one call: the vector kernel, or the general function if that does not support it.
template <class C>
struct Caster {
  const lowp_cast& cast;
  uint64_t seed;
  int64_t offset, step = 1;  // of the indices of neighbours
  Lane<C> lane;
  CastNumbers<C> kernel, quick;

  Caster(const lowp_cast& given, uint64_t given_seed, int64_t index = 0)
      : cast(given), seed(given_seed), offset(index), lane{}, kernel(nullptr), quick(nullptr) {
    if (!reaches<C>(cast)) return;
    lane = make_lane<C>(cast);
    // a format with the carrier's mantissa and exponents needs no rounding
    const bool exact = cast.kind == kFloat && lane.shift == 0 && draws(cast.rounding);
    kernel = cast_numbers_for<C>(lane.form, exact ? kTowardZero : cast.rounding);
    if (cast.rounding == kStochastic) quick = quick_cast_numbers_for<C>(lane);
  }

  // At most kBlock elements, from element `begin` of the task on. `out` may be `in`.
  void operator()(const typename C::Bits* in, typename C::Bits* out, int64_t begin, int64_t count) const {
    if (kernel == nullptr || !draws(cast.rounding)) return with_words(in, out, begin, count, nullptr);
    alignas(64) uint32_t words[kBlock + 4];
    with_words(in, out, begin, count, words_from(seed, offset + begin, count, words));
  }

  // The same, with the random words of these elements given; `begin` may be any index.
  void with_words(const typename C::Bits* in, typename C::Bits* out, int64_t begin, int64_t count,
                  const uint32_t* words) const {
    if (kernel == nullptr) return one_by_one(in, out, begin, count);
    if (cast.rounding == kNearestEven) {
      kernel(in, out, count, nullptr, lane);
      return;
    }
    const ExactArithmetic floors(true);
    alignas(64) typename C::Bits before[kBlock];
    if (in == out && cast.rounding == kStochastic)
      in = static_cast<const typename C::Bits*>(std::memcpy(before, in, sizeof(in[0]) * static_cast<size_t>(count)));
    if (quick != nullptr && !quick(in, out, count, words, lane)) return;
    if (kernel(in, out, count, words, lane)) one_by_one(in, out, begin, count);
  }

 private:
  void one_by_one(const typename C::Bits* in, typename C::Bits* out, int64_t begin, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const double value = cast_general(static_cast<double>(number(in[i])), cast, seed, offset + begin + i * step);
      out[i] = bits_of(static_cast<typename C::Number>(value));
    }
  }
};

// Puts infinities and NaN, quiet ones, back into the place of what a cast made of them.
template <class C>
static void keep(const typename C::Bits* in, typename C::Bits* out, int64_t count) {
  using Bits = typename C::Bits;
  constexpr Bits kInf = Constants<C>::kInf, kMagnitude = ~Bits{0} >> 1;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const Bits quiet = in[i] | (mask<C>((in[i] & kMagnitude) > kInf) & Constants<C>::kQuietNan);
    out[i] = choose<Bits>(mask<C>((in[i] & kInf) == kInf), quiet, out[i]);
  }
}

template <class C>
static void quantize_in(const Task& task, int64_t begin, int64_t end) {
  const Caster<C> caster(*task.cast, task.seed, task.index);
  const bool aligned = is_aligned(task.out, sizeof(typename C::Bits));
  const bool in_place = carrier_bytes(task.in_type) == sizeof(typename C::Bits) && task.in_type == task.out_type;
  const bool direct = in_place && aligned && !task.stream && !task.keeps;  // `out` may be `in`
  alignas(64) typename C::Bits buffer[kBlock], result[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* in = load<C>(task.in, task.in_type, first, count, buffer);
    if (direct) {
      caster(in, static_cast<typename C::Bits*>(task.out) + first, first, count);
    } else {
      caster(in, result, first, count);
      if (task.keeps) keep<C>(in, result, count);
      store<C>(result, task.out, task.out_type, first, count, task.stream);
    }
  }
  if (task.stream) finish_streaming();
}

static void quantize(const Task& task, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  if (task.in_type != kFp64 && reaches<F32>(*task.cast)) return quantize_in<F32>(task, begin, end);
  quantize_in<F64>(task, begin, end);
}

}  // namespace LOWP_ISA
}  // namespace lowp
