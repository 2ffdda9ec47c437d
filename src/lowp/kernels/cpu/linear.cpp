// The C functions of a whole linear layer of int16 mantissas, called by lowp/kernels/int16/linear.py: the time of a product
// of a few thousand operations is that of its calls, not of its arithmetic.
#include <cmath>
#include <exception>
#include <vector>

#include "layers.hpp"

LOWP_EXPORT int lowp_integer_matmul(const char* forced, const int16_t* a, const int16_t* b, void* c,
                                    const int64_t* sizes, const int64_t* strides, int kind, int exponent, int lowest,
                                    const float* bias, int bias_exponent, int threads, int64_t* seen, double* largest);

namespace lowp {
namespace {

// A matrix [count, depth] of mantissas with strides `across` and `along`, of which one is 1.
struct Side {
  const int16_t* data;
  int64_t count, across, along;
};

// c[m, n] = a[m, depth] b[n, depth]^T, in chains, times 2^exponent.
int multiply(const char* forced, const Side& a, const Side& b, int64_t depth, int exponent, const float* bias,
             int threads, float* c) {
  const int64_t sizes[] = {1, a.count, b.count, depth};
  const int64_t strides[] = {0, a.across, a.along, 0, b.across, b.along, a.count * b.count, b.count};
  int64_t seen[3];
  double largest;
  return lowp_integer_matmul(forced, a.data, b.data, c, sizes, strides, 0, exponent, 0, bias, 0, threads, seen,
                             &largest);
}

int linear(const char* forced, const Conversion& to_x, const Conversion& to_weight, const float* x, const float* weight,
           const float* bias, const int64_t* sizes, int16_t* kept, int threads, float* y) {
  const int64_t m = sizes[0], n = sizes[1], k = sizes[2];
  int16_t *a = kept, *b = a + m * k, *exponents = b + n * k;
  int of_x, of_weight;
  if (!convert(to_x, x, m * k, threads, a, &of_x) || !convert(to_weight, weight, n * k, threads, b, &of_weight))
    return kUnfit;
  exponents[0] = static_cast<int16_t>(of_x), exponents[1] = static_cast<int16_t>(of_weight);
  return multiply(forced, {a, m, k, 1}, {b, n, k, 1}, k, of_x + of_weight, bias, threads, y);
}

// The exact product of two matrices of mantissas, and bias, rounded once under the exponent of `to`; `exponent` is the sum
// of those of the operands. counts: those of lowp_write_int16, where a sum that was not zero counts as a number.
int write_product(const char* forced, const Side& a, const Side& b, int64_t depth, int exponent, int lowest,
                  const float* bias, const Written& to, int threads, int64_t* counts) {
  const int64_t sizes[] = {1, a.count, b.count, depth};
  const int64_t strides[] = {0, a.across, a.along, 0, b.across, b.along, a.count * b.count, b.count};
  int64_t seen[3];
  double largest;
  const int status = lowp_integer_matmul(forced, a.data, b.data, to.mantissas, sizes, strides, 1, exponent - to.exponent,
                                         lowest, bias, -to.exponent, threads, seen, &largest);
  if (status) return status;
  lowp_from_int16(to.mantissas, to.exponent, to.values, a.count * b.count, threads);
  tell(seen, counts);
  return 0;
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// y[m, n] = x[m, k] weight[n, k]^T + bias[n], in chains, of operands converted to mantissas under the exponents of their
// maxima. `given`: m, n, k, and offset, lowest and highest of both exponents. `kept`, int16 [m k + n k + 2], receives the
// mantissas of both and their exponents, and may be null. Returns the codes of lowp_integer_matmul; or 4, with y unwritten,
// if an operand is not finite.
LOWP_EXPORT int lowp_linear_int16(const char* forced, const lowp_cast* to_x, const lowp_cast* to_weight, const float* x,
                                  const float* weight, const float* bias, const int64_t* given, int16_t* kept,
                                  int threads, float* y) {
  const Conversion first{to_x, given[3], given[4], given[5]}, second{to_weight, given[6], given[7], given[8]};
  if (kept) return linear(forced, first, second, x, weight, bias, given, kept, threads, y);
  try {
    std::vector<int16_t> memory(static_cast<size_t>((given[0] + given[1]) * given[2] + 2));
    return linear(forced, first, second, x, weight, bias, given, memory.data(), threads, y);
  } catch (const std::exception&) {
    return 2;
  }
}

// The gradients of x[m, k], weight[n, k] and bias[n], each computed unless null, from the gradient of y[m, n], converted to
// mantissas, and from `kept` of lowp_linear_int16. The bias gradient is the exact sum, rounded to fp64 and then to fp32.
LOWP_EXPORT int lowp_linear_int16_gradients(const char* forced, const lowp_cast* to_gradient, const float* gradient,
                                            const int16_t* kept, const int64_t* given, int threads, float* of_x,
                                            float* of_weight, float* of_bias) {
  const int64_t m = given[0], n = given[1], k = given[2];
  const int16_t *a = kept, *b = a + m * k, *exponents = b + n * k;
  try {
    std::vector<int16_t> incoming(static_cast<size_t>(m * n));
    const int16_t* g = incoming.data();
    int exponent;
    if (!convert({to_gradient, given[3], given[4], given[5]}, gradient, m * n, threads, incoming.data(), &exponent))
      return kUnfit;
    if (of_x) {
      const int status =
          multiply(forced, {g, m, n, 1}, {b, k, 1, k}, n, exponent + exponents[1], nullptr, threads, of_x);
      if (status) return status;
    }
    if (of_weight) {
      const int status =
          multiply(forced, {g, n, 1, n}, {a, k, 1, k}, m, exponent + exponents[0], nullptr, threads, of_weight);
      if (status) return status;
    }
    if (!of_bias) return 0;
    std::vector<int64_t> sums(static_cast<size_t>(n));
    lowp_sum_int16(g, m, n, 1, sums.data(), threads);
    for (int64_t i = 0; i < n; ++i)
      of_bias[i] = static_cast<float>(std::ldexp(static_cast<double>(sums[static_cast<size_t>(i)]), exponent));
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}

// y[m, n] = x[m, k] weight[n, k]^T + bias[n], the exact sum rounded once under an exponent. given:
//    0  m, n, k
//    3  x; its mantissas; their exponent; and how they are found: 0 they are written, under the exponent of x's maximum,
//       1 they are kept, and compared with x first, 2 they are known to be those of x
//    7  weight; and the destination of its mantissas, int16 [n k + 2], which ends with the exponents of x and weight
//    9  bias (0: none); the mantissas of y; its values; its exponent; the lowest mantissa
//   14  offset, lowest and highest of the exponents of x, and of weight
// counts: those of lowp_write_int16, of y. Returns the codes of lowp_integer_matmul; or 4 if an operand is not finite or
// not what its mantissas stand for.
LOWP_EXPORT int lowp_linear_written_int16(const char* forced, const lowp_cast* to_x, const lowp_cast* to_weight,
                                          const int64_t* given, int threads, int64_t* counts) {
  const int64_t m = given[0], n = given[1], k = given[2];
  const Operands found = read_operands(to_x, to_weight, given, m * k, n * k, threads);
  if (!found.x) return kUnfit;
  return write_product(forced, {found.x, m, k, 1}, {found.weight, n, k, 1}, k, found.exponent,
                       static_cast<int>(given[13]), at<float>(given[9]), Written(given + 10), threads, counts);
}

// The gradients of x, weight and bias, each an exact sum rounded once under an exponent. given:
//    0  m, n, k, the lowest mantissa
//    4  the gradient of y (0: known to be what its mantissas stand for); its mantissas; their exponent
//    7  the mantissas of x; those of weight with both exponents, of lowp_linear_written_int16
//    9  mantissas (0: not needed), values and exponent of the gradients of x, weight and bias
// `cast` rounds the bias gradient. counts: those of lowp_write_int16, of the three. Returns the same codes.
LOWP_EXPORT int lowp_linear_written_int16_gradients(const char* forced, const lowp_cast* cast, const int64_t* given,
                                                    int threads, int64_t* counts) {
  const int64_t m = given[0], n = given[1], k = given[2];
  const int lowest = static_cast<int>(given[3]), exponent = static_cast<int>(given[6]);
  const int16_t *g = at<int16_t>(given[5]), *a = at<int16_t>(given[7]), *b = at<int16_t>(given[8]);
  const int16_t* const exponents = b + n * k;
  const Written of_x(given + 9), of_weight(given + 12), of_bias(given + 15);
  if (given[4] && lowp_same_int16(at<float>(given[4]), g, 1, m * n, m * n, exponent, 0, 0, threads) != 0) return kUnfit;
  try {
    if (of_x.mantissas) {
      const int status = write_product(forced, {g, m, n, 1}, {b, k, 1, k}, n, exponent + exponents[1], lowest, nullptr,
                                       of_x, threads, counts);
      if (status) return status;
    }
    if (of_weight.mantissas) {
      const int status = write_product(forced, {g, n, 1, n}, {a, k, 1, k}, m, exponent + exponents[0], lowest, nullptr,
                                       of_weight, threads, counts + 4);
      if (status) return status;
    }
    if (!of_bias.mantissas) return 0;
    write_sums(cast, g, m, n, 1, exponent, of_bias, threads, counts + 8);
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}
