// The C function of few rows times a matrix in 16 bits: choice of the instruction set, distribution over threads.
#include "rows.hpp"

#include "export.hpp"
#include "levels.hpp"
#include "parallel.hpp"

namespace lowp {
namespace {

Rows kernel(int level) {
#if defined(__x86_64__)
  const Level used = usable_level(level);
  if (used != kPortable) return used == kAvx2 ? kAvx2Rows : kAvx512Rows;
#endif
  (void)level;
  return kPortableRows;
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// out[m][n] = x[m][stride] times the rows of weights[n][k], plus bias, rounded once to fp32; see rows.hpp. A NaN is
// the positive quiet one, whichever the processor makes. `is_fp16`: weights are fp16, otherwise bf16.
LOWP_EXPORT void lowp_rows_multiply(int level, const double* x, int64_t m, int64_t stride, const uint16_t* weights,
                                    int is_fp16, int64_t n, int64_t k, const float* bias, float* out, int threads) {
  const Rows run = kernel(level);
  parallel_for(n, 16, threads, [=](int64_t begin, int64_t end) {
    double sums[kColumns * kMostRows * kRowSums];
    for (int64_t j = begin; j < end; j += kColumns) {
      const int64_t columns = end - j < kColumns ? end - j : kColumns;
      for (int64_t first = 0; first < m; first += kMostRows) {
        const int64_t rows = m - first < kMostRows ? m - first : kMostRows;
        run(weights + j * k, is_fp16 != 0, columns, k, x + first * stride, stride, rows, sums);
        for (int64_t c = 0; c < columns; c++)
          for (int64_t i = 0; i < rows; i++) {
            const double sum = sums[c * rows + i] + (bias ? static_cast<double>(bias[j + c]) : -0.0);
            out[(first + i) * n + j + c] = sum == sum ? static_cast<float>(sum) : __builtin_nanf("");
          }
      }
    }
  });
}
