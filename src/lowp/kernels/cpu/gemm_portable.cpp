// The micro-kernel in plain C++: every machine has it, and the others are tested against it.
#include "gemm.hpp"

namespace {

constexpr int ROWS = 6, COLUMNS = 16;

void multiply(int64_t pairs, const int32_t* a, const int32_t* b, int32_t* sums) {
  int32_t total[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < pairs; k++, a += ROWS, b += COLUMNS) {
    for (int i = 0; i < ROWS; i++) {
      const int32_t even = static_cast<int16_t>(a[i] & 0xffff), odd = a[i] >> 16;
      for (int j = 0; j < COLUMNS; j++) total[i][j] += even * static_cast<int16_t>(b[j] & 0xffff) + odd * (b[j] >> 16);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS; j++) sums[i * COLUMNS + j] = total[i][j];
}

}  // namespace

#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_portable() {
  static constexpr Micro micro = make_micro("portable");
  return &micro;
}

}  // namespace lowp
