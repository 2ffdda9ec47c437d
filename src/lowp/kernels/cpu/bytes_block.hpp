// A product of rows with panels by a kernel that takes three rows of one panel and blocks of its depth at a time.
#pragma once
#include <algorithm>

#include "bytes_lanes.hpp"

namespace lowp {
namespace {

constexpr int64_t kTriple = 3;  // rows taken at once
constexpr int64_t kFew = 6;     // rows up to which finding the centres costs more than they save

// Some of the depth of a panel: the sums of a row begin with `starts`, and what was summed before is added if there is any.
struct Piece {
  const int8_t* weights;
  const uint8_t* ways;
  const int16_t* centres;  // null: of few rows, where nothing is taken off
  int64_t depth;           // a multiple of 8
  const int32_t* starts;   // [16]
  bool continues;
  const Finish* to;  // null: the sums stay sums
};

// `Sums` has two functions. `centre`: what a panel's centred chunks take off, [depth / 8][16][2], and its sum over depth,
// added to starts[16]. `add`: sums[count][16] of 1 to 3 rows times a piece, less the centres, finished to out[count] if it
// is the last piece. Where nothing is taken off, the products of two elements of centred chunks fit 16 bits, too.
template <class Sums>
void multiply_panel(const Rows& a, const Panel& panel, float* out, int64_t stride) {
  alignas(64) int32_t sums[kRows * kPanel];
  alignas(64) int16_t centres[kDepth / kEight * 2 * kPanel];
  const bool whole = panel.columns == kPanel;
  for (int64_t k = 0; k < a.depth; k += kDepth) {
    alignas(64) int32_t starts[kPanel] = {};
    if (k == 0) std::copy(panel.starts, panel.starts + kPanel, starts);
    Piece piece{panel.weights + k * kPanel, panel.ways + k / kChunk, nullptr, std::min(kDepth, a.depth - k), starts, k > 0,
                k + kDepth < a.depth ? nullptr : &panel.finish};
    if (a.count > kFew) {
      Sums::centre(piece.weights, piece.ways, piece.depth, centres, starts);
      piece.centres = centres;
    }
    for (int64_t i = 0; i < a.count; i += kTriple) {
      const int64_t count = std::min(kTriple, a.count - i);
      const uint8_t* rows[kTriple];
      float* lines[kTriple];
      float aside[kTriple][kPanel];
      for (int64_t t = 0; t < count; t++) {
        rows[t] = a.bytes + (i + t) * a.depth + k;
        lines[t] = whole ? out + (i + t) * stride : aside[t];
      }
      Sums::add(rows, count, piece, sums + i * kPanel, lines);
      if (piece.to && !whole)
        for (int64_t t = 0; t < count; t++) std::copy(aside[t], aside[t] + panel.columns, out + (i + t) * stride);
    }
  }
}

template <class Sums>
void multiply_panels(const Rows& a, const Panel* panels, int64_t count, float* out, int64_t stride) {
  for (int64_t p = 0; p < count; p++) multiply_panel<Sums>(a, panels[p], out + p * kPanel, stride);
}

}  // namespace
}  // namespace lowp
