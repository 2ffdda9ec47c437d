// The C functions of a whole contraction of int16 mantissas, called by lowp/kernels/int16/layer.py: forward, and its gradients. Results are chains in fp32 (DFP-16), or exact sums, each rounded once under the exponent of its entry
// in a table. A layer of a few thousand operations takes the time of its calls, not of its arithmetic.
#include <cmath>
#include <exception>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "exponents.hpp"

LOWP_EXPORT int lowp_integer_matmul(const char* forced, const int16_t* a, const int16_t* b, void* c,
                                    const int64_t* sizes, const int64_t* strides, int kind, int exponent, int lowest,
                                    const float* bias, int bias_exponent, int threads, int64_t* seen, double* largest);
LOWP_EXPORT int lowp_integer_convolution(const char* forced, int product, const int16_t* a, const int16_t* b, void* c,
                                         const int64_t* geometry, int kind, int exponent, int lowest,
                                         const float* bias, int bias_exponent, int threads, int64_t* seen,
                                         double* largest);

// What is the same for all calls of a layer; built by lowp/kernels/cpu/abi.py. A conversion is a cast with offset, lowest and
// highest of the exponents that it gives a tensor by its maximum.
struct lowp_conversion {
  const lowp_cast* cast;
  int64_t offset, lowest, highest;
};

// A product of matrices as lowp_integer_matmul takes it. `turned`: of the operands in the order of a convolution's the
// second is the left one.
struct lowp_matrices {
  int64_t sizes[5], strides[11], turned;
};

struct lowp_layer {
  lowp_conversion x, weight, gradient;
  const lowp_cast* output;            // null: results are chains
  const int64_t* geometry;            // of lowp_integer_convolution; null: products of matrices
  const lowp_matrices* products;      // of matrices: the result, and the gradients of x and of weight
  int64_t of_x, of_weight, of_y;      // elements
};

namespace lowp {
namespace {

enum Code { kDone = 0, kUnfit = 4 };  // and those of lowp_integer_matmul
enum Found : int64_t { kToConvert = 0, kToCompare = 1, kKnown = 2 };
enum Product { kForward, kOfX, kOfWeight };  // as lowp_integer_convolution counts them

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Writes x as mantissas under its own exponent; false if it is not finite.
bool convert(const lowp_conversion& to, const float* x, int64_t count, int threads, int16_t* out, int32_t* exponent) {
  return lowp_current_int16(to.cast, x, static_cast<int>(to.offset), static_cast<int>(to.lowest),
                            static_cast<int>(to.highest), out, count, 0, threads, exponent);
}

bool is_same(const float* x, const int16_t* mantissas, int64_t count, int32_t exponent, int threads) {
  return lowp_same_int16(x, mantissas, 1, count, count, &exponent, 0, 0, threads) == 0;
}

// Finds the mantissas of a tensor, as `given` says: the tensor, its mantissas, their exponent, and how. Tells their exponent;
// false if it is not finite, or not what these mantissas stand for.
bool found(const lowp_conversion& to, const int64_t* given, int64_t count, int threads, int16_t* mantissas,
           int32_t* exponent) {
  const float* x = at<float>(given[0]);
  if (given[2]) *exponent = *at<int32_t>(given[2]);
  if (given[3] == kToConvert) return convert(to, x, count, threads, mantissas, exponent);
  return given[3] == kKnown || is_same(x, mantissas, count, *exponent, threads);
}

// Where a result goes: its entry, its mantissas (of chains none), and its values (0: it is not needed).
struct Target {
  int64_t entry;
  int16_t* mantissas;
  float* values;

  explicit Target(const int64_t* given) : entry(given[0]), mantissas(at<int16_t>(given[1])), values(at<float>(given[2])) {}
};

class Layer {
 public:
  Layer(const char* forced, const lowp_layer& plan, const lowp_table* table, int threads)
      : forced_(forced), plan_(plan), table_(table), threads_(threads) {}

  bool has_begun(const Target& to) const { return !to.values || !plan_.output || table_->started[to.entry]; }

  // One of the products of two operands, and a bias; `exponent` is the sum of those of the operands.
  int multiply(Product product, const int16_t* a, const int16_t* b, int exponent, const float* bias, const Target& to,
               int64_t count, int32_t* told) const {
    int64_t seen[3];
    double largest;
    if (!plan_.output) return run(product, a, b, to.values, 0, exponent, 0, bias, 0, seen, &largest);
    const int32_t own = table_->exponent[to.entry];
    const int lowest = static_cast<int>(plan_.output->minimum);
    const int status = run(product, a, b, to.mantissas, 1, exponent - own, lowest, bias, -own, seen, &largest);
    if (status) return status;
    lowp_from_int16(to.mantissas, &own, to.values, count, threads_);
    // a sum that was not zero counts as a number
    const int64_t counts[] = {seen[1], seen[0], 0, seen[2] > 0};
    note(*table_, to.entry, counts, 0, count, false, 0);
    *told = own;
    return kDone;
  }

  // The gradient of the bias: the exact sums of the mantissas of a gradient, rounded to fp64, and then once.
  void sum(const int16_t* gradient, int exponent, const Target& to, int32_t* told) const {
    const int64_t* shape = plan_.geometry;
    const int64_t channels = shape ? shape[2] : plan_.products->sizes[3], outer = shape ? shape[0] : plan_.of_y / channels;
    std::vector<int64_t> sums(static_cast<size_t>(channels));
    std::vector<double> numbers(sums.size());
    lowp_sum_int16(gradient, outer, channels, plan_.of_y / (outer * channels), sums.data(), threads_);
    for (size_t i = 0; i < sums.size(); ++i) numbers[i] = std::ldexp(static_cast<double>(sums[i]), exponent);
    if (!plan_.output) {
      for (size_t i = 0; i < sums.size(); ++i) to.values[i] = static_cast<float>(numbers[i]);
      return;
    }
    const int32_t own = table_->exponent[to.entry];
    int64_t counts[4];
    lowp_write_int16(plan_.output, kFp64, numbers.data(), &own, to.mantissas, to.values, channels, 0, threads_, counts);
    note(*table_, to.entry, counts, 0, channels, false, 0);
    *told = own;
  }

 private:
  int run(Product product, const int16_t* a, const int16_t* b, void* c, int kind, int exponent, int lowest,
          const float* bias, int bias_exponent, int64_t* seen, double* largest) const {
    if (plan_.geometry)
      return lowp_integer_convolution(forced_, product, a, b, c, plan_.geometry, kind, exponent, lowest, bias,
                                      bias_exponent, threads_, seen, largest);
    const lowp_matrices& form = plan_.products[product];
    if (form.turned) std::swap(a, b);
    return lowp_integer_matmul(forced_, a, b, c, form.sizes, form.strides, kind, exponent, lowest, bias, bias_exponent,
                               threads_, seen, largest);
  }

  const char* forced_;
  const lowp_layer& plan_;
  const lowp_table* table_;
  int threads_;
};

}  // namespace
}  // namespace lowp

using namespace lowp;

// y = x by weight, and bias. given:
//    0  entry, mantissas and values of y
//    3  x; its mantissas; their exponent; and how they are found: 0 they are written, under the exponent of x's maximum,
//       1 they are kept, and compared with x first, 2 they are known to be those of x
//    7  the same of weight
//   11  bias (0: none)
// Tensors lie dense, and mantissas as they. exponents: those of x, weight and y are told there. Returns the codes of
// lowp_integer_matmul; or 4, with nothing noted, if an operand is not finite or not what its mantissas stand for, or if
// the entry has not begun.
LOWP_EXPORT int lowp_layer_forward(const char* forced, const lowp_layer* plan, const lowp_table* table,
                                   const int64_t* given, int threads, int32_t* exponents) {
  const Layer layer(forced, *plan, table, threads);
  const Target y(given);
  if (!layer.has_begun(y)) return kUnfit;
  int16_t *a = at<int16_t>(given[4]), *b = at<int16_t>(given[8]);
  try {
    std::vector<int16_t> memory(static_cast<size_t>((a ? 0 : plan->of_x) + (b ? 0 : plan->of_weight)));
    if (!b) b = memory.data() + (a ? 0 : plan->of_x);
    if (!a) a = memory.data();
    if (!found(plan->x, given + 3, plan->of_x, threads, a, exponents)) return kUnfit;
    if (!found(plan->weight, given + 7, plan->of_weight, threads, b, exponents + 1)) return kUnfit;
    const int exponent = exponents[0] + exponents[1];
    return layer.multiply(kForward, a, b, exponent, at<float>(given[11]), y, plan->of_y, exponents + 2);
  } catch (const std::exception&) {
    return 2;
  }
}

// The gradients of x, weight and bias. given:
//    0  the gradient of y; its mantissas (0: none); their exponent; how they are found, as above
//    4  the mantissas of x and of weight, and their exponents, int32, of lowp_layer_forward
//    7  entry, mantissas and values of the gradients of x, weight and bias
// told: the exponents of the three, of results that are written. Returns the same codes.
LOWP_EXPORT int lowp_layer_backward(const char* forced, const lowp_layer* plan, const lowp_table* table,
                                    const int64_t* given, int threads, int32_t* told) {
  const Layer layer(forced, *plan, table, threads);
  const Target of_x(given + 7), of_weight(given + 10), of_bias(given + 13);
  const int16_t *a = at<int16_t>(given[4]), *b = at<int16_t>(given[5]);
  const int32_t* exponents = at<int32_t>(given[6]);
  int16_t* g = at<int16_t>(given[1]);
  int32_t own = 0;
  if (!(layer.has_begun(of_x) && layer.has_begun(of_weight) && layer.has_begun(of_bias))) return kUnfit;
  try {
    std::vector<int16_t> memory(static_cast<size_t>(g ? 0 : plan->of_y));
    if (!g) g = memory.data();
    if (!found(plan->gradient, given, plan->of_y, threads, g, &own)) return kUnfit;
    int status = kDone;
    if (of_x.values)
      status = layer.multiply(kOfX, g, b, own + exponents[1], nullptr, of_x, plan->of_x, told);
    if (!status && of_weight.values)
      status = layer.multiply(kOfWeight, a, g, own + exponents[0], nullptr, of_weight, plan->of_weight, told + 1);
    if (!status && of_bias.values) layer.sum(g, own, of_bias, told + 2);
    return status;
  } catch (const std::exception&) {
    return 2;
  }
}
