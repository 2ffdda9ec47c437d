// A product of rows with panels by a kernel for three rows, one panel and a block of its depth.
#pragma once
#include <algorithm>

#include "bytes_lanes.hpp"

namespace lowp {
namespace {

constexpr int64_t kTriple = 3;  // rows processed at once
constexpr int64_t kFew = 6;     // rows up to which computing the centres costs more than it saves

// A part of the depth of a panel: the sums of a row begin with `starts`, plus the sums of earlier parts if there are any.
struct Piece {
  const int8_t* weights;
  uint8_t ways[kDeep / kChunk];  // of adjacent chunks with the same way
  int64_t ends[kDeep / kChunk];  // the end of these chunks
  const int16_t* centres;  // null: for few rows, without centres
  int64_t depth;           // a multiple of 8
  const int32_t* starts;   // [16]
  bool continues;
  const Finish* to;  // null: the sums stay sums
};

// Groups chunks of the same way. Without centres the products of two elements of a centred chunk fit 16 bits.
inline void find_ways(const uint8_t* ways, bool centred, Piece& piece) {
  int64_t found = 0;
  for (int64_t k = 0; k < piece.depth; k += kChunk) {
    const uint8_t way = ways[k / kChunk] == kCentred && !centred ? uint8_t{kTwo} : ways[k / kChunk];
    if (found == 0 || piece.ways[found - 1] != way) piece.ways[found++] = way;
    piece.ends[found - 1] = std::min(k + kChunk, piece.depth);
  }
}

// `Sums` has two functions. `centre`: the amounts subtracted in a panel's centred chunks, [depth / 8][16][2], whose sum over
// depth is added to starts[16]. `add`: sums[count][16] of 1 to 3 rows times a part, minus the centres, converted to
// out[count] if it is the last part.
template <class Sums>
void multiply_panel(const Rows& a, const Panel& panel, float* out, int64_t stride) {
  alignas(64) int32_t sums[kRows * kPanel];
  alignas(64) int16_t centres[kDeep / kEight * 2 * kPanel];
  const bool whole = panel.columns == kPanel;
  for (int64_t k = 0; k < a.depth; k += kDeep) {
    alignas(64) int32_t starts[kPanel] = {};
    if (k == 0) std::copy(panel.starts, panel.starts + kPanel, starts);
    const int64_t depth = std::min(kDeep, a.depth - k);
    const Finish* to = k + depth < a.depth ? nullptr : &panel.finish;
    Piece piece{panel.weights + k * kPanel, {}, {}, a.count > kFew ? centres : nullptr, depth, starts, k > 0, to};
    const uint8_t* ways = panel.ways + k / kChunk;
    find_ways(ways, piece.centres != nullptr, piece);
    if (piece.centres) Sums::centre(piece.weights, ways, depth, centres, starts);
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
