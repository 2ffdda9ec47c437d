// The micro-kernel for AArch64: smlal computes 4 products per instruction; every AArch64 processor has it.
#include <arm_neon.h>

#include "gemm.hpp"

namespace {

constexpr int ROWS = 6, COLUMNS = 16;

// sums of row I += a pair of A (lanes 2I and 2I + 1 of a) times the 16 columns of B, even and odd elements separately
template <int LANE>
inline void add_row(int32x4_t c[4], int16x8_t a, const int16x8x2_t& left, const int16x8x2_t& right) {
  c[0] = vmlal_laneq_s16(c[0], vget_low_s16(left.val[0]), a, LANE);
  c[1] = vmlal_high_laneq_s16(c[1], left.val[0], a, LANE);
  c[2] = vmlal_laneq_s16(c[2], vget_low_s16(right.val[0]), a, LANE);
  c[3] = vmlal_high_laneq_s16(c[3], right.val[0], a, LANE);
  c[0] = vmlal_laneq_s16(c[0], vget_low_s16(left.val[1]), a, LANE + 1);
  c[1] = vmlal_high_laneq_s16(c[1], left.val[1], a, LANE + 1);
  c[2] = vmlal_laneq_s16(c[2], vget_low_s16(right.val[1]), a, LANE + 1);
  c[3] = vmlal_high_laneq_s16(c[3], right.val[1], a, LANE + 1);
}

// 24 accumulators, 4 registers of B, 2 of A: 30 of the 32 registers
__attribute__((noinline, noclone)) void multiply(int, const int64_t* chains, int64_t count,
                                                 const int32_t* __restrict a, const int32_t* __restrict b,
                                                 int32_t* __restrict tops, int32_t* __restrict sums) {
  int32x4_t c[ROWS][4];
  for (auto& row : c) row[0] = row[1] = row[2] = row[3] = vdupq_n_s32(0);
  for (int64_t chain = 0; chain < count; chain++) {
    if (chain > 0) {
      for (int i = 0; i < ROWS; i++) {
        for (int h = 0; h < 4; h++) {
          int32_t* top = tops + i * COLUMNS + 4 * h;
          vst1q_s32(top, vsraq_n_s32(chain == 1 ? vdupq_n_s32(0) : vld1q_s32(top), c[i][h], lowp::TOP_SHIFT));
          c[i][h] = vandq_s32(c[i][h], vdupq_n_s32((1 << lowp::TOP_SHIFT) - 1));
        }
      }
    }
    for (int64_t k = 0; k < chains[chain]; k++, a += ROWS, b += COLUMNS) {
      const int16_t* columns = reinterpret_cast<const int16_t*>(b);
      const int16x8x2_t left = vld2q_s16(columns), right = vld2q_s16(columns + 16);
      const int16x8_t first = vreinterpretq_s16_s32(vld1q_s32(a));
      const int16x4_t rest = vreinterpret_s16_s32(vld1_s32(a + 4));
      const int16x8_t second = vcombine_s16(rest, rest);
      add_row<0>(c[0], first, left, right);
      add_row<2>(c[1], first, left, right);
      add_row<4>(c[2], first, left, right);
      add_row<6>(c[3], first, left, right);
      add_row<0>(c[4], second, left, right);
      add_row<2>(c[5], second, left, right);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 4; j++) vst1q_s32(sums + i * COLUMNS + 4 * j, c[i][j]);
}

}  // namespace

#include "gemm_plain.hpp"
#include "gemm_tile.hpp"

namespace lowp {

const Micro* micro_neon() {
  static constexpr Micro micro = make_micro("neon");
  return &micro;
}

}  // namespace lowp
