// Casts of one number at a time to any format within fp64, following the definition. The vector kernels use it for formats
// whose exponents they do not support, and for the one element in 2**24 (fp32; in 2**32, fp64) for which the first random
// bits do not decide.
#pragma once

#include "philox.hpp"

namespace lowp {
namespace LOWP_ISA {

// Bits 32 * word .. 32 * word + 31 after the binary point of remainder / 2**drop.
static inline uint32_t fraction_word(uint64_t remainder, int drop, int word) {
  const int left = 32 * (word + 1) - drop;
  if (left >= 32) return 0;
  if (left >= 0) return static_cast<uint32_t>(remainder << left);
  return left > -64 ? static_cast<uint32_t>(remainder >> -left) : 0;
}

// A fraction in units of the random bits: truncated, or rounded. `first` and `second` are the 64 bits after its binary
// point, `more`: whether further bits are set.
static inline uint64_t in_units(uint32_t first, uint32_t second, bool more, const lowp_cast& cast) {
  const int cut = 64 - cast.random_bits;  // 32 .. 63
  const uint64_t bits = uint64_t{first} << 32 | second, units = bits >> cut;
  const uint64_t rest = bits & ((uint64_t{1} << cut) - 1), half = uint64_t{1} << (cut - 1);
  if (cast.rounding == kStochasticB) return units + (rest >= half);
  if (cast.rounding == kStochasticC) return units + (rest > half || (rest == half && (more || units & 1)));
  return units;
}

// Whether a uniform number of 160 (or random_bits) bits is below the fraction remainder / 2**drop.
static inline bool random_below(uint64_t remainder, int drop, const lowp_cast& cast, uint64_t seed, int64_t index) {
  const uint64_t position = static_cast<uint64_t>(index);
  uint32_t words[4];
  philox_at(seed, position / 4, 0, words);
  const uint32_t first = words[position % 4], fraction = fraction_word(remainder, drop, 0);
  if (cast.random_bits > 0) {
    // the bits after the first 64; remainder < 2**53
    const bool more = drop > 64 && (drop >= 128 ? remainder : remainder & ((uint64_t{1} << (drop - 64)) - 1)) != 0;
    const uint64_t units = in_units(fraction, fraction_word(remainder, drop, 1), more, cast);
    return first >> (32 - cast.random_bits) < units;
  }
  if (first != fraction) return first < fraction;
  philox_at(seed, position, 1, words);
  for (int word = 0; word < 4; ++word) {
    const uint32_t bits = fraction_word(remainder, drop, word + 1);
    if (words[word] != bits) return words[word] < bits;
  }
  return false;
}

static inline double with_sign(double magnitude, bool negative) { return negative ? -magnitude : magnitude; }
static inline double quiet_nan(bool negative) { return with_sign(number(Constants<F64>::kQuietNan), negative); }

// The result for a number rounded beyond the largest value (`finite`), or for an infinity.
static inline double overflowed(const lowp_cast& cast, bool negative, bool finite) {
  if (cast.overflow == kSaturate || (finite && rounds_inward(cast.rounding, negative))) return negative ? cast.minimum : cast.maximum;
  if (cast.overflow == kNan) return quiet_nan(negative);
  return with_sign(number(Constants<F64>::kInf), negative);
}

static inline double binary_general(double x, const lowp_cast& cast, uint64_t seed, int64_t index) {
  if (x != x) return quiet_nan(bits_of(x) >> 63);
  if (!draws(cast.rounding) || x >= 1 || x <= -1) return x < 0 ? -1 : 1;
  // +1 with probability (1 + x) / 2. For x below zero: -1 with probability (1 + |x|) / 2, with the mirrored uniform number.
  const uint64_t bits = bits_of(x) & Constants<F64>::kMagnitude;
  uint32_t words[4], more[4];
  const uint64_t position = static_cast<uint64_t>(index);
  philox_at(seed, position / 4, 0, words);
  philox_at(seed, position, 1, more);
  const int field = static_cast<int>(bits >> 52);
  const uint64_t significand = (bits & 0xfffffffffffff) | (field ? uint64_t{1} << 52 : 0);
  const int drop = 1076 - (field ? field : 1);  // |x| / 2 = significand / 2**drop
  // Five words of |x| / 2, then 1/2 + or - them; minus truncates towards zero like the plus does.
  int64_t fraction[5];
  for (int word = 0; word < 5; ++word) fraction[word] = fraction_word(significand, drop, word);
  bool sticky = false;
  if (drop > 160) {
    const int lost = drop - 160;
    sticky = (lost < 64 ? significand & ((uint64_t{1} << lost) - 1) : significand) != 0;
  }
  if (x < 0) {
    int64_t borrow = sticky;
    for (int word = 4; word >= 0; --word) {
      const int64_t difference = (word == 0 ? int64_t{1} << 31 : 0) - fraction[word] - borrow;
      borrow = difference < 0;
      fraction[word] = difference + (borrow << 32);
    }
  } else {
    fraction[0] += int64_t{1} << 31;
  }
  const uint32_t first = words[position % 4];
  if (cast.random_bits > 0) {
    const bool rest = sticky || (fraction[2] | fraction[3] | fraction[4]) != 0;
    const uint64_t units =
        in_units(static_cast<uint32_t>(fraction[0]), static_cast<uint32_t>(fraction[1]), rest, cast);
    return first >> (32 - cast.random_bits) < units ? 1 : -1;
  }
  if (first != fraction[0]) return first < fraction[0] ? 1 : -1;
  for (int word = 0; word < 4; ++word)
    if (more[word] != fraction[word + 1]) return more[word] < fraction[word + 1] ? 1 : -1;
  return -1;
}

static inline bool rounds_away(const lowp_cast& cast, uint64_t remainder, int drop, bool odd, bool negative,
                               uint64_t seed, int64_t index) {
  // remainder < 2**53, so for a larger drop it is less than half of 2**drop
  const uint64_t half = drop <= 60 ? uint64_t{1} << (drop - 1) : ~uint64_t{0};
  switch (cast.rounding) {
    case kNearestEven: return remainder > half || (remainder == half && odd);
    case kNearestAway: return remainder >= half;
    case kUp: return remainder != 0 && !negative;
    case kDown: return remainder != 0 && negative;
    case kToOdd: return remainder != 0 && !odd;
    case kTowardZero: return false;
    default: return random_below(remainder, drop, cast, seed, index);
  }
}

// The value of x after the cast, as element `index`.
static double cast_general(double x, const lowp_cast& cast, uint64_t seed, int64_t index) {
  if (cast.kind == kBinary) return binary_general(x, cast, seed, index);
  const bool negative = bits_of(x) >> 63, integer = cast.kind == kInteger;
  const uint64_t bits = bits_of(x) & Constants<F64>::kMagnitude;
  if (bits > Constants<F64>::kInf) return quiet_nan(negative);
  const bool minus_zero = !integer && cast.minus_zero;
  if (!integer && !cast.is_signed && negative && bits != 0) return cast.has_nan ? quiet_nan(true) : cast.minimum;
  if (bits == Constants<F64>::kInf) return overflowed(cast, negative, false);
  if (bits == 0) {
    if (!integer && !cast.has_zero) return cast.has_nan ? quiet_nan(negative) : cast.minimum;
    return minus_zero && negative ? -0.0 : 0.0;
  }
  const int field = static_cast<int>(bits >> 52);
  const uint64_t significand = (bits & 0xfffffffffffff) | (field ? uint64_t{1} << 52 : 0);
  const int lowest = (field ? field : 1) - 1075;  // |x| = significand * 2**lowest
  const int exponent = lowest + 63 - __builtin_clzll(significand);
  if (!integer && !cast.subnormals && exponent < cast.min_exponent) {
    if (!cast.has_zero) return cast.minimum;
    return minus_zero && negative ? -0.0 : 0.0;
  }
  const int quantum = integer ? 0 : (exponent < cast.min_exponent ? cast.min_exponent : exponent) - cast.mantissa_bits;
  double magnitude = __builtin_fabs(x);
  if (quantum > lowest) {
    const int drop = quantum - lowest;
    uint64_t multiple = drop < 64 ? significand >> drop : 0;
    const uint64_t remainder = drop < 64 ? significand & ((uint64_t{1} << drop) - 1) : significand;
    // Without a mantissa "even" is the last bit of the exponent field, and zero's is; in e8m0 a tie is rounded up, as in
    // ml_dtypes.
    const bool by_code = !integer && cast.mantissa_bits == 0 && cast.has_zero && multiple > 0;
    const bool code_is_odd = by_code ? (exponent + cast.bias) & 1 : multiple & 1;
    multiple += rounds_away(cast, remainder, drop, code_is_odd, negative, seed, index);
    magnitude = __builtin_ldexp(static_cast<double>(multiple), quantum);
  }
  if (magnitude == 0) return minus_zero && negative ? -0.0 : 0.0;
  if (magnitude > (negative && integer ? -cast.minimum : cast.maximum)) return overflowed(cast, negative, true);
  return with_sign(magnitude, negative);
}

// The code of a value of the format.
static uint64_t code_general(double value, const lowp_cast& cast) {
  const uint64_t bits = bits_of(value) & Constants<F64>::kMagnitude;
  const int significant = cast.bits - (cast.is_signed != 0);
  const uint64_t top = (uint64_t{1} << significant) - 1, hidden = uint64_t{1} << cast.mantissa_bits;
  const uint64_t sign = cast.is_signed && bits_of(value) >> 63 ? top + 1 : 0;
  if (bits > Constants<F64>::kInf) {
    if (!cast.has_nan) return 0;
    return static_cast<uint64_t>(cast.nan) | (cast.minus_zero ? sign : 0);
  }
  if (bits == Constants<F64>::kInf) return sign | static_cast<uint64_t>(cast.infinity);
  if (bits == 0) return sign;
  int exponent;
  __builtin_frexp(value, &exponent);
  exponent = exponent - 1 < cast.min_exponent ? cast.min_exponent : exponent - 1;
  const double scaled = __builtin_ldexp(__builtin_fabs(value), cast.mantissa_bits - exponent);
  const uint64_t significand = static_cast<uint64_t>(scaled);
  if (significand < hidden) return sign | significand;
  return sign | ((static_cast<uint64_t>(exponent + cast.bias) << cast.mantissa_bits) + (significand - hidden));
}

static double value_general(uint64_t code, const lowp_cast& cast) {
  const int significant = cast.bits - (cast.is_signed != 0);
  const uint64_t top = (uint64_t{1} << significant) - 1, hidden = uint64_t{1} << cast.mantissa_bits;
  const uint64_t magnitude = code & top, nan = static_cast<uint64_t>(cast.nan);
  const uint64_t infinity = static_cast<uint64_t>(cast.infinity);  // without infinity, larger than any code
  const bool negative = cast.is_signed && code >> significant & 1;
  if (cast.has_nan && !cast.minus_zero && (code & (top | nan)) == nan) return quiet_nan(false);
  if (magnitude > infinity || (cast.infinity < 0 && magnitude == nan)) return quiet_nan(negative);
  if (magnitude == infinity) return with_sign(number(Constants<F64>::kInf), negative);
  const int field = static_cast<int>(magnitude >> cast.mantissa_bits);
  const uint64_t mantissa = magnitude & (hidden - 1);
  if (field == 0 && cast.has_zero) {
    const double value = __builtin_ldexp(static_cast<double>(mantissa), cast.min_exponent - cast.mantissa_bits);
    return with_sign(cast.subnormals ? value : 0, negative);
  }
  return with_sign(__builtin_ldexp(static_cast<double>(mantissa + hidden), field - cast.bias - cast.mantissa_bits),
                   negative);
}

}  // namespace LOWP_ISA
}  // namespace lowp
