// A product of rows with panels by a kernel that takes three rows of one panel and blocks of its depth at a time.
#pragma once
#include <algorithm>

#include "bytes_lanes.hpp"

namespace lowp {
namespace {

constexpr int64_t kTriple = 3;  // rows taken at once
constexpr int64_t kFew = 6;     // rows up to which finding the centres costs more than they save

// `Sums` has two functions. `centre`: what a panel's centred chunks take off, [depth / 8][16][2], and its sum over depth,
// added to sums[16]. `add`: sums[count][16] += rows x panel - centres over `depth` elements, a multiple of 8, of 1 to 3
// rows. Without centres nothing is taken off: the products of two elements of such chunks fit 16 bits, too.
template <class Sums>
void multiply_panel(const Rows& a, const Panel& panel, float* out, int64_t stride) {
  alignas(64) int32_t sums[kRows * kPanel];
  alignas(64) int16_t centres[kDepth / kEight * 2 * kPanel];
  for (int64_t k = 0; k < a.depth; k += kDepth) {
    const int64_t depth = std::min(kDepth, a.depth - k);
    const int8_t* weights = panel.weights + k * kPanel;
    const uint8_t* ways = panel.ways + k / kChunk;
    int32_t starts[kPanel] = {};
    if (k == 0) std::copy(panel.starts, panel.starts + kPanel, starts);
    const bool centred = a.count > kFew;
    if (centred) Sums::centre(weights, ways, depth, centres, starts);
    for (int64_t i = 0; i < a.count; i += kTriple) {
      const int64_t count = std::min(kTriple, a.count - i);
      const uint8_t* rows[kTriple];
      int32_t* some = sums + i * kPanel;
      for (int64_t t = 0; t < count; t++) {
        rows[t] = a.bytes + (i + t) * a.depth + k;
        for (int64_t j = 0; j < kPanel; j++) some[t * kPanel + j] = starts[j] + (k ? some[t * kPanel + j] : 0);
      }
      Sums::add(rows, count, weights, centred ? centres : nullptr, ways, depth, some);
      if (k + depth < a.depth) continue;
      for (int64_t t = 0; t < count; t++) {
        float line[kPanel];
        float* target = out + (i + t) * stride;
        finish(some + t * kPanel, panel.finish, panel.columns == kPanel ? target : line);
        if (panel.columns < kPanel) std::copy(line, line + panel.columns, target);
      }
    }
  }
}

template <class Sums>
void multiply_panels(const Rows& a, const Panel* panels, int64_t count, float* out, int64_t stride) {
  for (int64_t p = 0; p < count; p++) multiply_panel<Sums>(a, panels[p], out + p * kPanel, stride);
}

}  // namespace
}  // namespace lowp
