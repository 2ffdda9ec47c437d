// The cast of groups of numbers that share a scale. Included once per instruction set.
//
// It works on a strip: at most kBlock numbers in a buffer, which are consecutive runs. A run is a group or a part of one,
// from a row, or from a column that was copied into the buffer. In this order:
//   1. `largest_of_runs` finds the largest magnitude of every run (of a group in parts: the largest of its parts'),
//   2. `ScaleOf` computes the scale of every group from it,
//   3. `GroupCast` divides the runs by their scales and rounds them to elements, and `values` multiplies these again.
// Quotients are rounded once, as if they were computed in fp64, and values are rounded once to the type of the tensor.
// fp32 quotients by powers of two are exact unless they are small. By other scales, rounded, inverted and multiplied by, they have
// an error, of less than 2**-22 of them, which matters only near the midpoint of two elements: such a strip is cast in fp64.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// LOWP_VECTOR_LOOP for the numbers of a run: GCC would make scalar code of 16 of them before it considers vectors.
#if defined(__clang__)
#define LOWP_RUN_LOOP LOWP_VECTOR_LOOP
#else
#define LOWP_RUN_LOOP _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#endif

struct Runs {
  int64_t number = 0;
  int64_t each = 0;  // the length of all runs; 0: they differ; 1: of columns, no lengths are given
  bool again = false;  // the strip is read a second time
  int32_t length[kBlock];
};

template <int64_t kCount>
struct Length {
  constexpr operator int64_t() const { return kCount; }
};

static constexpr bool is_constant(int64_t) { return false; }
template <int64_t kCount>
static constexpr bool is_constant(Length<kCount>) {
  return true;
}

// pass(run, index of its first number, its length), with the usual lengths as constants.
template <class Pass>
static inline void each_run(const Runs& runs, Pass pass) {
  if (runs.each == 32) {
    for (int64_t run = 0; run < runs.number; ++run) pass(run, 32 * run, Length<32>{});
  } else if (runs.each == 16) {
    for (int64_t run = 0; run < runs.number; ++run) pass(run, 16 * run, Length<16>{});
  } else if (runs.each == 1) {
    for (int64_t run = 0; run < runs.number; ++run) pass(run, run, Length<1>{});
  } else {
    for (int64_t run = 0, begin = 0; run < runs.number; begin += runs.length[run++]) pass(run, begin, runs.length[run]);
  }
}

// The same of runs in memory at `in`, long ones in parts if they are read again. While they are the processor does not find by
// itself what comes after them, and it fetches few lines at once, to the first cache fewer than to the second: with every part some
// are asked for.
template <class Pass>
static inline void each_part(const Runs& runs, const uint32_t* in, Pass pass) {
  constexpr int64_t kPart = 32, kAhead = 3 * kBlock / 2;
  const auto part = [&](int64_t run, int64_t begin, auto count) {
    for (int64_t i = 0; i < count && runs.again; i += 16) __builtin_prefetch(in + begin + kAhead + i, 0, 2);
    pass(run, begin, count);
  };
  each_run(runs, [&](int64_t run, int64_t begin, auto length) {
    if (is_constant(length)) return part(run, begin, length);
    int64_t done = 0;
    for (; runs.again && done + kPart <= length; done += kPart) part(run, begin + done, Length<kPart>{});
    if (done < length) part(run, begin + done, length - done);
  });
}

// Copies what stands in runs under scales with a minus sign: that of `other` elements. Such runs follow no pattern, so that a
// branch would often be taken wrongly.
template <class T>
static inline void take_negative(const Runs& runs, const double* scale, const T* from, T* to) {
  if (runs.each == 1) {
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < runs.number; ++i) to[i] = scale[i] < 0 ? from[i] : to[i];
    return;
  }
  each_run(runs, [&](int64_t run, int64_t begin, auto count) {
    const T all = scale[run] < 0 ? static_cast<T>(~T{0}) : T{0};
    const int64_t length = count;
    const T* const other = from + begin;
    T* const out = to + begin;
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < length; ++i) out[i] = static_cast<T>((other[i] & all) | (out[i] & ~all));
  });
}

// -- 1. the largest numbers -------------------------------------------------------------------------------------------
template <class C, bool kFinite>
static inline typename C::Bits largest_of(const typename C::Bits* in, int64_t count) {
  using Int = typename C::Int;
  constexpr Int kInf = static_cast<Int>(Constants<C>::kInf);
  Int largest = 0;
  LOWP_RUN_LOOP
  for (int64_t i = 0; i < count; ++i) {
    Int magnitude = static_cast<Int>(in[i] & Constants<C>::kMagnitude);
    if (kFinite) magnitude = magnitude < kInf ? magnitude : 0;
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<typename C::Bits>(largest);
}

// The same of `count` columns of `rows` numbers, `inner` apart. load(row): its numbers, those of the columns.
template <class C, bool kFinite, class Load>
static inline void largest_of_columns(int64_t rows, int64_t count, Load load, typename C::Bits* largest) {
  using Int = typename C::Int;
  constexpr Int kInf = static_cast<Int>(Constants<C>::kInf);
  std::memset(largest, 0, sizeof(largest[0]) * static_cast<size_t>(count));
  for (int64_t row = 0; row < rows; ++row) {
    const typename C::Bits* const in = load(row);
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) {
      Int magnitude = static_cast<Int>(in[i] & Constants<C>::kMagnitude);
      if (kFinite) magnitude = magnitude < kInf ? magnitude : 0;
      largest[i] = static_cast<typename C::Bits>(magnitude > static_cast<Int>(largest[i]) ? magnitude : static_cast<Int>(largest[i]));
    }
  }
}

static inline double wide_number(uint32_t bits) { return static_cast<double>(number(bits)); }
static inline double wide_number(uint64_t bits) { return number(bits); }

template <class C>
static inline double finite_magnitude(typename C::Bits bits) {
  const typename C::Bits magnitude = bits & Constants<C>::kMagnitude;
  return magnitude < Constants<C>::kInf ? wide_number(magnitude) : 0;
}

// The largest of runs of 2 * kHalf numbers that are not negative, by halves, which takes fewer steps than one after the other.
// `spare` has room for half the numbers, which are overwritten.
template <int64_t kHalf, class Int>
static inline void largest_of_halves(Int* in, int64_t runs, Int* spare, Int* largest) {
  Int* const out = kHalf == 1 ? largest : spare;
  for (int64_t run = 0; run < runs; ++run) {
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < kHalf; ++i) {
      const Int a = in[2 * kHalf * run + i], b = in[2 * kHalf * run + kHalf + i];
      out[kHalf * run + i] = a > b ? a : b;
    }
  }
  if constexpr (kHalf > 1) largest_of_halves<kHalf / 2>(spare, runs, in, largest);
}

#if defined(__AVX512F__)
// The largest magnitudes of sixteen runs of 16 or 32 numbers: each step halves how many numbers a run has left, and joins two.
template <int64_t kEach>
static inline void largest_of_sixteen(const uint32_t* in, int32_t* largest) {
  const auto most = [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); };
  const auto numbers_of = [&](int64_t at) { return _mm512_and_si512(_mm512_loadu_si512(in + at), _mm512_set1_epi32(0x7fffffff)); };
  const auto run = [&](int64_t of) {
    const __m512i first = numbers_of(kEach * of);
    return kEach == 16 ? first : most(first, numbers_of(kEach * of + 16));
  };
  const auto of_two = [&](__m512i a, __m512i b) { return most(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); };
  const auto of_four = [&](int64_t of) {  // one number of each in every quarter of the vector
    const __m512i a = of_two(run(of), run(of + 1)), b = of_two(run(of + 2), run(of + 3));
    return most(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto of_quarters = [&](__m512i a, __m512i b) {
    return most(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  _mm512_storeu_si512(largest, of_quarters(of_quarters(of_four(0), of_four(4)), of_quarters(of_four(8), of_four(12))));
}
#endif

// The largest magnitudes of runs of 16 or 32 numbers.
template <class C, int64_t kEach>
static inline void largest_of_short_runs(const typename C::Bits* in, int64_t runs, typename C::Int* largest) {
  using Int = typename C::Int;
#if defined(__AVX512F__)
  if constexpr (C::kWidth == 32)
    for (; runs >= 16; runs -= 16, in += 16 * kEach, largest += 16) largest_of_sixteen<kEach>(in, largest);
  if (runs == 0) return;
#endif
  constexpr int64_t kHalf = kEach / 2;
  alignas(64) Int half[kBlock / 2], spare[kBlock / 4];
  for (int64_t run = 0; run < runs; ++run) {
    const typename C::Bits *const first = in + kEach * run, *const second = first + kHalf;
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < kHalf; ++i) {
      const Int a = static_cast<Int>(first[i] & Constants<C>::kMagnitude);
      const Int b = static_cast<Int>(second[i] & Constants<C>::kMagnitude);
      half[kHalf * run + i] = a > b ? a : b;
    }
  }
  largest_of_halves<kHalf / 2>(half, runs, spare, largest);
}

// The largest finite magnitudes of all runs, with a minus sign (also that of -0) if others are in the run.
template <class C>
__attribute__((noinline)) static void largest_of_runs(const typename C::Bits* in, const Runs& runs, double* found) {
  using Bits = typename C::Bits;
  using Int = typename C::Int;
  constexpr Int kInf = static_cast<Int>(Constants<C>::kInf);
  alignas(64) Int largest[kBlock];
  if (runs.each == 32) {
    largest_of_short_runs<C, 32>(in, runs.number, largest);
  } else if (runs.each == 16) {
    largest_of_short_runs<C, 16>(in, runs.number, largest);
  } else {
    each_run(runs, [&](int64_t run, int64_t begin, auto count) {
      largest[run] = static_cast<Int>(largest_of<C, false>(in + begin, count));
    });
  }
  Int most = 0;
  LOWP_VECTOR_LOOP
  for (int64_t run = 0; run < runs.number; ++run) {
    most = largest[run] > most ? largest[run] : most;
    found[run] = wide_number(static_cast<Bits>(largest[run]));
  }
  if (most < kInf) return;
  each_run(runs, [&](int64_t run, int64_t begin, int64_t count) {
    if (largest[run] >= kInf) found[run] = -wide_number(largest_of<C, true>(in + begin, count));
  });
}

// -- 2. their scales --------------------------------------------------------------------------------------------------
// What numbers are divided by under a scale times that of the tensor; with a minus sign, to whole numbers.
static inline double divisor_of(const lowp_sharing& sharing, double scale) {
  return scale < 0 ? scale * -sharing.element.maximum / sharing.other.maximum : scale;
}

// fp64: its product with fp32's numbers, and that with the scale of the tensor, are exact.
struct ScaleOf {
  const lowp_sharing& sharing;
  Caster<F64> rounded;

  explicit ScaleOf(const lowp_sharing& given) : sharing(given), rounded(given.scale, 0) {}

  // At most kBlock groups. `outer`: the scale of the whole tensor, if the format has one. Returns whether all is finite.
  __attribute__((noinline)) bool operator()(const double* found, int64_t groups, double outer, double* scale) const {
    if (sharing.power)
      powers(found, groups, scale);
    else
      ratios(found, groups, outer, sharing.highest, scale);
    uint64_t signs = 0;
    LOWP_VECTOR_LOOP
    for (int64_t group = 0; group < groups; ++group) signs |= bits_of(found[group]);
    const bool finite = signs >> 63 == 0;
    if (finite || !sharing.marks) return finite;
    for (int64_t group = 0; group < groups; ++group)
      if (bits_of(found[group]) >> 63) scale[group] = number(Constants<F64>::kQuietNan);
    return false;
  }

  // The ratios of the largest numbers to `highest`, as scales.
  void ratios(const double* found, int64_t groups, double outer, double highest, double* scale) const {
    alignas(64) uint64_t ratio[kBlock], result[kBlock];
    const bool two = sharing.outer.bits != 0;
    const double headroom = sharing.headroom, least = two ? 0 : sharing.smallest;
    const double divisor = two ? outer : 1, of_zeros = two ? 0 : 1;
    ratio[0] = 0;  // without it GCC warns that there may be no groups
    LOWP_VECTOR_LOOP
    for (int64_t group = 0; group < groups; ++group)
      ratio[group] = bits_of(__builtin_fabs(found[group]) * headroom / highest / divisor);
    rounded.with_words(ratio, result, 0, groups, nullptr);
    LOWP_VECTOR_LOOP
    for (int64_t group = 0; group < groups; ++group) {  // subnormal numbers would have few bits
      const double size = number(result[group]), normal = size > least ? size : least;
      scale[group] = number(ratio[group]) == 0 ? of_zeros : normal;
    }
  }

 private:
  void powers(const double* found, int64_t groups, double* scale) const {
    const int32_t top = sharing.top + 1023, lowest = sharing.lowest, last = sharing.last;
    const uint64_t carry = static_cast<uint64_t>(sharing.carry);
    int32_t least = 1;
    LOWP_VECTOR_LOOP
    for (int64_t group = 0; group < groups; ++group) {
      const uint64_t magnitude = bits_of(found[group]) & Constants<F64>::kMagnitude;
      const int32_t field = static_cast<int32_t>(magnitude >> 52);
      int32_t exponent = static_cast<int32_t>((magnitude + carry) >> 52) - top;
      exponent = exponent < lowest ? lowest : exponent;
      exponent = exponent > last ? last : exponent;
      least = field < least ? field : least;
      scale[group] = number(static_cast<uint64_t>(exponent + 1023) << 52);
    }
    if (least > 0) return;
    for (int64_t group = 0; group < groups; ++group) {  // zeros, and subnormal numbers of fp64
      const double largest = __builtin_fabs(found[group]);
      if (bits_of(largest) >> 52) continue;
      const uint64_t normal = bits_of(largest * 0x1p64) + carry;
      const int exponent = largest == 0 ? sharing.of_zeros : static_cast<int>(normal >> 52) - 64 - top;
      scale[group] = power_of_two<F64>(exponent < lowest ? lowest : exponent > last ? last : exponent);
    }
  }
};

static inline bool is_fp32(double x) { return static_cast<double>(static_cast<float>(x)) == x; }

// -- 3. elements and values -------------------------------------------------------------------------------------------
// Whether fp32 represents all products of an element and a scale.
static inline bool has_small_products(const lowp_sharing& sharing) {
  const lowp_cast &element = sharing.element, &scale = sharing.scale;
  return element.bits <= 8 && scale.bits <= 8 && element.maximum < 0x1p40 && scale.maximum < 0x1p40 &&
         (element.kind != kFloat || element.min_exponent > -40) && scale.min_exponent > -40;
}

// The constants of the quick cast: to nearest even, of integers and of floats with a mantissa and a small range. A sum with
// a power of two whose ulp is the quantum rounds to it.
struct Quick {
  float lower, upper;          // integers: their range
  int32_t first, last;         // the same as bits of their sums with kMagic
  Quanta quanta;               // floats
  uint32_t beyond;             // what larger magnitudes than the largest become
  float far;                   // from an exponent to the distance from an element at which a quotient is in doubt
  uint32_t discard, drop;      // stochastic floats: the bits that are cut, and of a word those that do not decide
};

constexpr float kMagic = 0x1.8p23f;  // a sum with it is rounded to a whole number; its bits are ordered as such sums are

enum Elements { kOnlyFloats, kOnlyWholes, kEither };  // of a strip: floats, integers, or one or the other in each run

enum Draws { kNone, kWord };  // whether a random word decides about an element

static inline bool is_quick(const lowp_cast& cast) {
  if (cast.kind == kInteger) return cast.rounding == kNearestEven && cast.bits <= 16;
  return cast.overflow == kSaturate && Quanta::serve(cast);
}

// The same of stochastic casts, of floats whose cut bits one word decides.
static inline bool is_drawn_quickly(const lowp_cast& cast, const Caster<F32>& caster) {
  if (cast.rounding != kStochastic || cast.random_bits != 0) return false;
  if (cast.kind == kInteger) return cast.bits <= 8;
  return cast.kind == kFloat && caster.quick != nullptr && caster.lane.form == kPlain && cast.mantissa_bits < 4;
}

static inline Quick make_quick(const lowp_cast& cast, const Lane<F32>& lane) {
  Quick quick{0, 0, 0, 0, Quanta(cast), 0, 0, 0, 0};
  quick.lower = static_cast<float>(cast.minimum), quick.upper = static_cast<float>(cast.maximum);
  quick.first = static_cast<int32_t>(bits_of(kMagic + quick.lower)), quick.last = static_cast<int32_t>(bits_of(kMagic + quick.upper));
  if (cast.kind == kInteger) return quick;
  quick.beyond = static_cast<uint32_t>(lane.beyond[0]);
  quick.far = power_of_two<F32>(lane.shift - 24) - power_of_two<F32>(-21);
  quick.discard = ~static_cast<uint32_t>(lane.keep), quick.drop = static_cast<uint32_t>(32 - lane.shift);
  return quick;
}

// The element of a number or, with `kCodes`, its code, of floats without the bits of the sign above it. Unless that is exact,
// `doubt` gets bits if it is NaN or very large, or so near to a midpoint of two elements that an error of 2**-22 of it may have
// decided.
template <bool kWholes, bool kExact, bool kCodes>
static inline uint32_t quick_element(uint32_t bits, const Quick& quick, uint32_t& doubt) {
  const uint32_t a = bits & 0x7fffffff, sign = bits ^ a;
  if constexpr (kWholes) {
    const float x = number(bits), sum = x + kMagic;
    const uint32_t limited = static_cast<uint32_t>(least(most(static_cast<int32_t>(bits_of(sum)), quick.first), quick.last));
    const uint32_t result = kCodes ? limited : bits_of(number(limited) - kMagic);
    if constexpr (kExact)
      return choose<uint32_t>(mask<F32>(static_cast<int32_t>(a) > 0x7f800000), Constants<F32>::kQuietNan | sign, result);
    doubt |= mask<F32>(!(__builtin_fabsf(x - (sum - kMagic)) < multiply_add(number(a), -0x1p-22f, 0.5f)));
    return result;
  } else {
    const Quanta& quanta = quick.quanta;
    const int32_t magnitude = static_cast<int32_t>(a), limited = kExact ? least(magnitude, quanta.limit) : magnitude;
    const int32_t exponent = Quanta::exponent_of(limited, quanta.smallest);
    const float sum = quanta.sum_of(limited, exponent), rounded = quanta.rounded(sum, exponent);
    if constexpr (kExact)
      return sign | choose<uint32_t>(mask<F32>(magnitude > 0x7f800000), Constants<F32>::kQuietNan, bits_of(rounded));
    doubt |= mask<F32>(!(__builtin_fabsf(number(a) - rounded) < number(static_cast<uint32_t>(exponent)) * quick.far));
    if constexpr (kCodes) {
      const int32_t code = least(quanta.code_of(sum, exponent, quanta.base), quanta.code_limit);
      return static_cast<uint32_t>(code) | (bits >> quanta.sign_shift & quanta.sign);
    }
    return static_cast<uint32_t>(least(static_cast<int32_t>(bits_of(rounded)), quanta.limit)) | sign;
  }
}

// The same by a random word. A number is rounded away from zero where the word, as a fraction, is below what is cut; the error
// of a quotient may decide where both are near, also one near 0 and the other near 1.
template <bool kWholes>
static inline uint32_t drawn_element(uint32_t bits, uint32_t word, const Quick& quick, uint32_t& doubt) {
  const uint32_t a = bits & 0x7fffffff, sign = bits ^ a;
  uint32_t result;
  if constexpr (kWholes) {
    constexpr float kWhole = 0x1p23f, kMost = 512;  // one magnitude has a rounding error below 2**-15, and quotients one of 2**-14
    const float x = number(a), limited = x > kMost ? kMost : x;
    const float sum = limited + static_cast<float>(static_cast<int32_t>(~word >> 8)) * 0x1p-24f;
    const float nearest = (sum + kWhole) - kWhole, whole = nearest > sum ? nearest - 1 : nearest;
    doubt |= mask<F32>(__builtin_fabsf(sum - nearest) <= 0x1p-12f);
    const float upper = sign != 0 ? -quick.lower : quick.upper, found = whole > upper ? upper : whole;
    result = bits_of(found) | (sign & mask<F32>(found != 0));
    return choose<uint32_t>(mask<F32>(static_cast<int32_t>(a) > 0x7f800000), Constants<F32>::kQuietNan | sign, result);
  } else {
    constexpr uint32_t kNear = 16;  // of 2**(23 - m) a step, where a quotient has an error of 2**(m - 21) of it, m < 4
    const uint32_t below = mask<F32>(static_cast<int32_t>(a) < quick.quanta.smallest);
    const float offset = number(static_cast<uint32_t>(quick.quanta.smallest));
    const uint32_t sum = choose<uint32_t>(below, bits_of(number(a) + offset), a) + (~word >> quick.drop);
    doubt |= mask<F32>(((sum + kNear) & quick.discard) < 2 * kNear);
    const uint32_t kept = sum & ~quick.discard;
    result = choose<uint32_t>(below, bits_of(number(kept) - offset), kept);
    result = choose<uint32_t>(mask<F32>(static_cast<int32_t>(result) > quick.quanta.limit), quick.beyond, result);
    result = choose<uint32_t>(mask<F32>(static_cast<int32_t>(a) > 0x7f800000), Constants<F32>::kQuietNan, result);
    return result | sign;
  }
}

// Beyond fp32's largest number values become that, whose bits are before those of infinity.
static inline uint32_t below_infinity(uint32_t value) {
  return value + mask<F32>((value & Constants<F32>::kMagnitude) == Constants<F32>::kInf);
}

static inline uint32_t value_of(uint32_t element, float factor, float second) {
  return below_infinity(bits_of(number(element) * factor * second));
}

// What a cast writes: elements, values, or values that are known to be far below fp32's largest number, under two scales
// or one.
enum Writes { kElements, kCodes, kValues, kSmallValues, kSmallValuesOfOne };

template <Writes kWrites, bool kExact>
static inline uint32_t written(uint32_t element, float factor, float second) {
  if constexpr (kWrites <= kCodes) return element;
  if constexpr (kWrites == kValues) return value_of(element, factor, second);
  const float value = number(element) * factor;
  return bits_of(kExact || kWrites == kSmallValuesOfOne ? value : value * second);
}

// The quotients of a run by a power of two. Returns bits if one is below fp32's normal numbers, and perhaps not exact.
static inline uint32_t divide_run(const uint32_t* in, int64_t count, float inverse, uint32_t* out) {
  constexpr int32_t kSmallestNormal = 0x00800000;
  uint32_t small = 0;
  LOWP_RUN_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t quotient = bits_of(number(in[i]) * inverse);
    small |= mask<F32>(static_cast<int32_t>(quotient & 0x7fffffff) < kSmallestNormal) & (in[i] & 0x7fffffff);
    out[i] = quotient;
  }
  return small;
}

// The same of runs of one number.
static inline uint32_t divide_each(const uint32_t* in, int64_t count, const float* inverse, uint32_t* out) {
  constexpr int32_t kSmallestNormal = 0x00800000;
  uint32_t small = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t quotient = bits_of(number(in[i]) * inverse[i]);
    small |= mask<F32>(static_cast<int32_t>(quotient & 0x7fffffff) < kSmallestNormal) & (in[i] & 0x7fffffff);
    out[i] = quotient;
  }
  return small;
}

// An element to nearest, or its code, or an element by a random word.
template <bool kWholes, bool kExact, Draws kDraws, Writes kWrites>
static inline uint32_t element_of(uint32_t bits, const uint32_t* word, const Quick& quick, uint32_t& doubt) {
  if constexpr (kDraws == kWord) return drawn_element<kWholes>(bits, *word, quick, doubt);
  return quick_element<kWholes, kExact, kWrites == kCodes>(bits, quick, doubt);
}

// The same as `cast_run` for runs of one number. Returns bits where one is in doubt.
template <bool kWholes, bool kExact, Draws kDraws, Writes kWrites>
static inline uint32_t cast_each(const uint32_t* in, const uint32_t* words, int64_t count, const float* inverse,
                                 const float* factor, float second, const Quick& quick, uint32_t* out) {
  uint32_t doubt = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t element =
        element_of<kWholes, kExact, kDraws, kWrites>(bits_of(number(in[i]) * inverse[i]), words + i, quick, doubt);
    out[i] = written<kWrites, kExact>(element, factor[i], second);
  }
  return doubt;
}

// The values of a run or, with `kElements`, its elements. `doubts` get bits where one is in doubt: one each, if the length
// is constant, so that runs need no sum of theirs; otherwise the first.
template <bool kWholes, bool kExact, Draws kDraws, Writes kWrites, class Count>
static inline void cast_run(const uint32_t* in, const uint32_t* words, Count count, float inverse, float factor, float second,
                            const Quick& quick, uint32_t* out, uint32_t* doubts) {
  const int64_t length = count;
  uint32_t doubt = 0;
  LOWP_RUN_LOOP
  for (int64_t i = 0; i < length; ++i) {
    uint32_t own = 0;
    const uint32_t element = element_of<kWholes, kExact, kDraws, kWrites>(bits_of(number(in[i]) * inverse), words + i, quick, own);
    out[i] = written<kWrites, kExact>(element, factor, second);
    if (kExact) continue;
    if (is_constant(count))
      doubts[i] |= own;
    else
      doubt |= own;
  }
  doubts[0] |= doubt;
}

static inline double largest_element(const lowp_sharing& sharing) {
  const double below = -sharing.element.minimum;
  return sharing.element.maximum > below ? sharing.element.maximum : below;
}

// Whether no product of a finite element with a scale, times `outer`, reaches fp32's largest number; NaN counts as none.
static inline bool are_small(const lowp_sharing& sharing, const Runs& runs, const double* scale, double outer) {
  const double most = 0x1p120 / (outer * largest_element(sharing));
  uint64_t others = 0;
  LOWP_VECTOR_LOOP
  for (int64_t run = 0; run < runs.number; ++run) others |= mask<F64>(__builtin_fabs(scale[run]) > most);
  return others == 0;
}

// Whether no scale is NaN.
static inline bool are_known(const Runs& runs, const double* scale) {
  uint64_t unknown = 0;
  LOWP_VECTOR_LOOP
  for (int64_t run = 0; run < runs.number; ++run) unknown |= mask<F64>(scale[run] != scale[run]);
  return unknown == 0;
}

// What runs are cast with: made of their scales, once for all strips under these.
struct Factors {
  alignas(64) float factor[kBlock], inverse[kBlock];  // the scales in fp32, and what numbers are multiplied by
  alignas(64) int32_t low[kBlock], high[kBlock];      // limits of numbers that are rounded as they stand: of floats
                                                      // the smallest normal and the largest one
  bool near, reaches;  // whether numbers are rounded as they stand; otherwise, whether they are cast in fp32
  bool small, known;   // whether no value is near fp32's largest number, and no scale is NaN
};

struct GroupCast {
  const lowp_sharing& sharing;
  Caster<F32> narrow;
  Caster<F64> wide, other;  // `other`: of runs whose scale has a minus sign
  bool is_quick_cast;  // in fp32 by the quick cast; only under powers of two by others
  bool is_drawn;       // the quick cast is stochastic
  bool in_fp32;
  bool small_counts;  // whether it matters that a number is too small for fp32 under its scale
  bool is_near_cast;        // whether `are_near` may be true
  double nearest, farthest;  // the scales for which it may
  Quick quick, quick_other;
  uint64_t seed;
  int64_t index;

  // `step`: the distance of the indices of neighbours, which determine random words.
  GroupCast(const lowp_sharing& given, uint64_t given_seed, int64_t first, int64_t step)
      : sharing(given), narrow(given.element, given_seed, first), wide(given.element, given_seed, first),
        other(given.other.bits != 0 ? given.other : given.element, given_seed, first), is_quick_cast(is_quick(given.element)),
        is_drawn(false), quick(make_quick(given.element, narrow.lane)), quick_other(make_quick(given.other, narrow.lane)),
        seed(given_seed), index(first) {
    const lowp_cast& element = sharing.element;
    const bool is_float = element.kind == kFloat;
    const bool to_nearest = element.rounding == kNearestEven || element.rounding == kNearestAway;
    in_fp32 = narrow.kernel != nullptr && (!is_float || (element.is_signed && element.min_exponent > -90));
    narrow.step = wide.step = other.step = step;
    if (!sharing.power) {  // all `other` elements are as quick as floats with 4 bits are
      is_drawn = is_drawn_quickly(element, narrow);
      is_quick_cast |= is_drawn;
      in_fp32 = is_quick_cast && element.bits <= 8;
    }
    if (sharing.outer.bits) in_fp32 = in_fp32 && has_small_products(sharing);
    small_counts = !to_nearest && element.rounding != kTowardZero;
    is_near_cast = sharing.power && is_quick_cast && sharing.other.bits == 0 && !sharing.corrects;
    nearest = 0x1p-100 / (is_float ? static_cast<double>(number(static_cast<uint32_t>(quick.quanta.smallest))) : 1);
    farthest = 0x1p100 / largest_element(sharing);
  }

  // The elements of a strip whose number `first` is the first, under the scales of its runs times `outer`; 0 under a scale
  // of NaN. `by`: of `invert`, which was true. `in` and `out` differ. Returns false if fp32 does not decide, with `out`
  // undefined.
  bool elements(const uint32_t* in, const Runs& runs, const Factors& by, const double* scale, double outer, const uint32_t* words,
                int64_t first, int64_t count, uint32_t* out) const {
    alignas(64) uint32_t quotients[kBlock];
    if (is_quick_cast) {
      cast_strip<kElements>({in, runs, by, scale, outer, words, first, out});
      return true;
    }
    uint32_t small = 0;
    if (runs.each == 1) {
      small = divide_each(in, runs.number, by.inverse, quotients);
    } else {
      each_run(runs, [&](int64_t run, int64_t begin, auto length) {
        small |= divide_run(in + begin, length, by.inverse[run], quotients + begin);
      });
    }
    if (small != 0 && small_counts) return false;
    if (!by.known) mark(runs, scale, quotients, uint32_t{0});
    narrow.with_words(quotients, out, first, count, words);
    return true;
  }

  // Whether a strip under found powers of two is rounded as it stands (`round_near`): all is finite, and no step of that is
  // beyond fp32's normal numbers. Then `factor` gets the scales; those of zeros, for which any does, are 1. `found`: the largest
  // magnitudes of the runs, or null; none is larger than `most`.
  bool are_near(const double* found, double most, const Runs& runs, const double* scale, double outer, float* factor) const {
    constexpr double kMost = 0x1p100;
    if (!is_near_cast || outer != 1 || (found == nullptr && !(most < kMost))) return false;
    uint64_t far = 0;
    if (found == nullptr) {
      for (int64_t run = 0; run < runs.number; ++run) {
        far |= mask<F64>(!(scale[run] >= nearest)) | mask<F64>(scale[run] > farthest);
        factor[run] = static_cast<float>(scale[run]);
      }
      return far == 0;
    }
    LOWP_VECTOR_LOOP
    for (int64_t run = 0; run < runs.number; ++run) {
      const uint64_t zero = mask<F64>(found[run] == 0);
      const double by = number(choose<uint64_t>(zero, bits_of(1.0), bits_of(scale[run])));
      far |= mask<F64>(!(found[run] < kMost)) | mask<F64>(!(by >= nearest)) | mask<F64>(by > farthest) |
             mask<F64>(bits_of(found[run]) >> 63 != 0);
      factor[run] = static_cast<float>(by);
    }
    return far == 0;
  }

  // The values, or with `kAsCodes` the codes, of a strip of which `are_near` is true; `out` may be `in`. For floats without the
  // bits of the sign above the code. `follows`: after another one under the same scales.
  template <bool kAsCodes>
  void round_near(const uint32_t* in, const Runs& runs, Factors& by, bool follows, uint32_t* out) const {
    const bool wholes = sharing.element.kind == kInteger;
    if (!follows) wholes ? limit_near<true, kAsCodes>(runs, by) : limit_near<false, kAsCodes>(runs, by);
    wholes ? round_near_as<true, kAsCodes>(in, runs, by, out) : round_near_as<false, kAsCodes>(in, runs, by, out);
  }

  // The values of a strip in one step. Returns false if there is no such step.
  bool all(const uint32_t* in, const Runs& runs, const Factors& by, const double* scale, double outer, const uint32_t* words,
           int64_t first, uint32_t* out) const {
    if (!is_quick_cast || sharing.other.bits != 0) return false;
    const Given given{in, runs, by, scale, outer, words, first, out};
    if (by.small && !sharing.power && outer == 1)
      cast_strip<kSmallValuesOfOne>(given);
    else if (by.small)
      cast_strip<kSmallValues>(given);
    else
      cast_strip<kValues>(given);
    return true;
  }

  // The codes of elements, those of floats without the bits of the sign above. Returns false, with `out` undefined, where one is in
  // doubt or the cast is no quick one to nearest.
  bool codes(const uint32_t* in, const Runs& runs, const Factors& by, const double* scale, double outer, uint32_t* out) const {
    if (!is_quick_cast || is_drawn || sharing.power || sharing.other.bits != 0) return false;
    const Given given{in, runs, by, scale, outer, nullptr, 0, out};
    const bool wholes = sharing.element.kind == kInteger;
    if (wholes ? cast_runs<kOnlyWholes, false, kNone, kCodes>(given) : cast_runs<kOnlyFloats, false, kNone, kCodes>(given)) return false;
    if (!by.known) mark(runs, scale, out, 0u);
    return true;
  }

  // The same as `elements` in fp64; `in` may be `out`. With zero points the element is limited so that their sum is in the range.
  void elements(const uint64_t* in, const Runs& runs, const double* scale, double outer, const int32_t* zero_point,
                const uint32_t* words, int64_t first, int64_t count, uint64_t* out) const {
    each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
      const double divisor = divisor_of(sharing, scale[run] * outer);
      if (divisor == 0) {  // too small for the format of scales: zeros, with their signs
        for (int64_t i = begin; i < begin + length; ++i) out[i] = bits_of(number(in[i]) * 0.0);
        return;
      }
      LOWP_VECTOR_LOOP
      for (int64_t i = begin; i < begin + length; ++i) out[i] = bits_of(number(in[i]) / divisor);
    });
    mark(runs, scale, out, uint64_t{0});
    if (sharing.other.bits != 0) {
      alignas(64) uint64_t wholes[kBlock];
      other.with_words(out, wholes, first, count, words);
      wide.with_words(out, out, first, count, words);
      return take_negative(runs, scale, wholes, out);
    }
    if (zero_point == nullptr) return wide.with_words(out, out, first, count, words);
    each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
      lowp_cast moved = sharing.element;
      moved.maximum -= zero_point[run];
      moved.minimum -= zero_point[run];
      const Caster<F64> caster(moved, seed, index);
      caster.with_words(out + begin, out + begin, first + begin, length, words + begin);
    });
  }

  // The factors of a cast in fp32. Returns false if it is not, or if that does not reach the scales.
  bool invert(const Runs& runs, const double* scale, double outer, Factors& by) const {
    if (!in_fp32) return false;
    const bool overflows = sharing.element.kind == kFloat && quick.beyond == Constants<F32>::kInf;
    by.small = !overflows && (!sharing.power || outer == 1) && are_small(sharing, runs, scale, outer);
    by.known = !sharing.marks || are_known(runs, scale);
    LOWP_VECTOR_LOOP
    for (int64_t run = 0; run < runs.number; ++run) by.factor[run] = static_cast<float>(scale[run]);
    if (sharing.other.bits == 0) return invert(runs, scale, outer, [](double divisor) { return divisor; }, by.inverse);
    const double part = -sharing.element.maximum / sharing.other.maximum;
    return invert(runs, scale, outer, [part](double divisor) { return divisor < 0 ? divisor * part : divisor; }, by.inverse);
  }

 private:
  template <bool kWholes, bool kAsCodes>
  void limit_near(const Runs& runs, Factors& by) const {
    const Quick constants = quick;
    const Quanta quanta = constants.quanta;
    LOWP_VECTOR_LOOP
    for (int64_t run = 0; run < runs.number; ++run) {
      const float scale = by.factor[run], magic = kMagic * scale;
      const float lower = kWholes ? magic + constants.lower * scale : number(static_cast<uint32_t>(quanta.smallest)) * scale;
      const float upper = kWholes ? magic + constants.upper * scale : constants.upper * scale;
      by.low[run] = static_cast<int32_t>(bits_of(lower));
      by.high[run] = kAsCodes && !kWholes ? quanta.base_of(by.low[run]) : static_cast<int32_t>(bits_of(upper));
    }
  }

  template <bool kWholes, bool kAsCodes>
  __attribute__((noinline)) void round_near_as(const uint32_t* in, const Runs& runs, const Factors& by, uint32_t* out) const {
    const Quanta quanta = quick.quanta;
    const auto round = [&](uint32_t bits, float factor, int32_t lowest, int32_t highest) {
      if constexpr (kWholes) {
        const float magic = kMagic * factor;
        const int32_t sum = least(most(static_cast<int32_t>(bits_of(number(bits) + magic)), lowest), highest);
        return kAsCodes ? static_cast<uint32_t>(sum) : bits_of(number(static_cast<uint32_t>(sum)) - magic);
      } else {
        const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffff), exponent = Quanta::exponent_of(magnitude, lowest);
        const float sum = quanta.sum_of(magnitude, exponent);
        if constexpr (kAsCodes) {
          const int32_t code = least(quanta.code_of(sum, exponent, highest), quanta.code_limit);
          return static_cast<uint32_t>(code) | (bits >> quanta.sign_shift & quanta.sign);
        }
        const int32_t rounded = least(static_cast<int32_t>(bits_of(quanta.rounded(sum, exponent))), highest);
        return static_cast<uint32_t>(rounded) | (bits & 0x80000000);
      }
    };
    if (runs.each == 1) {
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < runs.number; ++i) out[i] = round(in[i], by.factor[i], by.low[i], by.high[i]);
      return;
    }
    each_part(runs, in, [&](int64_t run, int64_t begin, auto count) {
      const float factor = by.factor[run];
      const int32_t lowest = by.low[run], highest = by.high[run];
      const int64_t length = count;
      LOWP_RUN_LOOP
      for (int64_t i = begin; i < begin + length; ++i) out[i] = round(in[i], factor, lowest, highest);
    });
  }

  template <class Divisor>
  bool invert(const Runs& runs, const double* scale, double outer, Divisor divisor_from, float* inverse) const {
    const double least = sharing.power ? 0x1p-127 : 0x1p-126, most = sharing.power ? 0x1p127 : 0x1p126;
    uint64_t beyond = is_fp32(outer) ? 0 : 1;
    LOWP_VECTOR_LOOP
    for (int64_t run = 0; run < runs.number; ++run) {
      const double divisor = divisor_from(scale[run] * outer);
      const uint64_t known = mask<F64>(divisor == divisor) & mask<F64>(divisor != 0);
      const double size = number(choose<uint64_t>(known, bits_of(divisor), bits_of(1.0)));
      beyond |= mask<F64>(size < least) | mask<F64>(size > most) | (mask<F64>(!is_fp32(scale[run])) & known);
      inverse[run] = number(bits_of(1 / static_cast<float>(size)) & static_cast<uint32_t>(mask<F64>(divisor != 0)));
    }
    return beyond == 0;
  }

  // What a strip is cast by and with.
  struct Given {
    const uint32_t* in;
    const Runs& runs;
    const Factors& by;
    const double* scale;
    double outer;
    const uint32_t* words;
    int64_t first;
    uint32_t* out;
  };

  template <Writes kWrites>
  void cast_strip(const Given& given) const {
    constexpr Writes kExactly = kWrites == kSmallValuesOfOne ? kSmallValues : kWrites;
    const bool wholes = sharing.element.kind == kInteger;
    if (sharing.power)
      wholes ? cast_runs<kOnlyWholes, true, kNone, kExactly>(given) : cast_runs<kOnlyFloats, true, kNone, kExactly>(given);
    else if (sharing.other.bits != 0)
      is_drawn ? cast_surely<kEither, kWord, kElements>(given) : cast_surely<kEither, kNone, kElements>(given);
    else if (is_drawn)
      wholes ? cast_surely<kOnlyWholes, kWord, kWrites>(given) : cast_surely<kOnlyFloats, kWord, kWrites>(given);
    else
      wholes ? cast_surely<kOnlyWholes, kNone, kWrites>(given) : cast_surely<kOnlyFloats, kNone, kWrites>(given);
    if (!given.by.known) mark(given.runs, given.scale, given.out, kWrites == kElements ? 0 : Constants<F32>::kQuietNan);
  }

  template <Elements kType, Draws kDraws, Writes kWrites>
  void cast_surely(const Given& given) const {
    if (cast_runs<kType, false, kDraws, kWrites>(given) != 0) settle_runs<kType, kDraws, kWrites>(given);
  }

  // `count` neighbours of a run, from `begin` on.
  template <Elements kType, bool kExact, Draws kDraws, Writes kWrites, class Count>
  inline void cast_part(const Given& given, int64_t run, int64_t begin, Count count, const Quick& constants, uint32_t* doubts) const {
    const float factor = given.by.factor[run], second = static_cast<float>(given.outer);
    const auto cast = [&](auto wholes, const Quick& of) {
      cast_run<decltype(wholes)::value, kExact, kDraws, kWrites>(given.in + begin, given.words + begin, count, given.by.inverse[run],
                                                                 factor, second, of, given.out + begin, doubts);
    };
    if (kType == kOnlyWholes || (kType == kEither && given.scale[run] < 0))
      cast(std::true_type{}, kType == kEither ? quick_other : constants);
    else if constexpr (kType != kOnlyWholes)
      cast(std::false_type{}, constants);
  }

  // `count` runs of one number, from `begin` on. Returns bits where one is in doubt.
  template <Elements kType, bool kExact, Draws kDraws, Writes kWrites>
  inline uint32_t cast_ones(const Given& given, int64_t begin, int64_t count, const Quick& constants) const {
    const auto cast = [&](auto wholes, const Quick& of, uint32_t* out) {
      return cast_each<decltype(wholes)::value, kExact, kDraws, kWrites>(given.in + begin, given.words + begin, count,
                                                                         given.by.inverse + begin, given.by.factor + begin,
                                                                         static_cast<float>(given.outer), of, out);
    };
    uint32_t* const out = given.out + begin;
    if constexpr (kType != kEither) return cast(std::bool_constant<kType == kOnlyWholes>{}, constants, out);
    alignas(64) uint32_t wholes[kBlock];
    const uint32_t doubt = cast(std::true_type{}, quick_other, wholes) | cast(std::false_type{}, constants, out);
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) out[i] = given.scale[begin + i] < 0 ? wholes[i] : out[i];
    return doubt;
  }

  template <Elements kType, bool kExact, Draws kDraws, Writes kWrites>
  __attribute__((noinline)) uint32_t cast_runs(const Given& given) const {
    const Quick constants = quick;
    const Runs& runs = given.runs;
    if (runs.each == 1) return cast_ones<kType, kExact, kDraws, kWrites>(given, 0, runs.number, constants);
    alignas(64) uint32_t doubts[32] = {};
    each_part(runs, given.in, [&](int64_t run, int64_t begin, auto count) {
      cast_part<kType, kExact, kDraws, kWrites>(given, run, begin, count, constants, doubts);
    });
    return largest_of<F32, false>(doubts, 32);
  }

  // A strip with quotients in doubt, of which there are few: once more, and in fp64 the few numbers beside each of them.
  template <Elements kType, Draws kDraws, Writes kWrites>
  __attribute__((noinline)) void settle_runs(const Given& given) const {
    constexpr int64_t kFew = 16;
    const Quick constants = quick;
    if (given.runs.each == 1) {
      for (int64_t begin = 0; begin < given.runs.number; begin += kFew) {
        const int64_t end = smaller(begin + kFew, given.runs.number);
        if (cast_ones<kType, false, kDraws, kWrites>(given, begin, end - begin, constants) == 0) continue;
        for (int64_t i = begin; i < end; ++i) settle<kWrites>(given, i, i, 1);
      }
      return;
    }
    each_run(given.runs, [&](int64_t run, int64_t first, int64_t length) {
      for (int64_t begin = first; begin < first + length; begin += kFew) {
        const int64_t count = smaller(kFew, first + length - begin);
        uint32_t doubt = 0;
        cast_part<kType, false, kDraws, kWrites>(given, run, begin, count, constants, &doubt);
        if (doubt != 0) settle<kWrites>(given, run, begin, count);
      }
    });
  }

  // At most 16 numbers of a run, in fp64.
  template <Writes kWrites>
  void settle(const Given& given, int64_t run, int64_t begin, int64_t count) const {
    alignas(64) uint64_t quotients[16];
    const double divisor = divisor_of(sharing, given.scale[run] * given.outer);
    const float factor = static_cast<float>(given.scale[run]), second = static_cast<float>(given.outer);
    const uint32_t* const in = given.in + begin;
    for (int64_t i = 0; i < count; ++i)
      quotients[i] = bits_of(divisor == 0 ? wide_number(in[i]) * 0.0 : wide_number(in[i]) / divisor);
    const Caster<F64>& caster = given.scale[run] < 0 ? other : wide;
    caster.with_words(quotients, quotients, given.first + begin * caster.step, count, given.words + begin);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t element = bits_of(static_cast<float>(number(quotients[i])));
      given.out[begin + i] = kWrites == kElements ? element : value_of(element, factor, second);
    }
  }

  // Writes what stands for numbers under a scale of NaN.
  template <class Bits>
  void mark(const Runs& runs, const double* scale, Bits* numbers, Bits as) const {
    if (!sharing.marks || are_known(runs, scale)) return;
    each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
      if (scale[run] == scale[run]) return;
      for (int64_t i = begin; i < begin + length; ++i) numbers[i] = as;
    });
  }
};

template <Writes kWrites, class Count>
static inline void multiply_run(const uint32_t* in, Count count, float factor, float second, uint32_t* out) {
  const int64_t length = count;
  LOWP_RUN_LOOP
  for (int64_t i = 0; i < length; ++i) out[i] = written<kWrites, false>(in[i], factor, second);
}

// The values of a strip of elements in fp64, which rounds products once before fp32 does: by factors that fp32 may lack.
static inline void wide_values(const lowp_sharing& sharing, const uint32_t* element, const Runs& runs, const double* scale,
                               double outer, uint32_t* out) {
  alignas(64) double factor[kBlock];
  const double above = -sharing.element.maximum, below = sharing.other.maximum;
  LOWP_VECTOR_LOOP
  for (int64_t run = 0; run < runs.number; ++run) {  // those of `divisor_of`, without a branch
    const double by = scale[run] * outer, whole = by * above / below;
    factor[run] = by < 0 ? whole : by;
  }
  if (runs.each == 1) {
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < runs.number; ++i) out[i] = below_infinity(bits_of(static_cast<float>(number(element[i]) * factor[i])));
    return;
  }
  each_run(runs, [&](int64_t run, int64_t begin, auto count) {
    const double by = factor[run];
    const uint32_t* const in = element + begin;
    uint32_t* const to = out + begin;
    const int64_t length = count;
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < length; ++i) to[i] = below_infinity(bits_of(static_cast<float>(number(in[i]) * by)));
  });
}

// The values of a strip of elements.
__attribute__((noinline)) static void values(const lowp_sharing& sharing, const uint32_t* element, const Runs& runs,
                                             const double* scale, double outer, uint32_t* out) {
  if (sharing.other.bits != 0) return wide_values(sharing, element, runs, scale, outer, out);
  const float second = static_cast<float>(outer);
  if (runs.each == 1) {
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < runs.number; ++i)
      out[i] = value_of(element[i], scale[i] == scale[i] ? static_cast<float>(scale[i]) : number(Constants<F32>::kQuietNan), second);
    return;
  }
  const auto multiply = [&](auto writes) {
    each_run(runs, [&](int64_t run, int64_t begin, auto length) {
      const float factor = scale[run] == scale[run] ? static_cast<float>(scale[run]) : number(Constants<F32>::kQuietNan);
      multiply_run<decltype(writes)::value>(element + begin, length, factor, second, out + begin);
    });
  };
  const bool finite = sharing.element.kind != kFloat || sharing.element.infinity < 0;
  if (!finite || !are_small(sharing, runs, scale, outer)) return multiply(std::integral_constant<Writes, kValues>{});
  outer == 1 ? multiply(std::integral_constant<Writes, kSmallValuesOfOne>{}) : multiply(std::integral_constant<Writes, kSmallValues>{});
}

// The same in fp64, in place. Under a scale of NaN all are that NaN: in a product of two the compiler would choose one.
static void values(const lowp_sharing& sharing, uint64_t* element, const Runs& runs, const double* scale, double outer,
                   const int32_t* zero_point) {
  each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
    const double factor = divisor_of(sharing, scale[run] * outer), moved = zero_point == nullptr ? 0 : zero_point[run];
    if (factor != factor) {
      for (int64_t i = begin; i < begin + length; ++i) element[i] = Constants<F64>::kQuietNan;
      return;
    }
    LOWP_VECTOR_LOOP
    for (int64_t i = begin; i < begin + length; ++i) element[i] = bits_of((number(element[i]) - moved) * factor);
  });
}

}  // namespace LOWP_ISA
}  // namespace lowp
