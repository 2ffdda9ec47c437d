// The byte products in plain C++, for every machine; the others are tested against them, bit for bit.
#define LOWP_ISA portable
#include <cmath>

#include "bytes_block.hpp"
#include "carrier.hpp"

namespace lowp {
namespace {

void extremes(const float* x, int64_t count, float* low, float* high) {
  float least = 0, most = 0;
  bool nan = false;
  for (int64_t i = 0; i < count; i++) {
    least = x[i] < least ? x[i] : least, most = x[i] > most ? x[i] : most;
    nan |= x[i] != x[i];
  }
  *low = nan ? NAN : least, *high = nan ? NAN : most;
}

void quantize(const float* x, int64_t count, float scale, int32_t zero, int32_t highest, uint8_t* out) {
  const float low = static_cast<float>(-zero), high = static_cast<float>(highest - zero);
  for (int64_t i = 0; i < count; i++) {
    float rounded = std::nearbyint(x[i] / scale);
    rounded = rounded > low ? rounded : low;  // NaN too
    rounded = rounded < high ? rounded : high;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(rounded) + zero);
  }
}

void finish(const int32_t* sums, const Finish& to, float* out) {
  for (int64_t j = 0; j < kPanel; j++) {
    const float value = static_cast<float>(sums[j]) * to.scales[j];
    out[j] = to.biased ? value + to.bias[j] : value;
  }
}

struct Sums {
  static void centre(const int8_t*, const uint8_t*, int64_t, int16_t*, int32_t*) {}  // 32-bit sums need none
  static void add(const uint8_t* const* rows, int64_t count, const Piece& piece, int32_t* sums, float* const* out) {
    for (int64_t i = 0; i < count; i++, sums += kPanel) {
      for (int64_t j = 0; j < kPanel; j++) sums[j] = piece.starts[j] + (piece.continues ? sums[j] : 0);
      const int8_t* panel = piece.weights;
      for (int64_t k = 0; k < piece.depth; k += 4, panel += 4 * kPanel)
        for (int64_t j = 0; j < kPanel; j++)
          for (int64_t t = 0; t < 4; t++) sums[j] += int32_t{rows[i][k + t]} * int32_t{panel[4 * j + t]};
      if (piece.to) finish(sums, *piece.to, out[i]);
    }
  }
};

bool has_minus(const CodePanel& panel, int64_t at) {
  return panel.tables == 2 && static_cast<const uint8_t*>(panel.scales)[at] >= 128;
}

float scale_at(const CodePanel& panel, int64_t at) {
  if (panel.shift == kWholeScales) return static_cast<const float*>(panel.scales)[at];
  const uint32_t byte = static_cast<const uint8_t*>(panel.scales)[at];
  if (has_minus(panel, at)) return bit_cast<float>(portable::fp32_from_fp16((byte & 127) << panel.shift)) * panel.other_factor;
  const uint32_t exponent = byte ? byte << 23 : 1 << 22;  // 2^-127 is subnormal
  return bit_cast<float>(panel.shift == kExponentBytes ? exponent : portable::fp32_from_fp16(byte << panel.shift)) * panel.factor;
}

void codes(const Digits& row, const CodePanel& panel, float* out) {
  const int per = 8 / panel.bits;
  const uint8_t* memory = panel.memory;
  const int8_t* digits = row.numbers;
  std::fill(out, out + kPanel, 0.0f);
  for (int64_t g = 0; g < panel.groups; g++) {
    uint32_t sums[kPanel];  // modulo 2^32: the whole sum fits
    const uint8_t* levels[kPanel];
    for (int64_t j = 0; j < kPanel; j++) levels[j] = panel.levels + (has_minus(panel, g * kPanel + j) ? 16 : 0);
    std::fill(sums, sums + kPanel, -static_cast<uint32_t>(panel.offset) * static_cast<uint32_t>(row.sums[g]));
    for (int64_t k = 0; k < panel.group; k += 4 * per, memory += 4 * kPanel, digits += 4 * per)
      for (int i = 0; i < per; i++)
        for (int t = 0; t < 4; t++) {
          int32_t number = 0;
          for (int p = row.planes - 1; p >= 0; p--) number = 128 * number + digits[p * row.depth + 4 * i + t];
          for (int64_t j = 0; j < kPanel; j++) {
            const int code = memory[4 * j + t] >> (panel.bits * i) & ((1 << panel.bits) - 1);
            sums[j] += static_cast<uint32_t>(number) * levels[j][code];
          }
        }
    for (int64_t j = 0; j < kPanel; j++) {
      const float scale = scale_at(panel, g * kPanel + j);
      out[j] += static_cast<float>(static_cast<int32_t>(sums[j])) * (row.scales[g] * scale);
    }
  }
}

}  // namespace

const ByteKernels kPortableBytes = {extremes, quantize, multiply_panels<Sums>, numbers, codes, differing};

}  // namespace lowp
