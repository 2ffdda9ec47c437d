// multiply_block and approximate (gemm_tile.hpp) in plain C++, for instruction sets without products of bytes.

namespace {

static void multiply_block(int rows, const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b,
                           int32_t* tops, bool begin, float* sums) {
  alignas(64) int32_t last[ROWS * COLUMNS];
  multiply(rows, chains, count, a, b, tops, last);
  for (int t = 0; t < rows * COLUMNS; t++) {
    // |sum| <= 2^38 is exact in fp64, so this rounds once
    const double top = count == 1 ? 0.0 : static_cast<double>(tops[t]);
    const float sum = static_cast<float>(top * (1 << lowp::TOP_SHIFT) + static_cast<double>(last[t]));
    sums[t] = begin ? sum : sums[t] + sum;
  }
}

static __attribute__((noinline)) void approximate(int64_t groups, const int32_t* a, const int32_t* b, int32_t* sums) {
  int32_t total[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < groups; k++, a += ROWS, b += COLUMNS) {
    for (int i = 0; i < ROWS; i++) {
      for (int j = 0; j < COLUMNS; j++) {
        const int32_t first = (a[i] & 127) * static_cast<int8_t>(b[j] & 255);
        const int32_t second = (a[i] >> 8 & 127) * static_cast<int8_t>(b[j] >> 8 & 255);
        const int32_t third = (a[i] >> 16 & 127) * static_cast<int8_t>(b[j] >> 16 & 255);
        total[i][j] += first + second + third + (a[i] >> 24) * (b[j] >> 24);
      }
    }
  }
  for (int t = 0; t < ROWS * COLUMNS; t++) sums[t] = total[t / COLUMNS][t % COLUMNS];
}

}  // namespace
