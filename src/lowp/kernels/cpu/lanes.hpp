// The branch-free cast of one number of a carrier (fp32 or fp64), which the compiler vectorizes. Included
// once per instruction set.
//
// |x| = a, as bits. At and above the smallest normal number of the format the discarded part is the lowest `shift` bits
// of a, and a carry into the exponent field is the right result: integer arithmetic rounds. Below it the quantum is
// fixed: adding and subtracting `magic`, whose ulp is the quantum, gives the nearest multiple; with the processor
// rounding toward zero it gives the multiple below, and the exact rest decides the other modes. If the exponents of the
// format start where the carrier's do (bf16 in fp32), subnormal numbers of the carrier are fixed-point numbers already,
// and only integer arithmetic is used.
#pragma once

#include "general.hpp"

namespace lowp {
namespace LOWP_ISA {

// Special cases of a format.
enum Form {
  kPlain,        // none: signed, with a minus zero, symmetric
  kNoMinusZero,  // the code of minus zero is NaN
  kWhole,        // integers: no minus zero, saturation to a range that may be asymmetric
  kScale,        // e8m0: neither zero nor negative numbers, NaN for them
  kUnsigned,     // other unsigned formats
};

template <class C>
struct Lane {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  using Number = typename C::Number;

  int shift;           // discarded bits of a normal number
  Bits keep;           // mask of the kept bits
  Bits discard;        // mask of the discarded bits
  Bits half;           // half of the last kept bit
  Bits below_half;     // half - 1, or 0 if no bits are discarded
  Bits last;           // 1, or 0 if no bits are discarded
  Bits odd;            // 1 if the code is odd when the last kept bit is 0 (formats without mantissa bits)
  Int smallest;        // bits of the smallest normal number; 0: no fixed quantum
  Number magic, quantum, half_quantum;
  Bits at_least;       // the smallest number of a format without zero
  Int limit[2];        // largest magnitude, of positive and of negative results
  Int beyond[2];       // result for a finite number beyond it
  Int infinite;        // result for an infinity unless it saturates
  Bits keeps_infinity;  // mask: an infinity does not saturate
  Bits random_mask;    // the used random bits
  int random_left, random_right;  // from a random word to the discarded bits
  Number random_scale;            // 2**(random bits that a fraction is compared with) / quantum
  int random_drop;                // 32 - used random bits, below the smallest normal number
  // stochastic rounding that rounds the discarded part to the random bits
  int random_place;               // of the last random bit, among the discarded bits
  Bits random_half, random_even;  // half of that place, minus 1 for ties to even; 1 where its bit decides a tie
  Bits random_ties;               // 1 if a tie is rounded up
  Bits doubt;          // all ones where the first random word may not decide, for normal numbers
  Bits doubt_below;    // the same below normal numbers
  Bits doubt_quick;    // the same for rounded_quickly
  int form;            // Form
  // masks, all ones or zero, of unsigned formats
  Bits refuses_negative, refuses_zero;  // an unsigned format; one without a zero
  Bits refused;                         // result for such a number
  Bits refused_positive;                // mask: the result has no sign
};

// e8m0 in fp32: its smallest number is half of fp32's smallest normal one. There is one step below that, of 2**-127.
template <class C>
static inline bool is_one_below(const lowp_cast& cast) {
  return cast.mantissa_bits == 0 && !cast.has_zero && cast.min_exponent == C::kMinExponent - 1;
}

// Whether the branch-free cast supports the format: all its operands must be normal numbers of the carrier.
template <class C>
static inline bool reaches(const lowp_cast& cast) {
  // fp32 has 24 bits, and rounding to the random bits reads one more bit
  if (C::kWidth == 32 && rounds_share(cast.rounding) && cast.random_bits >= C::kRandomBits) return false;
  if (cast.kind == kInteger) return cast.bits <= C::kMantissa + 1;
  if (cast.kind != kFloat || cast.mantissa_bits > C::kMantissa) return false;
  if (cast.min_exponent == C::kMinExponent) return true;
  if (cast.mantissa_bits == C::kMantissa && draws(cast.rounding)) return false;
  if (is_one_below<C>(cast)) return !draws(cast.rounding);
  const int lowest = cast.min_exponent - cast.mantissa_bits;
  return lowest >= C::kMinExponent + C::kRandomBits + 2 && cast.min_exponent + C::kMantissa + 3 <= C::kBias;
}

template <class C>
static inline typename C::Int magnitude_bits(double value) {
  return static_cast<typename C::Int>(bits_of(static_cast<typename C::Number>(__builtin_fabs(value))));
}

template <class C>
static inline void set_randomness(Lane<C>& lane, const lowp_cast& cast) {
  const int used = cast.random_bits > 0 ? cast.random_bits : 32;
  lane.random_mask = static_cast<typename C::Bits>(0xffffffffu << (32 - used) & 0xffffffffu);
  lane.random_left = lane.shift > 32 ? lane.shift - 32 : 0;
  lane.random_right = lane.shift > 32 || lane.shift == 0 ? 0 : 32 - lane.shift;  // 0: not used
  const int below = used < C::kRandomBits ? used : C::kRandomBits;
  lane.random_drop = 32 - below;
  const int scale_bits = C::kWidth == 32 && !rounds_share(cast.rounding) ? C::kRandomBits : below;
  lane.random_scale = lane.quantum != 0 ? power_of_two<C>(scale_bits) / lane.quantum : 0;
  lane.doubt = cast.random_bits == 0 && lane.shift > 32 ? ~typename C::Bits{0} : 0;
  const bool finer = used < lane.shift, to_even = cast.rounding == kStochasticC;
  lane.random_place = finer ? lane.shift - used : 0;
  lane.random_half = finer ? (typename C::Bits{1} << (lane.random_place - 1)) - to_even : 0;
  lane.random_even = finer && to_even;
  lane.random_ties = !to_even;
  lane.doubt_quick = used > lane.shift ? ~typename C::Bits{0} : 0;
  lane.doubt_below = used > C::kRandomBits || cast.random_bits == 0 ? ~typename C::Bits{0} : 0;
}

template <class C>
static Lane<C> make_lane(const lowp_cast& cast) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  const bool integer = cast.kind == kInteger;
  // integers are numbers below 2**kMantissa with the fixed quantum 1
  const int mantissa_bits = integer ? C::kMantissa : cast.mantissa_bits;
  const int min_exponent = integer ? C::kMantissa : cast.min_exponent;
  Lane<C> lane{};
  lane.shift = C::kMantissa - mantissa_bits;
  lane.discard = (Bits{1} << lane.shift) - 1;
  lane.keep = ~lane.discard;
  lane.half = lane.shift > 0 ? Bits{1} << (lane.shift - 1) : 0;
  lane.below_half = lane.shift > 0 ? lane.half - 1 : 0;
  // Without a mantissa "even" is the last bit of the exponent field; in e8m0 a tie is rounded up, as in ml_dtypes.
  const bool ties_up = !integer && mantissa_bits == 0 && !cast.has_zero;
  lane.last = lane.shift > 0 && !ties_up;
  lane.odd = !integer && mantissa_bits == 0 ? static_cast<Bits>((C::kBias - cast.bias) & 1) | ties_up : 0;
  const bool one_below = !integer && is_one_below<C>(cast);
  const bool flush = !integer && !cast.subnormals && !one_below;
  const int fixed_below = one_below ? min_exponent + 1 : min_exponent;
  const bool fixed = fixed_below > C::kMinExponent || flush || one_below;
  lane.smallest = fixed ? static_cast<Int>(bits_of(power_of_two<C>(fixed_below))) : 0;
  if (flush) {  // a quantum so large that all smaller numbers round to zero, without a step up
    lane.magic = power_of_two<C>(min_exponent + C::kMantissa + 3);
  } else if (fixed) {
    lane.magic = power_of_two<C>(min_exponent + C::kMantissa - mantissa_bits);
    lane.quantum = one_below ? power_of_two<C>(fixed_below) / 2 : power_of_two<C>(min_exponent - mantissa_bits);
  }
  lane.half_quantum = lane.quantum / 2;
  lane.at_least = integer || cast.has_zero ? 0 : static_cast<Bits>(magnitude_bits<C>(cast.minimum));
  lane.limit[0] = magnitude_bits<C>(cast.maximum);
  lane.limit[1] = integer ? magnitude_bits<C>(cast.minimum) : lane.limit[0];
  const Int infinity = static_cast<Int>(Constants<C>::kInf), nan = static_cast<Int>(Constants<C>::kQuietNan);
  for (int negative = 0; negative < 2; ++negative) {
    const bool inward = rounds_inward(cast.rounding, negative);
    const Int out = cast.overflow == kNan ? nan : infinity;
    lane.beyond[negative] = cast.overflow == kSaturate || inward ? lane.limit[negative] : out;
  }
  lane.infinite = cast.overflow == kNan ? nan : infinity;
  lane.keeps_infinity = cast.overflow == kSaturate ? 0 : ~Bits{0};
  const bool minus_zero = !integer && cast.minus_zero;
  const bool has_zero = integer || cast.has_zero, is_signed = integer || cast.is_signed;
  lane.form = minus_zero ? kPlain : integer ? kWhole : is_signed ? kNoMinusZero : kUnsigned;
  if (!has_zero && cast.has_nan) lane.form = kScale;
  lane.refuses_negative = is_signed ? 0 : ~Bits{0};
  lane.refuses_zero = has_zero ? 0 : ~Bits{0};
  lane.refused = static_cast<Bits>(cast.has_nan ? nan : magnitude_bits<C>(cast.minimum));
  lane.refused_positive = cast.has_nan ? 0 : ~Bits{0};
  set_randomness(lane, cast);
  return lane;
}

// All ones if the condition holds. Conditions are masks, which the compiler vectorizes most readily.
template <class C>
static inline typename C::Bits mask(bool condition) {
  return static_cast<typename C::Bits>(0) - static_cast<typename C::Bits>(condition);
}

template <class Bits>
static inline Bits choose(Bits mask, Bits yes, Bits no) {
  return (yes & mask) | (no & ~mask);
}

// An integer below 2**32, or in fp32 below 2**23. (AVX2 does not convert 64-bit integers.)
static inline double whole_number(uint64_t value) { return number(value | 0x4330000000000000) - 0x1p52; }
static inline float whole_number(uint32_t value) { return number(value | 0x4b000000) - 0x1p23f; }

// Stochastic rounding with only the lowest `shift` bits of the fraction, which are all bits above the smallest normal
// number. Below it, adding that number makes the quantum the same as above; the lost bits matter once in 2**shift times,
// in which the slower kernel decides.
constexpr int kStochasticQuick = 9;
constexpr int kQuickShift = 10;  // with fewer bits the slower kernel would run too often

template <class C, int FORM>
static inline typename C::Bits rounded_quickly(typename C::Bits a, typename C::Bits below, typename C::Bits word,
                                               const Lane<C>& lane, typename C::Bits& doubt) {
  using Bits = typename C::Bits;
  const typename C::Number offset = number(static_cast<Bits>(lane.smallest));
  const Bits base = choose<Bits>(below, bits_of(number(a) + offset), a);
  const Bits sum = base + ((~word & lane.random_mask) >> lane.random_right);
  doubt |= mask<C>((sum | lane.keep) == ~Bits{0}) & below;
  const Bits kept = sum & lane.keep;
  return choose<Bits>(below, bits_of(number(kept) - offset), kept);
}

// |x| rounded to the format's grid, without an upper limit of the exponent.
template <class C, int MODE, int FORM>
static inline typename C::Bits rounded(typename C::Bits bits, typename C::Bits word, const Lane<C>& lane,
                                       typename C::Bits& doubt) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  using Number = typename C::Number;
  const Bits a = bits & Constants<C>::kMagnitude;
  const Bits below = mask<C>(static_cast<Int>(a) < lane.smallest);
  if constexpr (MODE == kNearestEven) {
    const Bits up = lane.below_half + (((a >> lane.shift) & lane.last) ^ lane.odd);
    const Bits normal = (a + up) & lane.keep;
    const Bits fixed = bits_of((number(a) + lane.magic) - lane.magic);
    return choose<Bits>(below, fixed, normal);
  }
  if constexpr (MODE == kStochasticQuick) return rounded_quickly<C, FORM>(a, below, word, lane, doubt);
  const Bits negative = static_cast<Bits>(0) - (bits >> (C::kWidth - 1));
  const Number value = number(a & below);
  const Bits quantum = bits_of(lane.quantum);
  const Number floor = (value + lane.magic) - lane.magic;  // rounds toward zero here: see cast_numbers
  const Number rest = value - floor;
  Bits up = 0;
  Bits step = 0;  // the quantum, or zero
  const auto shifted = [&](Bits noise) {  // random bits, each flipped, to the discarded bits
    if constexpr (C::kWidth == 64) noise <<= lane.random_left;
    return FORM == kWhole ? Bits{0} : noise >> lane.random_right;
  };
  if constexpr (MODE == kNearestAway) {
    up = lane.half;
    step = mask<C>(rest >= lane.half_quantum) & quantum;
  } else if constexpr (MODE == kUp || MODE == kDown) {
    const Bits away = MODE == kUp ? ~negative : negative;
    up = lane.discard & away;
    step = mask<C>(rest > 0) & quantum & away;
  } else if constexpr (MODE == kToOdd) {
    const Bits even = (((a >> lane.shift) & lane.last) ^ lane.odd) ^ 1;
    up = (mask<C>((a & lane.discard) != 0) & even) << lane.shift;
    step = mask<C>(rest > 0) & quantum & ((bits_of(value + lane.magic) & 1) - 1);
  } else if constexpr (MODE == kStochasticB) {  // and C: the same sum for a discarded part that is rounded first
    up = shifted(~word & lane.random_mask) + lane.random_half + ((a >> lane.random_place) & lane.random_even);
    const Bits drawn = word >> lane.random_drop;
    const Number fraction = rest * lane.random_scale, half = whole_number(drawn) + Number{0.5};
    const Bits tie = static_cast<Bits>(0) - ((drawn | lane.random_ties) & 1);
    step = (mask<C>(fraction > half) | (mask<C>(fraction == half) & tie)) & quantum;
  } else if constexpr (MODE == kStochastic) {
    // The carry of `discarded + (all ones - random)` is set exactly where random < discarded.
    const Bits noise = ~word & lane.random_mask;
    up = shifted(noise);
    const Number fraction = rest * lane.random_scale;
    if constexpr (C::kWidth == 32) {
      // Below, the same carry with the 24 bits of a significand. A sum of all ones is in doubt; above the
      // smallest normal number the first word always decides.
      constexpr Int kOnes = (1 << C::kRandomBits) - 1;
      const Int sum = static_cast<Int>(fraction) + static_cast<Int>(noise >> (32 - C::kRandomBits));
      step = mask<C>(sum > kOnes) & quantum;
      doubt |= mask<C>(sum == kOnes);
    } else {
      const Number random = whole_number(word >> lane.random_drop);
      const Bits sure = mask<C>(fraction >= random + 1);
      step = sure & quantum;
      const Bits unsure = mask<C>((a & lane.discard) >> lane.random_left == word) & lane.doubt;
      doubt |= choose<Bits>(below, mask<C>(fraction > random) & ~sure & lane.doubt_below, unsure);
    }
  }
  const Bits normal = (a + up) & lane.keep;
  const Bits fixed = bits_of(floor + number(step));
  return choose<Bits>(below, fixed, normal);
}

// The value of a number after the cast.
template <class C, int MODE, int FORM>
static inline typename C::Bits cast_lane(typename C::Bits bits, typename C::Bits word, const Lane<C>& lane,
                                         typename C::Bits& doubt) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  constexpr bool kDirected = MODE == kTowardZero || MODE == kToOdd || MODE == kUp || MODE == kDown;
  const Bits a = bits & Constants<C>::kMagnitude;
  const Int magnitude = static_cast<Int>(a);
  Bits sign = bits ^ a;
  const Bits negative = static_cast<Bits>(0) - (bits >> (C::kWidth - 1));
  Bits result = rounded<C, MODE, FORM>(bits, word, lane, doubt);
  Bits limit = static_cast<Bits>(lane.limit[0]), beyond = static_cast<Bits>(lane.beyond[0]);
  if constexpr (FORM == kWhole) {
    limit += negative & static_cast<Bits>(lane.limit[1] - lane.limit[0]);
    result = static_cast<Int>(result) < static_cast<Int>(limit) ? result : limit;
  } else {
    if constexpr (kDirected) beyond ^= negative & static_cast<Bits>(lane.beyond[1] ^ lane.beyond[0]);
    result = choose<Bits>(mask<C>(static_cast<Int>(result) > static_cast<Int>(limit)), beyond, result);
  }
  if constexpr (kDirected && FORM != kWhole) {
    const Bits infinite = choose<Bits>(lane.keeps_infinity, static_cast<Bits>(lane.infinite), limit);
    result = choose<Bits>(mask<C>(a == Constants<C>::kInf), infinite, result);
  }
  if constexpr (FORM == kNoMinusZero || FORM == kWhole) sign &= mask<C>(result != 0);
  if constexpr (FORM == kUnsigned) {
    result = static_cast<Int>(result) < static_cast<Int>(lane.at_least) ? lane.at_least : result;
    const Bits zero = mask<C>(a == 0);
    const Bits refused = choose<Bits>(zero, lane.refuses_zero, negative & lane.refuses_negative);
    result = choose<Bits>(refused, lane.refused, result);
    sign &= ~((refused & lane.refused_positive) | mask<C>(result == 0));
  }
  if constexpr (FORM == kScale) {
    result = static_cast<Int>(result) < static_cast<Int>(lane.at_least) ? lane.at_least : result;
    const bool refused = bits - 1 > Constants<C>::kInf - 1;  // zero wraps around; minus zero and below are larger
    return choose<Bits>(mask<C>(refused), Constants<C>::kQuietNan | sign, result);
  }
  const Bits nan = mask<C>(magnitude > static_cast<Int>(Constants<C>::kInf));
  result = choose<Bits>(nan, Constants<C>::kQuietNan, result);
  if constexpr (FORM == kUnsigned) sign = choose<Bits>(nan, bits & Constants<C>::kSign, sign);
  return result | sign;
}

// For modes other than nearest-even the processor must round toward zero. Returns true if a result is in doubt.
template <class C, int MODE, int FORM>
__attribute__((noinline)) static bool cast_numbers(const typename C::Bits* in, typename C::Bits* out, int64_t count,
                                                   const uint32_t* words, const Lane<C>& given) {
  const Lane<C> lane = given;
  typename C::Bits doubt = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const typename C::Bits word = draws(MODE) || MODE == kStochasticQuick ? words[i] : 0;
    out[i] = cast_lane<C, MODE, FORM>(in[i], word, lane, doubt);
  }
  if (MODE == kStochasticQuick) return (doubt & lane.doubt_quick) != 0;
  return (doubt & (C::kWidth == 32 ? lane.doubt_below : ~typename C::Bits{0})) != 0;
}

template <class C>
using CastNumbers = bool (*)(const typename C::Bits*, typename C::Bits*, int64_t, const uint32_t*, const Lane<C>&);

template <class C, int FORM>
static CastNumbers<C> cast_numbers_of_form(int rounding) {
  switch (rounding) {
    case kNearestEven: return cast_numbers<C, kNearestEven, FORM>;
    case kNearestAway: return cast_numbers<C, kNearestAway, FORM>;
    case kTowardZero: return cast_numbers<C, kTowardZero, FORM>;
    case kUp: return cast_numbers<C, kUp, FORM>;
    case kDown: return cast_numbers<C, kDown, FORM>;
    case kToOdd: return cast_numbers<C, kToOdd, FORM>;
    case kStochasticB:
    case kStochasticC: return cast_numbers<C, kStochasticB, FORM>;
    default: return cast_numbers<C, kStochastic, FORM>;
  }
}

// The kernel for stochastic rounding with fewer operations, or null.
template <class C>
static CastNumbers<C> quick_cast_numbers_for(const Lane<C>& lane) {
  const bool flushes = lane.smallest != 0 && lane.quantum == 0;
  if (C::kWidth != 32 || lane.shift < kQuickShift || flushes) return nullptr;
  if (lane.form == kPlain) return cast_numbers<C, kStochasticQuick, kPlain>;
  if (lane.form == kNoMinusZero) return cast_numbers<C, kStochasticQuick, kNoMinusZero>;
  return nullptr;
}

template <class C>
static CastNumbers<C> cast_numbers_for(int form, int rounding) {
  if (form == kPlain) return cast_numbers_of_form<C, kPlain>(rounding);
  if (form == kNoMinusZero) return cast_numbers_of_form<C, kNoMinusZero>(rounding);
  if (form == kWhole) return cast_numbers_of_form<C, kWhole>(rounding);
  if (form == kScale) return cast_numbers_of_form<C, kScale>(rounding);
  return cast_numbers_of_form<C, kUnsigned>(rounding);
}

}  // namespace LOWP_ISA
}  // namespace lowp
