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

// The codes of numbers to nearest: of floats that `Quanta` serves, where what is beyond the largest number has the code `beyond`.
__attribute__((noinline)) static int64_t encode_nearest(const uint32_t* in, uint32_t* out, int64_t count, const Quanta& given,
                                                        const Code<F32>& code, int32_t beyond) {
  const Quanta quanta = given;
  const int32_t highest = quanta.limit + 0x800000, nan_code = static_cast<int32_t>(code.nan);
  const uint32_t unsigned_nan = code.unsigned_nan;
  int32_t nans = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = in[i];
    const int32_t a = static_cast<int32_t>(bits & 0x7fffffff), limited = least(a, highest);
    const int32_t exponent = Quanta::exponent_of(limited, quanta.smallest);
    const int32_t found = quanta.code_of(quanta.sum_of(limited, exponent), exponent, quanta.base);
    const uint32_t nan = mask<F32>(a > 0x7f800000);
    int32_t result = found > quanta.code_limit ? beyond : found;
    result = a > 0x7f800000 ? nan_code : result;
    nans -= static_cast<int32_t>(nan);
    out[i] = static_cast<uint32_t>(result) | (bits >> quanta.sign_shift & quanta.sign & ~(nan & unsigned_nan));
  }
  return nans;
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

#if defined(__F16C__)
// Codes of at most 8 bits that are plain and have at most fp16's exponents: fp16's numbers times a power of two.
__attribute__((noinline)) static void decode_as_fp16(const uint8_t* codes, uint32_t* values, int64_t count, const Code<F32>& code) {
  alignas(64) uint16_t halves[kBlock + 16];
  const uint16_t magnitude = static_cast<uint16_t>(code.magnitude), sign = static_cast<uint16_t>(code.sign);
  const uint16_t last = static_cast<uint16_t>(code.nan_above);
  const uint16_t to_number = static_cast<uint16_t>(1 << (10 - code.mantissa_bits));  // products stay in 16 bits, shifts would not
  const uint16_t to_sign = static_cast<uint16_t>(sign != 0 ? 1 << (15 - code.sign_shift) : 0);
  const float lift = number(code.rebias + (uint32_t{15} << 23));
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = codes[i], a = bits & magnitude, signs = bits & sign;
    const uint16_t value = static_cast<uint16_t>(a * to_number), known = a > last ? uint16_t{0x7e00} : value;
    halves[i] = known | static_cast<uint16_t>(signs * to_sign);
  }
  float* const out = reinterpret_cast<float*>(values);
  const auto eight = [&](int64_t at) {
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + at)));
    return _mm256_mul_ps(wide, _mm256_set1_ps(lift));
  };
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= count; i += 16) {
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i)));
    _mm512_storeu_ps(out + i, _mm512_mul_ps(wide, _mm512_set1_ps(lift)));
  }
#endif
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, eight(i));
  if (i == count) return;
  alignas(32) float rest[8];
  _mm256_store_ps(rest, eight(i));
  std::memcpy(out + i, rest, sizeof(float) * static_cast<size_t>(count - i));
}
#endif

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
#if defined(__F16C__)
    if constexpr (C::kWidth == 32 && sizeof(T) == 1)
      if (decodes && plain && code.below != 0 && code.magnitude >> code.mantissa_bits < 31) return decode_as_fp16(codes, values, count, code);
#endif
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
  const Quanta quanta(*task.cast);
  const double above = coder.encodes ? static_cast<double>(number(static_cast<typename C::Bits>(caster.lane.beyond[0]))) : 0;
  const bool nearest = C::kWidth == 32 && Quanta::serve(*task.cast) && (task.cast->has_nan || above == above);
  const int32_t beyond = nearest ? static_cast<int32_t>(code_general(above, *task.cast)) : 0;
  int64_t nans = 0;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* const in = load<C>(task.in, task.in_type, first, count, buffer);
    T* const out = static_cast<T*>(task.out) + first;
    if constexpr (C::kWidth == 32) {
      if (nearest) {
        const int64_t found = encode_nearest(in, values, count, quanta, coder.code, beyond);
        shorten(values, out, count);
        nans += task.cast->has_nan ? 0 : found;
        continue;
      }
    }
    caster(in, values, first, count);
    nans += coder.encode(values, out, count);
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
  const bool aligned = is_aligned(task.in, sizeof(T)), in_place = carrier_bytes(task.out_type) == sizeof(values[0]);
  const bool direct = in_place && !task.stream && is_aligned(task.out, sizeof(values[0]));
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const char* const from = at(task.in, first, sizeof(T));
    if (!aligned) std::memcpy(copy, from, sizeof(T) * static_cast<size_t>(count));
    typename C::Bits* const to = direct ? static_cast<typename C::Bits*>(task.out) + first : values;
    coder.decode(aligned ? reinterpret_cast<const T*>(from) : copy, to, count);
    if (!direct) store<C>(values, task.out, task.out_type, first, count, task.stream);
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
