// Values of a format in the type of the tensor, a block at a time. Included once per instruction set.
#pragma once

#include "convert.hpp"

namespace lowp {
namespace LOWP_ISA {

static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

// a * b + c, of which a * b is exact, so that one rounding gives the bits of two.
static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Rounding of floats to nearest even by a sum: of |x| and a power of two whose ulp is the quantum. For formats with a mantissa and
// a small range.
struct Quanta {
  int32_t smallest, limit;  // the bits of the smallest normal number and of the largest one
  int shift, sign_shift;
  float up;                 // from the exponent of a number to the power
  int32_t base, code_limit;
  uint32_t sign;

  explicit Quanta(const lowp_cast& cast)
      : smallest(magnitude_bits<F32>(power_of_two<F32>(cast.min_exponent))), limit(magnitude_bits<F32>(cast.maximum)),
        shift(23 - least(cast.mantissa_bits, 16)), sign_shift(32 - least(cast.bits, 32)), up(power_of_two<F32>(shift)),
        base(base_of(smallest)), code_limit(((limit - smallest) >> shift) + (0x800000 >> shift)), sign(0x80000000 >> sign_shift) {}

  static bool serve(const lowp_cast& cast) {
    return cast.kind == kFloat && cast.rounding == kNearestEven && cast.mantissa_bits > 0 && cast.mantissa_bits < 16 && cast.minus_zero &&
           cast.is_signed && cast.subnormals && cast.has_zero && cast.min_exponent > -60 && cast.maximum < 0x1p60;
  }

  static int32_t exponent_of(int32_t magnitude, int32_t smallest) { return most(magnitude & 0x7f800000, smallest); }

  float sum_of(int32_t magnitude, int32_t exponent) const {
    return multiply_add(number(static_cast<uint32_t>(exponent)), up, number(static_cast<uint32_t>(magnitude)));
  }

  float rounded(float sum, int32_t exponent) const { return multiply_add(number(static_cast<uint32_t>(exponent)), -up, sum); }

  // The number of quanta is in the lowest bits of a sum: it is the code, after those of smaller exponents. `base`: of the code of
  // zero, under the smallest normal number.
  int32_t base_of(int32_t under) const { return (shift << 23) + (under >> shift); }
  int32_t code_of(float sum, int32_t exponent, int32_t from) const {
    return static_cast<int32_t>(bits_of(sum)) - exponent + (exponent >> shift) - from;
  }
};

// Numbers rounded to nearest; larger ones than the largest become `beyond`, infinities too. With `kKeeps` these stay, and NaN keep
// their bits but for becoming quiet.
template <bool kKeeps>
__attribute__((noinline)) static void round_nearest(const uint32_t* in, uint32_t* out, int64_t count, const Quanta& given, uint32_t beyond) {
  constexpr int32_t kInf = static_cast<int32_t>(Constants<F32>::kInf), kFirst = kKeeps ? kInf - 1 : kInf;
  const Quanta quanta = given;
  const int32_t highest = quanta.limit + 0x800000;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const int32_t a = static_cast<int32_t>(in[i] & 0x7fffffff), limited = least(a, highest);
    const int32_t exponent = Quanta::exponent_of(limited, quanta.smallest);
    const int32_t found = static_cast<int32_t>(bits_of(quanta.rounded(quanta.sum_of(limited, exponent), exponent)));
    uint32_t result = found > quanta.limit ? beyond : static_cast<uint32_t>(found);
    const uint32_t quiet = static_cast<uint32_t>(a) | (mask<F32>(a > kInf) & Constants<F32>::kQuietNan);
    result = a > kFirst ? (kKeeps ? quiet : Constants<F32>::kQuietNan) : result;
    out[i] = result | (in[i] & 0x80000000);
  }
}

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

// A cast prepared for one call: the vector kernel, or the general function if that does not support it.
template <class C>
struct Caster {
  const lowp_cast& cast;
  uint64_t seed;
  int64_t offset, step = 1;  // of the indices of neighbours
  Lane<C> lane;
  CastNumbers<C> kernel, quick;
  bool keeps;  // infinities and NaN; then `out` is not `in`
  bool is_nearest;  // by `round_nearest`
  Quanta quanta;

  Caster(const lowp_cast& given, uint64_t given_seed, int64_t index = 0, bool given_keeps = false)
      : cast(given), seed(given_seed), offset(index), lane{}, kernel(nullptr), quick(nullptr), keeps(given_keeps),
        is_nearest(C::kWidth == 32 && Quanta::serve(given)), quanta(given) {
    if (!reaches<C>(cast)) return;
    lane = make_lane<C>(cast);
    // a format with the carrier's mantissa and exponents needs no rounding
    const bool exact = cast.kind == kFloat && lane.shift == 0 && draws(cast.rounding);
    kernel = cast_numbers_for<C>(lane.form, exact ? kTowardZero : cast.rounding);
    if (cast.rounding == kStochastic) quick = quick_cast_numbers_for<C>(lane);
  }

  // At most kBlock elements, from element `begin` of the task on. `out` may be `in`.
  void operator()(const typename C::Bits* in, typename C::Bits* out, int64_t begin, int64_t count) const {
    alignas(64) uint32_t words[kBlock + 4];
    const bool drawn = kernel != nullptr && draws(cast.rounding);
    with_words(in, out, begin, count, drawn ? words_from(seed, offset + begin, count, words) : nullptr);
    if (keeps && !is_nearest) keep<C>(in, out, count);
  }

  // The same, with the random words of these elements given; `begin` may be any index.
  void with_words(const typename C::Bits* in, typename C::Bits* out, int64_t begin, int64_t count,
                  const uint32_t* words) const {
    if (kernel == nullptr) return one_by_one(in, out, begin, count);
    if constexpr (C::kWidth == 32)
      if (is_nearest) return (keeps ? round_nearest<true> : round_nearest<false>)(in, out, count, quanta, static_cast<uint32_t>(lane.beyond[0]));
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

template <class C>
static void quantize_in(const Task& task, int64_t begin, int64_t end) {
  const Caster<C> caster(*task.cast, task.seed, task.index, task.keeps);
  const bool aligned = is_aligned(task.out, sizeof(typename C::Bits));
  const bool in_place = carrier_bytes(task.in_type) == sizeof(typename C::Bits) && task.in_type == task.out_type;
  const bool direct = in_place && aligned && !task.stream && !task.keeps;  // `out` may be `in`
  const bool narrows = C::kWidth == 32 && is_type(*task.cast, task.out_type) && is_aligned(task.out, sizeof(uint16_t));
  alignas(64) typename C::Bits buffer[kBlock], result[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* in = load<C>(task.in, task.in_type, first, count, buffer);
    if (narrows && narrow_exactly(reinterpret_cast<const float*>(in), task.out_type, static_cast<uint16_t*>(task.out) + first, count))
      continue;  // there is no NaN
    if (direct) {
      caster(in, static_cast<typename C::Bits*>(task.out) + first, first, count);
    } else {
      caster(in, result, first, count);
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
