// The byte products in plain C++: every machine has them, and the others are tested against them, bit for bit.
#include <cmath>

#include "bytes.hpp"

namespace lowp {
namespace {

void quantize(const float* x, int64_t count, float scale, int32_t zero, int32_t highest, uint8_t* out) {
  const float low = static_cast<float>(-zero), high = static_cast<float>(highest - zero);
  for (int64_t i = 0; i < count; i++) {
    float rounded = std::nearbyint(x[i] / scale);
    rounded = rounded > low ? rounded : low;  // NaN too
    rounded = rounded < high ? rounded : high;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(rounded) + zero);
  }
}

void multiply(const uint8_t* const* rows, const int8_t* panel, const uint8_t*, int64_t depth, int32_t* sums) {
  for (int64_t k = 0; k < depth; k += 4, panel += 4 * kPanel)
    for (int64_t i = 0; i < kTriple; i++)
      for (int64_t j = 0; j < kPanel; j++)
        for (int64_t t = 0; t < 4; t++) sums[i * kPanel + j] += int32_t{rows[i][k + t]} * int32_t{panel[4 * j + t]};
}

void finish(const int32_t* sums, float row_scale, int32_t zero, const Finish& to, float* out) {
  for (int64_t j = 0; j < kPanel; j++) {
    const float value = static_cast<float>(sums[j] - zero * to.column_sums[j]) * (row_scale * to.column_scales[j]);
    out[j] = to.bias ? value + to.bias[j] : value;
  }
}

float value_of(const uint8_t* block, int64_t k, const float* table) {
  const int code = block[k % 8 * 4 + k / 16] >> (4 * (k / 8 % 2)) & 15;
  return table ? table[code] : static_cast<float>(code < 8 ? code : code - 16);
}

// Eight sums, as a vector of eight lanes takes them; the order is part of what is computed.
float row_of_nibbles(const uint8_t* codes, const float* table, const float* scales, int64_t blocks, int64_t group,
                     const float* x) {
  float total[8] = {};
  for (int64_t block = 0; block < blocks; block++, codes += 32, x += 64)
    for (int64_t first = 0; first < 64; first += group, scales++) {
      float sum[8] = {};
      for (int64_t k = first; k < first + group; k++) {
        const float product = value_of(codes, k, table) * x[k];
        sum[k % 8] = sum[k % 8] + product;
      }
      for (int lane = 0; lane < 8; lane++) {
        const float product = sum[lane] * *scales;
        total[lane] = total[lane] + product;
      }
    }
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

void nibbles(const uint8_t* const* codes, const float* table, const float* const* scales, int64_t blocks, int64_t group,
             const float* x, float* out) {
  for (int64_t j = 0; j < kQuad; j++) out[j] = row_of_nibbles(codes[j], table, scales[j], blocks, group, x);
}

int64_t differing(const uint64_t* a, const uint64_t* b, int64_t words) {
  int64_t count = 0;
  for (int64_t i = 0; i < words; i++) count += __builtin_popcountll(a[i] ^ b[i]);
  return count;
}

}  // namespace

const ByteKernels kPortableBytes = {quantize, multiply, finish, nibbles, differing};

}  // namespace lowp
