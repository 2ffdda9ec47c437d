// The C functions of a whole linear layer of int16 mantissas, called by lowp/kernels/int16_linear.py: the time of a product
// of a few thousand operations is that of its calls, not of its arithmetic.
#include <cmath>
#include <exception>
#include <vector>

#include "calls.hpp"

LOWP_EXPORT int lowp_current_int16(const lowp_cast* cast, const float* x, int offset, int lowest, int highest, void* out,
                                   float* values, int64_t count, uint64_t seed, int threads, int64_t* counts);
LOWP_EXPORT void lowp_sum_int16(const int16_t* mantissas, int64_t outer, int64_t channels, int64_t inner, int64_t* out,
                                int threads);
LOWP_EXPORT int lowp_integer_matmul(const char* forced, const int16_t* a, const int16_t* b, void* c,
                                    const int64_t* sizes, const int64_t* strides, int kind, int exponent, int lowest,
                                    const float* bias, int bias_exponent, int threads, int64_t* seen, double* largest);

namespace lowp {
namespace {

constexpr int kUnfit = 4;  // an operand has an infinity or a NaN, which no integer represents

// The conversion of a tensor: its cast, and the arguments of lowp_current_int16 for the exponent.
struct Conversion {
  const lowp_cast* cast;
  int64_t offset, lowest, highest;
};

// Writes x as mantissas under its own exponent; false if it is not finite.
bool convert(const Conversion& to, const float* x, int64_t count, int threads, int16_t* out, int* exponent) {
  int64_t counts[4];
  *exponent = lowp_current_int16(to.cast, x, static_cast<int>(to.offset), static_cast<int>(to.lowest),
                                 static_cast<int>(to.highest), out, nullptr, count, 0, threads, counts);
  return *exponent != 1 << 20;
}

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
