// The C functions of few rows times a matrix in 16 bits or less: choice of the instruction set, distribution over threads.
#include "rows.hpp"

#include <cstdlib>

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

// The rows of x[count * m][depth] as `multiply` of RowKernels reads them, in memory of zeros.
template <class Number>
void widen_rows(const float* x, int64_t count, int64_t m, int64_t k, const int64_t* strides, int64_t depth, Number* out) {
  for (int64_t i = 0; i < count * m; i++, out += depth) {
    const float* const from = x + i / m * strides[0] + i % m * strides[1];
    for (int64_t t = 0; t < k; t++) out[t] = from[t];
  }
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// out[count][m][n] = x[count][m][k] times the rows of weights[count][n][k], plus bias in fp64, rounded to fp32; see
// rows.hpp. strides: numbers from a matrix of x to the next, and from a row to the next. A NaN is the positive quiet one,
// whichever the processor makes. Returns 0 if there is no memory.
LOWP_EXPORT int lowp_rows_multiply(int level, const float* x, int64_t m, const int64_t* strides, const void* memory,
                                   const int64_t* numbers, const void* scales, double factor, const float* bias, float* out,
                                   int threads) {
  const RowKernels& run = kernels(level);
  const Matrices all = matrices(memory, numbers, scales, factor);
  const int64_t n = all.first.n, k = all.first.k, depth = (k + kRowSums - 1) / kRowSums * kRowSums;
  const int64_t number = all.first.kind <= kRowBf16 ? 8 : 4;  // bytes of one
  const bool is_read = number == 4 && k == depth;
  const int64_t line = is_read ? strides[1] : depth, apart = (is_read ? strides[0] : m * depth) * number;
  void* const room = is_read ? nullptr : std::calloc(static_cast<size_t>(all.count * m * depth * number) + 1, 1);
  if (!is_read && room == nullptr) return 0;
  if (!is_read && number == 8)
    widen_rows(x, all.count, m, k, strides, depth, static_cast<double*>(room));
  else if (!is_read)
    widen_rows(x, all.count, m, k, strides, depth, static_cast<float*>(room));
  const char* const rows_from = is_read ? reinterpret_cast<const char*>(x) : static_cast<const char*>(room);
  const int64_t most = m == 1 ? kColumns * kMostRows : kColumns, blocks = (n + most - 1) / most;
  parallel_for(all.count * blocks, m == 1 ? 1 : 4, threads, [&](int64_t begin, int64_t end) {
    double sums[kColumns * kMostRows];
    for (int64_t block = begin; block < end; block++) {
      const int64_t at = block / blocks, j = block % blocks * most, columns = n - j < most ? n - j : most;
      const RowMatrix w = all[at];
      const char* const rows_of = rows_from + at * apart;
      for (int64_t first = 0; first < m; first += kMostRows) {
        const int64_t rows = m - first < kMostRows ? m - first : kMostRows;
        run.multiply(w, j, columns, rows_of + first * line * number, line, rows, sums);
        for (int64_t c = 0; c < columns; c++)
          for (int64_t i = 0; i < rows; i++) {
            const double sum = sums[c * rows + i] + (bias ? static_cast<double>(bias[j + c]) : -0.0);
            out[(at * m + first + i) * n + j + c] = sum == sum ? static_cast<float>(sum) : __builtin_nanf("");
          }
      }
    }
  });
  std::free(room);
  return 1;
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
