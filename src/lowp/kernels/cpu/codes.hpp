// Codes of a format, from values and back. Included once per instruction set.
#pragma once

#include <type_traits>

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// run(a zero of the unsigned type of `bytes` bytes)
template <class Run>
static auto with_code_type(int bytes, Run run) {
  switch (bytes) {
    case 1: return run(uint8_t{});
    case 2: return run(uint16_t{});
    case 4: return run(uint32_t{});
    default: return run(uint64_t{});
  }
}

// Constants of `encode` and `decode` besides the lane.
template <class C>
struct Code {
  using Bits = typename C::Bits;
  int shift, mantissa_bits, sign_shift;
  Bits offset;           // difference of the exponent fields, in units of the code's last bit
  Bits rebias;           // the same in the carrier's bits
  typename C::Int smallest;
  typename C::Number magic;
  Bits magic_bits, sign, magnitude, codes, below, flush;
  Bits infinity, nan;
  Bits nan_above;       // the largest code without its sign that is not NaN
  Bits minus_zero_nan;  // the code of minus zero if that is NaN, otherwise a value that is no code
  Bits unsigned_nan;    // mask
};

template <class C>
static Code<C> make_code(const lowp_cast& cast) {
  using Bits = typename C::Bits;
  Code<C> code{};
  const int significant = cast.bits - (cast.is_signed != 0);
  code.mantissa_bits = cast.mantissa_bits;
  code.shift = C::kMantissa - cast.mantissa_bits;
  code.sign_shift = cast.is_signed ? significant : C::kWidth - 1;
  code.sign = cast.is_signed ? Bits{1} << significant : 0;
  code.magnitude = (Bits{1} << significant) - 1;
  code.codes = code.magnitude | code.sign;
  const Bits difference = static_cast<Bits>(static_cast<typename C::Int>(C::kBias - cast.bias));
  code.offset = difference << cast.mantissa_bits;
  code.rebias = difference << C::kMantissa;
  const bool fixed = cast.min_exponent > C::kMinExponent && cast.has_zero;
  code.smallest = fixed ? static_cast<typename C::Int>(bits_of(power_of_two<C>(cast.min_exponent))) : 0;
  code.magic = power_of_two<C>(cast.min_exponent + C::kMantissa - cast.mantissa_bits);
  code.magic_bits = bits_of(code.magic);
  code.below = fixed ? Bits{1} << cast.mantissa_bits : 0;
  code.flush = cast.subnormals || !cast.has_zero ? 0 : Bits{1} << cast.mantissa_bits;
  const bool has_infinity = cast.infinity >= 0, nan_is_minus_zero = cast.is_signed && !cast.minus_zero && cast.has_nan;
  code.infinity = has_infinity ? static_cast<Bits>(cast.infinity) : ~Bits{0};
  code.nan = cast.has_nan ? static_cast<Bits>(cast.nan) : 0;
  code.nan_above = code.magnitude;
  if (has_infinity) code.nan_above = code.infinity;
  if (cast.has_nan && !has_infinity && !nan_is_minus_zero) code.nan_above = code.nan - 1;
  code.minus_zero_nan = nan_is_minus_zero ? code.nan : ~Bits{0};
  code.unsigned_nan = cast.minus_zero && cast.has_nan ? 0 : ~Bits{0};
  return code;
}

// Replaces values of the format by their codes; returns the number of NaNs. (Codes of few bytes are made of these by a loop
// of its own: in one loop the compiler would shorten every step to bytes, which takes more instructions.)
template <class C>
__attribute__((noinline)) static int64_t encode_values(typename C::Bits* values, int64_t count, const Code<C>& given) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  const Code<C> code = given;
  Bits nans = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = values[i], a = bits & Constants<C>::kMagnitude;
    const Bits negative = static_cast<Bits>(0) - (bits >> (C::kWidth - 1));
    const Bits normal = (a >> code.shift) - code.offset;
    const Bits fixed = bits_of(number(a) + code.magic) - code.magic_bits;
    Bits result = choose<Bits>(mask<C>(static_cast<Int>(a) < code.smallest), fixed, normal);
    result = choose<Bits>(mask<C>(a == Constants<C>::kInf), code.infinity, result);
    const Bits nan = mask<C>(static_cast<Int>(a) > static_cast<Int>(Constants<C>::kInf));
    result = choose<Bits>(nan, code.nan, result);
    nans += nan & 1;
    const Bits sign = code.sign & negative & ~(nan & code.unsigned_nan);
    values[i] = result | sign;
  }
  return static_cast<int64_t>(nans);
}

template <class Bits, class T>
__attribute__((noinline)) static void shorten(const Bits* codes, T* out, int64_t count) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(codes[i]);
}

template <class C, class T>
__attribute__((noinline)) static int64_t encode_integers(const typename C::Bits* values, T* out, int64_t count) {
  int64_t nans = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const typename C::Number value = number(values[i]);
    const bool nan = value != value;
    out[i] = static_cast<T>(static_cast<int32_t>(nan ? 0 : value));
    nans += nan;
  }
  return nans;
}

// `kPlain`: no code is an infinity, and none of a small number that is zero, or of minus zero that is NaN.
template <class C, bool kPlain, class T>
__attribute__((noinline)) static void decode_codes(const T* codes, typename C::Bits* values, int64_t count,
                                                   const Code<C>& given) {
  using Bits = typename C::Bits;
  const Code<C> code = given;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const Bits bits = codes[i], a = bits & code.magnitude;
    const Bits sign = (bits & code.sign) << (C::kWidth - 1 - code.sign_shift);
    const Bits normal = (a << code.shift) + code.rebias;
    const Bits fixed = bits_of(number(code.magic_bits + a) - code.magic);
    Bits result = a < code.below ? fixed : normal;
    if (!kPlain) result = a < code.flush ? 0 : result;
    if (!kPlain) result = a == code.infinity ? Constants<C>::kInf : result;
    result = a > code.nan_above ? Constants<C>::kQuietNan : result;
    result |= sign;
    values[i] = !kPlain && (bits & code.codes) == code.minus_zero_nan ? Constants<C>::kQuietNan : result;
  }
}

// The codes of an element format, prepared for one call: by vector kernels, or by the general functions.
template <class C>
struct Coder {
  const lowp_cast& cast;
  bool encodes, decodes;  // by vector kernels
  Code<C> code;

  explicit Coder(const lowp_cast& given)
      : cast(given), encodes(cast.kind == kFloat && reaches<C>(cast)), decodes(encodes && !is_one_below<C>(cast)),
        code(encodes ? make_code<C>(cast) : Code<C>{}) {}

  // The codes of at most kBlock values, which are overwritten. Returns the number of NaNs without a code.
  template <class T>
  int64_t encode(typename C::Bits* values, T* out, int64_t count) const {
    if (cast.kind != kFloat) return encode_integers<C, T>(values, out, count);
    int64_t nans = 0;
    if (encodes) {
      nans = encode_values<C>(values, count, code);
      shorten(values, out, count);
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const double value = static_cast<double>(number(values[i]));
        out[i] = static_cast<T>(code_general(value, cast));
        nans += value != value;
      }
    }
    return cast.has_nan ? 0 : nans;
  }

  template <class T>
  void decode(const T* codes, typename C::Bits* values, int64_t count) const {
    const bool plain = code.flush == 0 && cast.infinity < 0 && code.minus_zero_nan == ~typename C::Bits{0};
    if (decodes && plain) return decode_codes<C, true>(codes, values, count, code);
    if (decodes) return decode_codes<C, false>(codes, values, count, code);
    if (cast.kind != kFloat && sizeof(T) <= 2) {
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < count; ++i)
        values[i] = bits_of(static_cast<typename C::Number>(static_cast<std::make_signed_t<T>>(codes[i])));
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      const double value = cast.kind == kFloat ? value_general(codes[i], cast)
                                               : static_cast<double>(static_cast<std::make_signed_t<T>>(codes[i]));
      values[i] = bits_of(static_cast<typename C::Number>(value));
    }
  }
};

template <class C, class T>
static int64_t encode_in(const Task& task, int64_t begin, int64_t end) {
  const Caster<C> caster(*task.cast, task.seed, task.index);
  const Coder<C> coder(*task.cast);
  alignas(64) typename C::Bits buffer[kBlock], values[kBlock];
  int64_t nans = 0;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* const in = load<C>(task.in, task.in_type, first, count, buffer);
    prefetch(in, count / 2);
    caster(in, values, first, count);
    prefetch(in + count / 2, count / 2);
    nans += coder.encode(values, static_cast<T*>(task.out) + first, count);
  }
  return nans;
}

template <class C>
static int64_t encode_as(const Task& task, int64_t begin, int64_t end) {
  return with_code_type(task.out_type, [&](auto code) { return encode_in<C, decltype(code)>(task, begin, end); });
}

static int64_t encode(const Task& task, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  if (task.in_type != kFp64 && reaches<F32>(*task.cast)) return encode_as<F32>(task, begin, end);
  return encode_as<F64>(task, begin, end);
}

template <class C, class T>
static void decode_in(const Task& task, int64_t begin, int64_t end) {
  const Coder<C> coder(*task.cast);
  alignas(64) typename C::Bits values[kBlock];
  alignas(64) T copy[kBlock];
  const bool aligned = is_aligned(task.in, sizeof(T));
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const char* const from = at(task.in, first, sizeof(T));
    if (!aligned) std::memcpy(copy, from, sizeof(T) * static_cast<size_t>(count));
    coder.decode(aligned ? reinterpret_cast<const T*>(from) : copy, values, count);
    store<C>(values, task.out, task.out_type, first, count, task.stream);
  }
  if (task.stream) finish_streaming();
}

template <class C>
static void decode_as(const Task& task, int64_t begin, int64_t end) {
  with_code_type(task.in_type, [&](auto code) { decode_in<C, decltype(code)>(task, begin, end); });
}

static void decode(const Task& task, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  if (task.out_type != kFp64 && reaches<F32>(*task.cast) && !is_one_below<F32>(*task.cast))
    return decode_as<F32>(task, begin, end);
  decode_as<F64>(task, begin, end);
}

}  // namespace LOWP_ISA
}  // namespace lowp
