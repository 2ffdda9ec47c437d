// The micro-kernel in plain C++, for every machine; the others are tested against it.
#include "gemm.hpp"

namespace {

constexpr int ROWS = 6, COLUMNS = 16;

// Unsigned, since sums may exceed 2^31 and are taken modulo 2^32; conversions to int32_t and back wrap around.
void multiply(int, const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b, int32_t* tops,
              int32_t* sums) {
  uint32_t total[ROWS][COLUMNS] = {};
  for (int64_t chain = 0; chain < count; chain++) {
    for (int t = 0; chain > 0 && t < ROWS * COLUMNS; t++) {
      uint32_t& sum = total[t / COLUMNS][t % COLUMNS];
      tops[t] = (chain == 1 ? 0 : tops[t]) + (static_cast<int32_t>(sum) >> lowp::TOP_SHIFT);
      sum &= (uint32_t{1} << lowp::TOP_SHIFT) - 1;
    }
    for (int64_t k = 0; k < chains[chain]; k++, a += ROWS, b += COLUMNS) {
      for (int i = 0; i < ROWS; i++) {
        const int32_t even = static_cast<int16_t>(a[i] & 0xffff), odd = a[i] >> 16;
        for (int j = 0; j < COLUMNS; j++) {
          const int32_t first = even * static_cast<int16_t>(b[j] & 0xffff), second = odd * (b[j] >> 16);
          total[i][j] += static_cast<uint32_t>(first) + static_cast<uint32_t>(second);
        }
      }
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < COLUMNS; j++) sums[i * COLUMNS + j] = static_cast<int32_t>(total[i][j]);
}

}  // namespace

#include "gemm_plain.hpp"
#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_portable() {
  static constexpr Micro micro = make_micro("portable");
  return &micro;
}

}  // namespace lowp
