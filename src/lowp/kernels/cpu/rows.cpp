// The C functions of few rows times a matrix in 16 bits or less: choice of the instruction set, distribution over threads.
#include "rows.hpp"

#include "export.hpp"
#include "levels.hpp"
#include "parallel.hpp"

namespace lowp {
namespace {

const RowKernels& kernels(int level) {
#if defined(__x86_64__)
  const Level used = usable_level(level);
  if (used != kPortable) return used == kAvx2 ? kAvx2Rows : kAvx512Rows;
#endif
  (void)level;
  return kPortableRows;
}

// numbers: kind, n, k, group, kind of the scales, scales of a row, rows with the same, shift, the last code; see RowMatrix.
RowMatrix matrix(const void* memory, const int64_t* numbers, const void* scales, double factor) {
  const int64_t* const at = numbers;
  return {static_cast<const uint8_t*>(memory), at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], scales, factor};
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// out[m][n] = x[m][stride] times the rows of weights[n][k], plus bias in fp64, rounded to fp32; see rows.hpp. A NaN is
// the positive quiet one, whichever the processor makes.
LOWP_EXPORT void lowp_rows_multiply(int level, const void* x, int64_t m, int64_t stride, const void* memory,
                                    const int64_t* numbers, const void* scales, double factor, const float* bias, float* out,
                                    int threads) {
  const RowKernels& run = kernels(level);
  const RowMatrix w = matrix(memory, numbers, scales, factor);
  const int64_t size = stride * (w.kind <= kRowBf16 ? 8 : 4);
  parallel_for(w.n, 16, threads, [&](int64_t begin, int64_t end) {
    double sums[kColumns * kMostRows];
    for (int64_t j = begin; j < end; j += kColumns) {
      const int64_t columns = end - j < kColumns ? end - j : kColumns;
      for (int64_t first = 0; first < m; first += kMostRows) {
        const int64_t rows = m - first < kMostRows ? m - first : kMostRows;
        run.multiply(w, j, columns, static_cast<const char*>(x) + first * size, stride, rows, sums);
        for (int64_t c = 0; c < columns; c++)
          for (int64_t i = 0; i < rows; i++) {
            const double sum = sums[c * rows + i] + (bias ? static_cast<double>(bias[j + c]) : -0.0);
            out[(first + i) * w.n + j + c] = sum == sum ? static_cast<float>(sum) : __builtin_nanf("");
          }
      }
    }
  });
}

// out[count][k]: the weights of some rows in fp32, rounded once.
LOWP_EXPORT void lowp_rows_values(int level, const void* memory, const int64_t* numbers, const void* scales, double factor,
                                  int64_t first, int64_t count, float* out, int threads) {
  const RowKernels& run = kernels(level);
  const RowMatrix w = matrix(memory, numbers, scales, factor);
  parallel_for(count, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) run.values(w, first + j, out + j * w.k);
  });
}
