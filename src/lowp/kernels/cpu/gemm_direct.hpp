// Sums of products of integers in fp64, exact below 2^53, for convolutions whose groups are too small to pack; included
// by gemm_tile.hpp. Vectors are written out: a compiler neither reorders these additions nor keeps arrays of sums in
// registers.

namespace {

typedef double Doubles __attribute__((vector_size(32)));

// sum += weight * four numbers, sum += four products; by reference, as not every ABI here passes such vectors
static inline void add_product(Doubles& sum, double weight, const double* from) {
  Doubles value;
  std::memcpy(&value, from, sizeof value);
  sum += weight * value;
}
static inline void add_product(Doubles& sum, const double* a, const double* b) {
  Doubles left, right;
  std::memcpy(&left, a, sizeof left);
  std::memcpy(&right, b, sizeof right);
  sum += left * right;
}

// out[0 .. 4 * VECTORS) of correlate
template <int VECTORS>
static inline void correlate_lanes(const double* const* rows, const double* weights, int64_t count, int64_t from,
                                   double* out) {
  Doubles sums[VECTORS];
  for (int v = 0; v < VECTORS; v++) sums[v] = Doubles{};
  for (int64_t i = 0; i < count; i++) {
    const double* row = rows[i] + from;
    const double weight = weights[i];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) add_product(sums[v], weight, row + 4 * v);
  }
  std::memcpy(out + from, sums, sizeof sums);
}

// out[j] = sum over i < count of weights[i] * rows[i][j * stride], j < length
static void correlate(const double* const* rows, const double* weights, int64_t count, int64_t stride, int64_t length,
                      double* out) {
  int64_t j = 0;
  if (stride == 1) {
    for (; j + 16 <= length; j += 16) correlate_lanes<4>(rows, weights, count, j, out);
    for (; j + 4 <= length; j += 4) correlate_lanes<1>(rows, weights, count, j, out);
  }
  for (; j < length; j++) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += weights[i] * rows[i][j * stride];
    out[j] = sum;
  }
}

static double dot(const double* a, const double* b, int64_t count) {
  Doubles first{}, second{}, third{}, fourth{};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    add_product(first, a + i, b + i);
    add_product(second, a + i + 4, b + i + 4);
    add_product(third, a + i + 8, b + i + 8);
    add_product(fourth, a + i + 12, b + i + 12);
  }
  const Doubles lanes = first + second + third + fourth;
  double total = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  for (; i < count; i++) total += a[i] * b[i];
  return total;
}

}  // namespace
