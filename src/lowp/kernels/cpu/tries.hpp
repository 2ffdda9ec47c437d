// The better of two scales of a group, or of its two elements: that of the smaller sum of squared errors of nearest elements,
// as `_tried` of numbers/scaled.py finds it. Included once per instruction set.
//
// The errors of fp32's numbers are compared in fp32 first, in units of the first scale. Their difference has an error below
// `bound`; a group whose difference is not larger is compared in fp64, whose bits decide: of ordinary numbers one of a thousand.
#pragma once

#include "group.hpp"

namespace lowp {
namespace LOWP_ISA {

// Adds the second half of kSize numbers to the first, until one is left.
template <int64_t kSize, class Number>
static inline void add_halves(Number* numbers) {
  constexpr int64_t kHalf = kSize / 2;
  LOWP_RUN_LOOP
  for (int64_t i = 0; i < kHalf; ++i) numbers[i] += numbers[i + kHalf];
  if constexpr (kHalf > 1) add_halves<kHalf>(numbers);
}

// The sum of numbers that are not -0, by halves of the power of two from `length` on, for which there is room: of 16 or more.
template <class Number, class Count>
static inline Number sum_by_halves(Number* numbers, Count count, int64_t length) {
  int64_t size = 16;
  while (size < length) size *= 2;
  for (int64_t i = count; i < size; ++i) numbers[i] = 0;
  for (; size > 16; size /= 2) {
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < size / 2; ++i) numbers[i] += numbers[i + size / 2];
  }
  add_halves<16>(numbers);
  return numbers[0];
}

// The nearest e2m1, or whole number to 7, of one that is not negative.
template <bool kWholes>
static inline float nearest_of(float x) {
  constexpr float kMagic = 0x1.8p23f;
  const float exponent = number(bits_of(x) & 0x7f800000), power = kWholes ? kMagic : (exponent > 1 ? exponent : 1.0f) * 0x1p22f;
  const float nearest = (x + power) - power, most = kWholes ? 7 : 6;
  return nearest > most ? most : nearest;
}

struct Tries {
  const lowp_sharing& sharing;
  const ScaleOf& scale_of;
  const bool wholes;  // the second scale is for whole numbers, with a minus sign; otherwise it takes the largest number to 4
  double outer;
  alignas(64) double second[kBlock];
  // the inverses of both scales, the square of their ratio, and by how much the squared error of the second is larger
  alignas(64) float inverse[kBlock], other[kBlock], weight[kBlock], lead[kBlock];

  Tries(const ScaleOf& of, double given) : sharing(of.sharing), scale_of(of), wholes(of.sharing.other.bits != 0), outer(given) {}

  bool are_needed() const { return sharing.tries_four || wholes; }

  // The second scales of groups. NaN is the weight of those that are compared in fp64.
  __attribute__((noinline)) void begin(const double* found, const double* scale, int64_t groups) {
    const double by = sharing.outer.bits != 0 ? outer : 1;
    if (!wholes) scale_of.ratios(found, groups, outer, 4, second);
    LOWP_VECTOR_LOOP
    for (int64_t group = 0; group < groups; ++group) {
      const double one = scale[group] * by, next = wholes ? -scale[group] : second[group];
      const double two = wholes ? one * (6.0 / 7) : next * by, ratio = two / one;
      const bool is_usual = (found[group] >= 0) & (one > 0x1p-120) & (two < 0x1p120) & (ratio > 0.5) & (ratio <= 2) &
                            (found[group] <= 8 * one) & (found[group] <= 8 * two);
      inverse[group] = static_cast<float>(1 / one), other[group] = static_cast<float>(1 / two);
      weight[group] = is_usual ? static_cast<float>(ratio * ratio) : number(Constants<F32>::kQuietNan);
      second[group] = next;
    }
  }

  void compare(const uint32_t* in, const Runs& runs) { wholes ? compare_runs<true>(in, runs) : compare_runs<false>(in, runs); }
  void compare(const uint64_t*, const Runs& runs) { leave(runs.number); }

  // The same of `rows` rows of columns, `across` of which share a scale.
  template <class Load>
  void compare_columns(int64_t rows, int64_t count, int64_t across, Load row_of) {
    if constexpr (sizeof(*row_of(0)) != 4)
      leave((count + across - 1) / across);
    else
      wholes ? add_columns<true>(rows, count, across, row_of) : add_columns<false>(rows, count, across, row_of);
  }

  // Puts the better scales into `scale`. `length`: of whole groups. numbers_of(group, magnitudes) returns their number.
  template <class NumbersOf>
  void end(int64_t groups, int64_t length, NumbersOf numbers_of, double* scale) const {
    const float most = bound(length);
    uint32_t unsure = 0;
    LOWP_VECTOR_LOOP
    for (int64_t group = 0; group < groups; ++group) {
      unsure |= ~mask<F32>(__builtin_fabsf(lead[group]) > most);
      scale[group] = lead[group] < -most ? second[group] : scale[group];
    }
    if (unsure == 0) return;
    const double by = sharing.outer.bits != 0 ? outer : 1;
    for (int64_t group = 0; group < groups; ++group) {
      const double one = scale[group] * by, two = divisor_of(sharing, second[group] * by);
      if (__builtin_fabsf(lead[group]) > most || one != one || (one == 0 && two == 0)) continue;
      alignas(64) double numbers[kMostTried];
      const int64_t count = numbers_of(group, numbers);
      const auto is_better = [&](auto whole) {
        const double error_of_one = error<false>(numbers, whole, length, one);
        return (wholes ? error<true>(numbers, whole, length, two) : error<false>(numbers, whole, length, two)) < error_of_one;
      };
      if (count == 16 && length == 16 ? is_better(Length<16>{}) : is_better(count)) scale[group] = second[group];
    }
  }

 private:
  // Of a difference of `length` terms. Quotients are at most 8 and have an error of 2**-20, so that squares, of numbers to 2, have
  // one of 2**-17.6, and the second ones up to 4 times that. The terms are at most 20, and each sum of them rounds to 24 bits.
  static float bound(int64_t length) {
    const float terms = static_cast<float>(length);
    return terms * (0x1p-15f + terms * 20 * 0x1p-24f);
  }

  void leave(int64_t groups) {
    for (int64_t group = 0; group < groups; ++group) lead[group] = number(Constants<F32>::kQuietNan);
  }

  template <bool kWholes>
  static inline float term(uint32_t bits, float by_one, float by_two, float weight) {
    const float x = number(bits & 0x7fffffff), one = x * by_one, two = x * by_two;
    const float rest = nearest_of<false>(one) - one, other_rest = nearest_of<kWholes>(two) - two;
    return other_rest * other_rest * weight - rest * rest;
  }

  template <bool kWholes>
  __attribute__((noinline)) void compare_runs(const uint32_t* in, const Runs& runs) {
    each_run(runs, [&](int64_t run, int64_t begin, auto count) {
      alignas(64) float terms[kMostTried];
      const int64_t length = count;
      const float by_one = inverse[run], by_two = other[run], square = weight[run];
      LOWP_RUN_LOOP
      for (int64_t i = 0; i < length; ++i) terms[i] = term<kWholes>(in[begin + i], by_one, by_two, square);
      lead[run] = sum_by_halves(terms, count, count);
    });
  }

  template <bool kWholes, class Load>
  __attribute__((noinline)) void add_columns(int64_t rows, int64_t count, int64_t across, Load row_of) {
    if (across > 1)
      for (int64_t i = count - 1; i >= 0; --i)
        inverse[i] = inverse[i / across], other[i] = other[i / across], weight[i] = weight[i / across];
    std::memset(lead, 0, sizeof(lead[0]) * static_cast<size_t>(count));
    for (int64_t row = 0; row < rows; ++row) {
      const uint32_t* const in = row_of(row);
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < count; ++i) lead[i] += term<kWholes>(in[i], inverse[i], other[i], weight[i]);
    }
    for (int64_t begin = 0, group = 0; across > 1 && begin < count; begin += across, ++group) {
      float sum = 0;
      for (int64_t i = begin; i < smaller(begin + across, count); ++i) sum += lead[i];
      lead[group] = sum;
    }
  }

  // The squared error of magnitudes under a scale.
  template <bool kWholes, class Count>
  static inline double error(const double* numbers, Count count, int64_t length, double by) {
    constexpr double kMagic = 0x1.8p52, most = kWholes ? 7 : 6;
    const int64_t given = count;
    alignas(64) double squares[kMostTried];
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < given; ++i) {
      const double ratio = by == 0 ? 0 : numbers[i] / by, quotient = ratio > most ? most : ratio;
      const double step = kWholes ? 1 : quotient < 2 ? 0.5 : quotient < 4 ? 1 : 2;
      const double inverse = kWholes ? 1 : quotient < 2 ? 2 : quotient < 4 ? 1 : 0.5;
      const double rest = ((quotient * inverse + kMagic) - kMagic) * step * by - numbers[i];
      squares[i] = rest * rest;
    }
    return sum_by_halves(squares, count, length);
  }
};

}  // namespace LOWP_ISA
}  // namespace lowp
