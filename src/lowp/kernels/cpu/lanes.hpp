// The branch-free cast of one number of a carrier (fp32 or fp64), which the compiler turns into vector code. Included
// once per instruction set.
//
// |x| = a, as bits. At and above the smallest normal number of the format the discarded part is the lowest `shift` bits
// of a, and a carry into the exponent field is the right result: integer arithmetic rounds. Below it the quantum is
// fixed: adding and subtracting `magic`, whose ulp is the quantum, gives the nearest multiple, and the exact difference
// between that and a decides the other modes. Where the format's exponents start where the carrier's do (bf16 in fp32),
// subnormal numbers of the carrier are a fixed-point number already: only the integer way is taken.
#pragma once

#include "general.hpp"

namespace lowp {
namespace LOWP_ISA {

template <class C>
struct Lane {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  using Number = typename C::Number;

  int shift;           // discarded bits of a normal number
  Bits keep;           // those that are kept
  Bits discard;        // those that are not
  Bits half;           // half of the last kept bit
  Bits below_half;     // half - 1, or 0 where nothing is discarded
  Bits last;           // 1, or 0 where nothing is discarded
  Bits odd;            // 1 where the code is odd when the last kept bit is 0 (formats without mantissa bits)
  Int smallest;        // bits of the smallest normal number; 0: no fixed quantum
  Number magic, quantum, half_quantum;
  Bits below_and, below_or;  // what is left of a result below the smallest normal number
  Int limit[2];        // largest magnitude, of positive and of negative results
  Int beyond[2];       // what a finite number beyond it becomes
  Int infinite;        // what an infinity becomes, and in the nearest modes a finite number beyond the limit
  Bits random_mask;    // the random bits that are used
  int random_left, random_right;  // from a random word to the discarded bits
  Number random_scale;            // 2**(used random bits) / quantum
  int random_drop;                // 32 - used random bits, below the smallest normal number
  Bits doubt;          // all ones where the first random word may not decide, for normal numbers
  Bits doubt_below;    // and below them
  bool plain;          // signed, with a zero and a minus zero, symmetric
  bool minus_zero, has_zero, is_signed;
  Int of_negative, of_zero;  // what an unsigned format makes of a negative number, and one without zero of a zero
  bool negative_keeps_sign;
};

// Whether the branch-free cast reaches: everything it computes with must be a normal number of the carrier.
template <class C>
static inline bool reaches(const lowp_cast& cast) {
  if (cast.kind == kInteger) return cast.bits <= C::kMantissa + 1;
  if (cast.kind != kFloat || cast.mantissa_bits > C::kMantissa) return false;
  if (cast.min_exponent == C::kMinExponent) return true;
  const int lowest = cast.min_exponent - cast.mantissa_bits;
  return lowest >= C::kMinExponent + C::kRandomBits + 2 && cast.min_exponent + C::kMantissa + 2 <= C::kBias;
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
  lane.random_right = lane.shift > 32 || lane.shift == 0 ? 0 : 32 - lane.shift;
  if (lane.shift == 0) lane.random_mask = 0;
  const int below = used < C::kRandomBits ? used : C::kRandomBits;
  lane.random_drop = 32 - below;
  lane.random_scale = power_of_two<C>(below) / lane.quantum;
  lane.doubt = cast.random_bits == 0 && lane.shift > 32 ? ~typename C::Bits{0} : 0;
  lane.doubt_below = used > C::kRandomBits || cast.random_bits == 0 ? ~typename C::Bits{0} : 0;
}

template <class C>
static Lane<C> make_lane(const lowp_cast& cast) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  const bool integer = cast.kind == kInteger;
  // an integer is a number below 2**kMantissa with the fixed quantum 1
  const int mantissa_bits = integer ? C::kMantissa : cast.mantissa_bits;
  const int min_exponent = integer ? C::kMantissa : cast.min_exponent;
  Lane<C> lane{};
  lane.shift = C::kMantissa - mantissa_bits;
  lane.discard = (Bits{1} << lane.shift) - 1;
  lane.keep = ~lane.discard;
  lane.half = lane.shift > 0 ? Bits{1} << (lane.shift - 1) : 0;
  lane.below_half = lane.shift > 0 ? lane.half - 1 : 0;
  // Without a mantissa "even" is the last bit of the exponent field; in e8m0 (no zero) a tie goes up, as in ml_dtypes.
  const bool ties_up = !integer && mantissa_bits == 0 && !cast.has_zero;
  lane.last = lane.shift > 0 && !ties_up;
  lane.odd = !integer && mantissa_bits == 0 ? static_cast<Bits>((C::kBias - cast.bias) & 1) | ties_up : 0;
  const bool flush = !integer && !cast.subnormals;
  const bool fixed = min_exponent > C::kMinExponent || flush || (!integer && !cast.has_zero);
  lane.smallest = fixed ? static_cast<Int>(bits_of(power_of_two<C>(min_exponent))) : 0;
  lane.quantum = power_of_two<C>(min_exponent - mantissa_bits);
  // where the whole carrier's range is reached, a quantum below its normal numbers is never used: results are flushed
  if (lane.quantum == 0) lane.quantum = power_of_two<C>(min_exponent);
  lane.half_quantum = lane.quantum / 2;
  lane.magic = power_of_two<C>(min_exponent + C::kMantissa - mantissa_bits);
  lane.below_and = flush ? 0 : ~Bits{0};
  lane.below_or = integer || cast.has_zero ? 0 : static_cast<Bits>(lane.smallest);
  lane.limit[0] = magnitude_bits<C>(cast.maximum);
  lane.limit[1] = integer ? magnitude_bits<C>(cast.minimum) : lane.limit[0];
  const Int infinity = static_cast<Int>(Constants<C>::kInf), nan = static_cast<Int>(Constants<C>::kQuietNan);
  for (int negative = 0; negative < 2; ++negative) {
    const bool inward = cast.rounding == kTowardZero || cast.rounding == (negative ? kUp : kDown);
    const Int out = cast.overflow == kNan ? nan : infinity;
    lane.beyond[negative] = cast.overflow == kSaturate || inward ? lane.limit[negative] : out;
  }
  lane.infinite = cast.overflow == kSaturate ? -1 : cast.overflow == kNan ? nan : infinity;
  lane.minus_zero = !integer && cast.is_signed && cast.specials != kFnuz;
  lane.has_zero = integer || cast.has_zero;
  lane.is_signed = integer || cast.is_signed;
  lane.plain = lane.minus_zero && lane.has_zero;
  lane.negative_keeps_sign = cast.specials != kFinite;
  lane.of_negative = cast.specials == kFinite ? magnitude_bits<C>(cast.minimum) : nan;
  lane.of_zero = lane.of_negative;
  set_randomness(lane, cast);
  return lane;
}

template <class C>
static inline typename C::Bits choose(bool condition, typename C::Bits yes, typename C::Bits no) {
  return condition ? yes : no;
}

// A whole number below 2**24 or 2**32 as a number of the carrier. (AVX2 converts no 64-bit integers.)
static inline float small_number(uint32_t value) { return static_cast<float>(static_cast<int32_t>(value)); }
static inline double small_number(uint64_t value) { return number(value | 0x4330000000000000) - 0x1p52; }

// |x| rounded to the format's grid, its exponents unbounded above.
template <class C, int MODE>
static inline typename C::Bits rounded(typename C::Bits bits, typename C::Bits word, const Lane<C>& lane,
                                       typename C::Bits& doubt) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  using Number = typename C::Number;
  const Bits a = bits & Constants<C>::kMagnitude;
  const bool below = static_cast<Int>(a) < lane.smallest;
  if constexpr (MODE == kNearestEven) {
    const Bits up = lane.below_half + (((a >> lane.shift) & lane.last) ^ lane.odd);
    const Bits normal = (a + up) & lane.keep;
    const Bits fixed = bits_of((number(a) + lane.magic) - lane.magic);
    return choose<C>(below, (fixed & lane.below_and) | lane.below_or, normal);
  }
  const Bits negative = static_cast<Bits>(0) - (bits >> (C::kWidth - 1));
  const Number value = number(choose<C>(below, a, 0));
  const Number nearest = (value + lane.magic) - lane.magic;
  const Number floor = nearest > value ? nearest - lane.quantum : nearest;
  const Number rest = value - floor;
  Bits up = 0;
  Number step = 0;
  if constexpr (MODE == kNearestAway) {
    up = lane.half;
    step = rest >= lane.half_quantum ? lane.quantum : 0;
  } else if constexpr (MODE == kUp || MODE == kDown) {
    const Bits away = MODE == kUp ? ~negative : negative;
    up = lane.discard & away;
    step = number(bits_of(rest > 0 ? lane.quantum : Number{0}) & away);
  } else if constexpr (MODE == kStochastic) {
    // The carry of `discarded + (all ones - random)` is set exactly where random < discarded.
    const Bits noise = ((word ^ 0xffffffffu) & lane.random_mask) << lane.random_left >> lane.random_right;
    up = noise;
    const Number random = small_number(word >> lane.random_drop);
    const Number fraction = rest * lane.random_scale;
    step = fraction >= random + 1 ? lane.quantum : 0;
    const Bits unsure_below = (fraction > random) & (fraction < random + 1) ? lane.doubt_below : 0;
    const Bits unsure = (a & lane.discard) >> lane.random_left == word ? lane.doubt : 0;
    doubt |= below ? unsure_below : unsure;
  }
  const Bits normal = (a + up) & lane.keep;
  const Bits fixed = bits_of(floor + step);
  return choose<C>(below, (fixed & lane.below_and) | lane.below_or, normal);
}

// The value that a number becomes. PLAIN: a signed format with a zero and a minus zero, of symmetric range.
template <class C, int MODE, bool PLAIN>
static inline typename C::Bits cast_lane(typename C::Bits bits, typename C::Bits word, const Lane<C>& lane,
                                         typename C::Bits& doubt) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  constexpr bool kDirected = MODE == kTowardZero || MODE == kUp || MODE == kDown;
  const Bits a = bits & Constants<C>::kMagnitude;
  const Int magnitude = static_cast<Int>(a);
  Bits sign = bits & Constants<C>::kSign;
  const bool negative = sign != 0;
  Int result = static_cast<Int>(rounded<C, MODE>(bits, word, lane, doubt));
  const Int limit = PLAIN || !negative ? lane.limit[0] : lane.limit[1];
  const Int beyond = PLAIN && !kDirected ? lane.beyond[0] : negative ? lane.beyond[1] : lane.beyond[0];
  result = result > limit ? beyond : result;
  if constexpr (kDirected) {
    const Int infinite = lane.infinite < 0 ? limit : lane.infinite;
    result = magnitude == static_cast<Int>(Constants<C>::kInf) ? infinite : result;
  }
  if constexpr (!PLAIN) {
    result = !lane.has_zero & (magnitude == 0) ? lane.of_zero : result;
    const bool refused = !lane.is_signed & negative & (magnitude != 0);
    result = refused ? lane.of_negative : result;
    sign = (refused | (!lane.has_zero & (magnitude == 0))) & !lane.negative_keeps_sign ? 0 : sign;
    sign = !lane.minus_zero & (result == 0) ? 0 : sign;
  }
  result = magnitude > static_cast<Int>(Constants<C>::kInf) ? static_cast<Int>(Constants<C>::kQuietNan) : result;
  if constexpr (!PLAIN)  // NaN keeps its sign, whatever the format
    sign = magnitude > static_cast<Int>(Constants<C>::kInf) ? bits & Constants<C>::kSign : sign;
  return static_cast<Bits>(result) | sign;
}

template <class C, int MODE, bool PLAIN>
__attribute__((noinline)) static bool cast_numbers(const typename C::Bits* in, typename C::Bits* out, int64_t count,
                                                   const uint32_t* words, const Lane<C>& given) {
  const Lane<C> lane = given;
  typename C::Bits doubt = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const typename C::Bits word = MODE == kStochastic ? words[i] : 0;
    out[i] = cast_lane<C, MODE, PLAIN>(in[i], word, lane, doubt);
  }
  return doubt != 0;
}

template <class C>
using CastNumbers = bool (*)(const typename C::Bits*, typename C::Bits*, int64_t, const uint32_t*, const Lane<C>&);

template <class C, bool PLAIN>
static CastNumbers<C> cast_numbers_for(int rounding) {
  switch (rounding) {
    case kNearestEven: return cast_numbers<C, kNearestEven, PLAIN>;
    case kNearestAway: return cast_numbers<C, kNearestAway, PLAIN>;
    case kTowardZero: return cast_numbers<C, kTowardZero, PLAIN>;
    case kUp: return cast_numbers<C, kUp, PLAIN>;
    case kDown: return cast_numbers<C, kDown, PLAIN>;
    default: return cast_numbers<C, kStochastic, PLAIN>;
  }
}

}  // namespace LOWP_ISA
}  // namespace lowp
