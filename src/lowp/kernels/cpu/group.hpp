// The cast of groups of numbers that share a scale. Included once per instruction set.
//
// It works on a strip: at most kBlock numbers in a buffer, which are consecutive runs. A run is a group or a part of one,
// from a row, or from a column that was copied into the buffer. In this order:
//   1. `largest_of_runs` finds the largest magnitude of every run (of a group in parts: the largest of its parts'),
//   2. `ScaleOf` computes the scale of every group from it,
//   3. `GroupCast` divides the runs by their scales and rounds them to elements, and `values` multiplies these again.
// Quotients are rounded once, as if they were computed in fp64, and values are rounded once to the type of the tensor.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

struct Runs {
  int64_t number = 0;
  int64_t each = 0;  // the length of all runs; 0: they differ
  int32_t length[kBlock];
};

template <int64_t kCount>
struct Length {
  constexpr operator int64_t() const { return kCount; }
};

// pass(run, index of its first number, its length), with the usual lengths as constants.
template <class Pass>
static inline void each_run(const Runs& runs, Pass pass) {
  if (runs.each == 32) {
    for (int64_t run = 0; run < runs.number; ++run) pass(run, 32 * run, Length<32>{});
  } else if (runs.each == 16) {
    for (int64_t run = 0; run < runs.number; ++run) pass(run, 16 * run, Length<16>{});
  } else {
    for (int64_t run = 0, begin = 0; run < runs.number; begin += runs.length[run++]) pass(run, begin, runs.length[run]);
  }
}

// -- 1. the largest numbers -------------------------------------------------------------------------------------------
template <class C, bool kFinite>
static inline typename C::Bits largest_of(const typename C::Bits* in, int64_t count) {
  using Int = typename C::Int;
  constexpr Int kInf = static_cast<Int>(Constants<C>::kInf);
  Int largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    Int magnitude = static_cast<Int>(in[i] & Constants<C>::kMagnitude);
    if (kFinite) magnitude = magnitude < kInf ? magnitude : 0;
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<typename C::Bits>(largest);
}

static inline double wide_number(uint32_t bits) { return static_cast<double>(number(bits)); }
static inline double wide_number(uint64_t bits) { return number(bits); }

template <class C>
__attribute__((noinline)) static void largest_of_runs(const typename C::Bits* in, const Runs& runs, Largest* found) {
  using Bits = typename C::Bits;
  alignas(64) Bits largest[kBlock];
  each_run(runs, [&](int64_t run, int64_t begin, auto count) {
    largest[run] = largest_of<C, false>(in + begin, count);
  });
  Bits most = 0;
  for (int64_t run = 0; run < runs.number; ++run) {
    found[run] = {wide_number(largest[run]), true};
    most = most > largest[run] ? most : largest[run];
  }
  if (most < Constants<C>::kInf) return;
  each_run(runs, [&](int64_t run, int64_t begin, int64_t count) {
    if (largest[run] >= Constants<C>::kInf)
      found[run] = {wide_number(largest_of<C, true>(in + begin, count)), false};
  });
}

// -- 2. their scales --------------------------------------------------------------------------------------------------
static inline int floor_log2(double magnitude) {  // of a positive number
  const uint64_t bits = bits_of(magnitude);
  if (bits >> 52) return static_cast<int>(bits >> 52) - 1023;
  return 63 - __builtin_clzll(bits) - 1074;
}

// fp64: its product with fp32's numbers, and that with the scale of the tensor, are exact.
struct ScaleOf {
  const lowp_sharing& sharing;
  Caster<F64> rounded;

  explicit ScaleOf(const lowp_sharing& given) : sharing(given), rounded(given.scale, 0) {}

  // At most kBlock groups. `outer`: the scale of the whole tensor, if the format has one.
  void operator()(const Largest* found, int64_t groups, double outer, double* scale) const {
    if (sharing.power) {
      for (int64_t group = 0; group < groups; ++group) {
        const double largest = found[group].magnitude;
        int exponent = largest == 0 ? sharing.of_zeros : floor_log2(largest) - sharing.top;
        exponent = exponent < sharing.lowest ? sharing.lowest : exponent > sharing.last ? sharing.last : exponent;
        scale[group] = power_of_two<F64>(exponent);
      }
    } else {
      ratios(found, groups, outer, scale);
    }
    if (!sharing.marks) return;
    for (int64_t group = 0; group < groups; ++group)
      scale[group] = found[group].finite ? scale[group] : number(Constants<F64>::kQuietNan);
  }

 private:
  void ratios(const Largest* found, int64_t groups, double outer, double* scale) const {
    alignas(64) uint64_t ratio[kBlock], result[kBlock];
    const bool two = sharing.outer.bits != 0;
    ratio[0] = 0;  // without it GCC warns that there may be no groups
    for (int64_t group = 0; group < groups; ++group) {
      const double quotient = found[group].magnitude * sharing.headroom / sharing.highest;
      ratio[group] = bits_of(two ? quotient / outer : quotient);
    }
    rounded.with_words(ratio, result, 0, groups, nullptr);
    for (int64_t group = 0; group < groups; ++group) {
      const double size = number(result[group]), least = sharing.smallest;  // subnormal numbers have few bits
      scale[group] = two ? size : ratio[group] == 0 ? 1.0 : size > least ? size : least;
    }
  }
};

static inline bool is_fp32(double x) { return static_cast<double>(static_cast<float>(x)) == x; }

// -- 3. elements and values -------------------------------------------------------------------------------------------
// How quotients in fp32 become those in fp64. Powers of two: they are exact, unless small. Otherwise they are in doubt if
// rounding errors may have moved them to or over the midpoint of two elements.
enum Sharing { kPowers, kRatios, kTwoLevels };
constexpr int kTolerance = 3;  // of kTwoLevels in fp32's last places: the inverse and the product are rounded

// Whether fp32 represents all products of an element and a scale.
static inline bool has_small_products(const lowp_sharing& sharing) {
  const lowp_cast &element = sharing.element, &scale = sharing.scale;
  return element.bits <= 8 && scale.bits <= 8 && element.maximum < 0x1p40 && scale.maximum < 0x1p40 &&
         (element.kind != kFloat || element.min_exponent > -40) && scale.min_exponent > -40;
}

// The quotients of a run. Returns whether one is in doubt, as bits. `far` from a multiple of the quantum is a midpoint.
template <int kKind>
static inline uint32_t divide_run(const uint32_t* in, int64_t count, float by, const Lane<F32>& lane, float far,
                                  uint32_t* out) {
  constexpr uint32_t kPlaces = kKind == kTwoLevels ? kTolerance : 0;
  constexpr int32_t kSmallestNormal = 0x00800000;
  uint32_t doubt = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float quotient = kKind == kRatios ? number(in[i]) / by : number(in[i]) * by;
    const uint32_t a = bits_of(quotient) & 0x7fffffff;
    uint32_t found = mask<F32>(static_cast<int32_t>(a) < kSmallestNormal) & (in[i] & 0x7fffffff);
    if (kKind != kPowers) {
      const uint32_t below = mask<F32>(static_cast<int32_t>(a) < lane.smallest);
      const float size = number(a & below), rest = size - ((size + lane.magic) - lane.magic);
      const uint32_t fixed = mask<F32>(__builtin_fabsf(rest) >= far);
      const uint32_t normal = mask<F32>((a & lane.discard) - (lane.half - kPlaces) <= 2 * kPlaces);
      found = choose<uint32_t>(below, fixed, normal);
    }
    doubt |= found;
    out[i] = bits_of(quotient);
  }
  return doubt;
}

struct GroupCast {
  const lowp_sharing& sharing;
  Caster<F32> narrow;
  Caster<F64> wide;
  int kind;
  bool in_fp32;     // both steps can be done in fp32
  bool small_counts;  // whether a number too small for fp32 under its scale matters
  uint64_t seed;
  int64_t index;

  GroupCast(const lowp_sharing& given, uint64_t given_seed, int64_t first)
      : sharing(given), narrow(given.element, given_seed, first), wide(given.element, given_seed, first),
        kind(given.power ? kPowers : given.outer.bits ? kTwoLevels : kRatios), seed(given_seed), index(first) {
    const lowp_cast& element = sharing.element;
    const bool nearest = element.rounding == kNearestEven || element.rounding == kNearestAway;
    const bool is_float = element.kind == kFloat;
    in_fp32 = narrow.kernel != nullptr && (!is_float || (element.is_signed && element.min_exponent > -90));
    if (kind != kPowers) in_fp32 = in_fp32 && nearest && element.bits <= 8 && (!is_float || element.subnormals);
    if (kind == kTwoLevels) in_fp32 = in_fp32 && is_float && has_small_products(sharing);
    small_counts = !nearest && element.rounding != kTowardZero;
  }

  // The elements of a strip whose number `first` is the first, under the scales of its runs times `outer`; 0 under a scale
  // of NaN. `in` and `out` differ. Returns false if fp32 does not decide, with `out` undefined.
  bool elements(const uint32_t* in, const Runs& runs, const double* scale, double outer, const uint32_t* words,
                int64_t first, int64_t count, uint32_t* out) const {
    alignas(64) uint32_t quotients[kBlock];
    alignas(64) float by[kBlock];
    if (!in_fp32 || !factors(runs, scale, outer, by)) return false;
    const bool sure = kind == kPowers  ? divide<kPowers>(in, runs, by, quotients)
                      : kind == kRatios ? divide<kRatios>(in, runs, by, quotients)
                                        : divide<kTwoLevels>(in, runs, by, quotients);
    if (!sure) return false;
    clear_marked(runs, scale, quotients);
    narrow.with_words(quotients, out, first, count, words);
    return true;
  }

  // The same in fp64; `in` may be `out`. With zero points the element is limited so that their sum is in the range.
  void elements(const uint64_t* in, const Runs& runs, const double* scale, double outer, const int32_t* zero_point,
                const uint32_t* words, int64_t first, int64_t count, uint64_t* out) const {
    each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
      const double divisor = scale[run] * outer;
      if (divisor == 0) {  // too small for the format of scales: zeros, with their signs
        for (int64_t i = begin; i < begin + length; ++i) out[i] = bits_of(number(in[i]) * 0.0);
        return;
      }
      LOWP_VECTOR_LOOP
      for (int64_t i = begin; i < begin + length; ++i) out[i] = bits_of(number(in[i]) / divisor);
    });
    clear_marked(runs, scale, out);
    if (zero_point == nullptr) return wide.with_words(out, out, first, count, words);
    each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
      lowp_cast moved = sharing.element;
      moved.maximum -= zero_point[run];
      moved.minimum -= zero_point[run];
      const Caster<F64> caster(moved, seed, index);
      caster.with_words(out + begin, out + begin, first + begin, length, words + begin);
    });
  }

 private:
  // What quotients are computed with: the scales, or their inverses. Returns false if fp32 does not reach them.
  bool factors(const Runs& runs, const double* scale, double outer, float* by) const {
    const double least = kind == kPowers ? 0x1p-127 : 0x1p-126, most = kind == kPowers ? 0x1p127 : 0x1p126;
    bool reached = is_fp32(outer);
    for (int64_t run = 0; run < runs.number; ++run) {
      const double divisor = scale[run] * outer, size = divisor == divisor && divisor != 0 ? divisor : 1;
      reached &= size >= least && size <= most && (kind != kRatios || is_fp32(size));
      by[run] = static_cast<float>(kind == kRatios ? size : divisor == 0 ? 0 : 1 / size);
    }
    return reached;
  }

  template <int kKind>
  __attribute__((noinline)) bool divide(const uint32_t* in, const Runs& runs, const float* by, uint32_t* out) const {
    constexpr float kPlaces = kKind == kTwoLevels ? kTolerance : 0;
    const Lane<F32> lane = narrow.lane;
    const int top = sharing.element.kind == kFloat ? sharing.element.min_exponent : sharing.element.bits;
    const float far = lane.half_quantum - kPlaces * power_of_two<F32>(top - 23);
    uint32_t doubt = 0;
    each_run(runs, [&](int64_t run, int64_t begin, auto length) {
      doubt |= divide_run<kKind>(in + begin, length, by[run], lane, far, out + begin);
    });
    return doubt == 0 || (kKind == kPowers && !small_counts);
  }

  template <class Bits>
  void clear_marked(const Runs& runs, const double* scale, Bits* quotients) const {
    if (!sharing.marks) return;
    each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
      if (scale[run] != scale[run]) std::memset(quotients + begin, 0, sizeof(Bits) * static_cast<size_t>(length));
    });
  }
};

static inline void multiply_run(const uint32_t* in, int64_t count, float factor, float second, uint32_t* out) {
  constexpr float kLargest = 0x1.fffffep127f;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float value = number(in[i]) * factor * second;
    const float above = value < -kLargest ? -kLargest : value;
    out[i] = bits_of(above > kLargest ? kLargest : above);
  }
}

// The values of a strip of elements. Those beyond fp32's largest number become that.
__attribute__((noinline)) static void values(const uint32_t* element, const Runs& runs, const double* scale, double outer,
                                             uint32_t* out) {
  const float second = static_cast<float>(outer);
  each_run(runs, [&](int64_t run, int64_t begin, auto length) {
    const float factor = scale[run] == scale[run] ? static_cast<float>(scale[run]) : number(Constants<F32>::kQuietNan);
    multiply_run(element + begin, length, factor, second, out + begin);
  });
}

// The same in fp64, in place. Under a scale of NaN all are that NaN: in a product of two the compiler would choose one.
static void values(uint64_t* element, const Runs& runs, const double* scale, double outer, const int32_t* zero_point) {
  each_run(runs, [&](int64_t run, int64_t begin, int64_t length) {
    const double factor = scale[run] * outer, moved = zero_point == nullptr ? 0 : zero_point[run];
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
