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

// Matrices of weights, one behind the other.
struct Matrices {
  RowMatrix first;
  int64_t count, apart, scales_apart;  // bytes between them, and scales

  RowMatrix operator[](int64_t i) const {
    RowMatrix found = first;
    found.memory += i * apart;
    if (found.scales != nullptr)
      found.scales = static_cast<const char*>(found.scales) + i * scales_apart * (found.scale_kind == kFp32Scales ? 4 : 1);
    return found;
  }
};

// numbers: kind, n, k, bytes of a line, group, kind of the scales, scales of a row, rows with the same, shift, the last code
// (see RowMatrix); how many matrices, bytes from one to the next, scales from one to the next.
Matrices matrices(const void* memory, const int64_t* numbers, const void* scales, double factor) {
  const int64_t* const at = numbers;
  const RowMatrix first{static_cast<const uint8_t*>(memory), at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8],
                        at[9], scales, factor};
  return {first, at[10], at[11], at[12]};
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// out[count][m][n] = x[count][m][stride] times the rows of weights[count][n][k], plus bias in fp64, rounded to fp32; see
// rows.hpp. A NaN is the positive quiet one, whichever the processor makes.
LOWP_EXPORT void lowp_rows_multiply(int level, const void* x, int64_t m, int64_t stride, const void* memory,
                                    const int64_t* numbers, const void* scales, double factor, const float* bias, float* out,
                                    int threads) {
  const RowKernels& run = kernels(level);
  const Matrices all = matrices(memory, numbers, scales, factor);
  const int64_t n = all.first.n, size = stride * (all.first.kind <= kRowBf16 ? 8 : 4);
  const int64_t most = m == 1 ? kColumns * kMostRows : kColumns, blocks = (n + most - 1) / most;
  parallel_for(all.count * blocks, m == 1 ? 1 : 4, threads, [&](int64_t begin, int64_t end) {
    double sums[kColumns * kMostRows];
    for (int64_t block = begin; block < end; block++) {
      const int64_t at = block / blocks, j = block % blocks * most, columns = n - j < most ? n - j : most;
      const RowMatrix w = all[at];
      const char* const rows_of = static_cast<const char*>(x) + at * m * size;
      for (int64_t first = 0; first < m; first += kMostRows) {
        const int64_t rows = m - first < kMostRows ? m - first : kMostRows;
        run.multiply(w, j, columns, rows_of + first * size, stride, rows, sums);
        for (int64_t c = 0; c < columns; c++)
          for (int64_t i = 0; i < rows; i++) {
            const double sum = sums[c * rows + i] + (bias ? static_cast<double>(bias[j + c]) : -0.0);
            out[(at * m + first + i) * n + j + c] = sum == sum ? static_cast<float>(sum) : __builtin_nanf("");
          }
      }
    }
  });
}

// out[count][k]: the weights of some rows in fp32, rounded once.
LOWP_EXPORT void lowp_rows_values(int level, const void* memory, const int64_t* numbers, const void* scales, double factor,
                                  int64_t first, int64_t count, float* out, int threads) {
  const RowKernels& run = kernels(level);
  const RowMatrix w = matrices(memory, numbers, scales, factor).first;
  parallel_for(count, 16, threads, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) run.values(w, first + j, out + j * w.k);
  });
}
