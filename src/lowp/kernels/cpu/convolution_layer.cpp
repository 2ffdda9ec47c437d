// The C functions of a whole convolution of int16 mantissas whose results are written under given exponents, called by
// lowp/kernels/int16/written.py.
#include <exception>

#include "layers.hpp"

// convolution.cpp
LOWP_EXPORT int lowp_written_convolution(const char* forced, int product, const int16_t* a, const int16_t* b,
                                         int16_t* c, float* values, int64_t count, const int64_t* geometry,
                                         const int64_t* given, const float* bias, int threads, int64_t* seen);

namespace lowp {
namespace {

enum Product { kForward, kInputGradient, kWeightGradient };  // as lowp_written_convolution counts them

// One of the products of a convolution, exact, with a bias, rounded once under the exponent of `to` into `count` elements;
// `exponent` is the sum of those of the operands.
int write_convolution(const char* forced, Product product, const int16_t* a, const int16_t* b, const int64_t* geometry,
                      int exponent, int lowest, const float* bias, const Written& to, int64_t count, int threads,
                      int64_t* counts) {
  const int64_t numbers[] = {exponent - to.exponent, lowest, -to.exponent, to.exponent};
  int64_t seen[3];
  const int status = lowp_written_convolution(forced, product, a, b, to.mantissas, to.values, count, geometry, numbers,
                                              bias, threads, seen);
  if (status == 0) tell(seen, counts);
  return status;
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// The convolution of x by weight, and bias, the exact sum rounded once under an exponent. `given` is that of
// lowp_linear_written_int16, with the numbers of elements of x, weight and y in place of m, n, k; `geometry` that of
// lowp_written_convolution; counts and codes are those of lowp_linear_written_int16.
LOWP_EXPORT int lowp_convolution_written_int16(const char* forced, const lowp_cast* to_x, const lowp_cast* to_weight,
                                               const int64_t* given, const int64_t* geometry, int threads,
                                               int64_t* counts) {
  const Operands found = read_operands(to_x, to_weight, given, given[0], given[1], threads);
  if (!found.x) return kUnfit;
  return write_convolution(forced, kForward, found.x, found.weight, geometry, found.exponent,
                           static_cast<int>(given[13]), at<float>(given[9]), Written(given + 10), given[2], threads,
                           counts);
}

// The gradients of x, weight and bias, each an exact sum rounded once under an exponent. `given` is that of
// lowp_linear_written_int16_gradients, with the numbers of elements of x, weight and y in place of m, n, k, as above.
LOWP_EXPORT int lowp_convolution_written_int16_gradients(const char* forced, const lowp_cast* cast,
                                                         const int64_t* given, const int64_t* geometry, int threads,
                                                         int64_t* counts) {
  const int64_t of_x = given[0], of_weight = given[1], of_y = given[2];
  const int lowest = static_cast<int>(given[3]), exponent = static_cast<int>(given[6]);
  const int16_t *g = at<int16_t>(given[5]), *a = at<int16_t>(given[7]), *b = at<int16_t>(given[8]);
  const int16_t* const exponents = b + of_weight;
  const Written to_x(given + 9), to_weight(given + 12), to_bias(given + 15);
  if (given[4] && lowp_same_int16(at<float>(given[4]), g, 1, of_y, of_y, exponent, 0, 0, threads) != 0) return kUnfit;
  try {
    if (to_x.mantissas) {
      const int status = write_convolution(forced, kInputGradient, g, b, geometry, exponent + exponents[1], lowest,
                                           nullptr, to_x, of_x, threads, counts);
      if (status) return status;
    }
    if (to_weight.mantissas) {
      const int status = write_convolution(forced, kWeightGradient, a, g, geometry, exponent + exponents[0], lowest,
                                           nullptr, to_weight, of_weight, threads, counts + 4);
      if (status) return status;
    }
    if (!to_bias.mantissas) return 0;
    const int64_t batch = geometry[0], channels = geometry[2];
    write_sums(cast, g, batch, channels, of_y / (batch * channels), exponent, to_bias, threads, counts + 8);
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}
