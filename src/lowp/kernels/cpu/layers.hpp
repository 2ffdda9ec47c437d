// Common parts of the C functions of whole layers of int16 mantissas (linear.cpp, convolution_layer.cpp). Only for sources
// compiled for the platform's baseline.
#pragma once
#include <cmath>
#include <vector>

#include "calls.hpp"

LOWP_EXPORT int lowp_current_int16(const lowp_cast* cast, const float* x, int offset, int lowest, int highest, void* out,
                                   float* values, int64_t count, uint64_t seed, int threads, int64_t* counts);
LOWP_EXPORT void lowp_write_int16(const lowp_cast* cast, int type, const void* x, int exponent, void* out,
                                  float* values, int64_t count, uint64_t seed, int threads, int64_t* counts);
LOWP_EXPORT void lowp_from_int16(const int16_t* mantissas, int exponent, float* out, int64_t count, int threads);
LOWP_EXPORT int64_t lowp_same_int16(const float* x, const int16_t* mantissas, int64_t rows, int64_t columns,
                                    int64_t stride, int exponent, int rounded, int lowest, int threads);
LOWP_EXPORT void lowp_sum_int16(const int16_t* mantissas, int64_t outer, int64_t channels, int64_t inner, int64_t* out,
                                int threads);

namespace lowp {

constexpr int kUnfit = 4;  // an operand has an infinity or a NaN, or is not what its mantissas stand for

// The conversion of a tensor: its cast, and the arguments of lowp_current_int16 for the exponent.
struct Conversion {
  const lowp_cast* cast;
  int64_t offset, lowest, highest;
};

// Writes x as mantissas under its own exponent; false if it is not finite.
inline bool convert(const Conversion& to, const float* x, int64_t count, int threads, int16_t* out, int* exponent) {
  int64_t counts[4];
  *exponent = lowp_current_int16(to.cast, x, static_cast<int>(to.offset), static_cast<int>(to.lowest),
                                 static_cast<int>(to.highest), out, nullptr, count, 0, threads, counts);
  return *exponent != 1 << 20;
}

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline Conversion conversion(const lowp_cast* cast, const int64_t* bounds) {
  return {cast, bounds[0], bounds[1], bounds[2]};
}

// The destination of a result that is written under an exponent: its mantissas (0: not needed), its values, the exponent.
struct Written {
  int16_t* mantissas;
  float* values;
  int exponent;

  explicit Written(const int64_t* given)
      : mantissas(at<int16_t>(given[0])), values(at<float>(given[1])), exponent(static_cast<int>(given[2])) {}
};

// counts: those of lowp_write_int16 from what was seen of a product, where a sum that was not zero counts as a number.
inline void tell(const int64_t* seen, int64_t* counts) {
  counts[0] = seen[1], counts[1] = seen[0], counts[2] = 0, counts[3] = seen[2] > 0;
}

// The mantissas of x and weight, and the sum of their exponents; x is null if one is not finite, or not what its mantissas
// stand for.
struct Operands {
  const int16_t *x, *weight;
  int exponent;
};

// given: from 3 on that of lowp_linear_written_int16. Both exponents are written after the mantissas of the weight.
inline Operands read_operands(const lowp_cast* to_x, const lowp_cast* to_weight, const int64_t* given, int64_t of_x,
                              int64_t of_weight, int threads) {
  const float *x = at<float>(given[3]), *weight = at<float>(given[7]);
  int16_t *a = at<int16_t>(given[4]), *b = at<int16_t>(given[8]);
  int first = static_cast<int>(given[5]), second;
  if (given[6] == 0 && !convert(conversion(to_x, given + 14), x, of_x, threads, a, &first)) return {};
  if (given[6] == 1 && lowp_same_int16(x, a, 1, of_x, of_x, first, 0, 0, threads) != 0) return {};
  if (!convert(conversion(to_weight, given + 17), weight, of_weight, threads, b, &second)) return {};
  b[of_weight] = static_cast<int16_t>(first), b[of_weight + 1] = static_cast<int16_t>(second);
  return {a, b, first + second};
}

// Writes the gradient of the bias: the sums of mantissas [outer, channels, inner] over all but the channels.
inline void write_sums(const lowp_cast* cast, const int16_t* mantissas, int64_t outer, int64_t channels, int64_t inner,
                       int exponent, const Written& to, int threads, int64_t* counts) {
  std::vector<int64_t> sums(static_cast<size_t>(channels));
  std::vector<double> numbers(static_cast<size_t>(channels));
  lowp_sum_int16(mantissas, outer, channels, inner, sums.data(), threads);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::ldexp(static_cast<double>(sums[i]), exponent);
  lowp_write_int16(cast, kFp64, numbers.data(), to.exponent, to.mantissas, to.values, channels, 0, threads, counts);
}

}  // namespace lowp
