// Common parts of the two methods for convolutions of integers.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "gemm.hpp"

namespace lowp {

using Triple = std::array<int64_t, 3>;

inline int64_t volume(const Triple& t) { return t[0] * t[1] * t[2]; }
inline int64_t even(int64_t n) { return (n + 1) / 2 * 2; }
inline int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

struct Geometry {
  int64_t batch, channels, out_channels, groups;  // channels of all groups
  Triple size, out_size, kernel, stride, padding, dilation;

  explicit Geometry(const int64_t* s)
      : batch(s[0]),
        channels(s[1]),
        out_channels(s[2]),
        groups(s[3]),
        size{s[4], s[5], s[6]},
        out_size{s[7], s[8], s[9]},
        kernel{s[10], s[11], s[12]},
        stride{s[13], s[14], s[15]},
        padding{s[16], s[17], s[18]},
        dilation{s[19], s[20], s[21]} {}
};

template <class Visit>
void each(const Triple& counts, Visit&& visit) {
  Triple i{};
  for (i[0] = 0; i[0] < counts[0]; i[0]++)
    for (i[1] = 0; i[1] < counts[1]; i[1]++)
      for (i[2] = 0; i[2] < counts[2]; i[2]++) visit(i);
}

// The taps that reach a pixel of residue r: k with r + padding - k * dilation = shift * stride.
struct Reach {
  std::vector<int64_t> taps, shifts;
};

inline Reach reach(const Geometry& g, int d, int64_t residue) {
  Reach found;
  for (int64_t k = 0; k < g.kernel[d]; k++) {
    const int64_t distance = residue + g.padding[d] - k * g.dilation[d];
    const int64_t shift = floor_divide(distance, g.stride[d]);
    if (shift * g.stride[d] != distance) continue;
    found.taps.push_back(k);
    found.shifts.push_back(shift);
  }
  return found;
}

// The range of shifts over all pixels, in each dimension, which determines the padding and the extent of the gradient.
inline void gradient_extent(const Geometry& g, Triple& before, Triple& extent) {
  for (int d = 0; d < 3; d++) {
    int64_t lowest = 0, highest = 0;
    for (int64_t r = 0; r < std::min(g.stride[d], g.size[d]); r++) {
      for (const int64_t shift : reach(g, d, r).shifts) {
        lowest = std::min(lowest, shift);
        highest = std::max(highest, shift + (g.size[d] - 1 - r) / g.stride[d]);
      }
    }
    before[d] = -lowest;
    extent[d] = highest - lowest + 1;
  }
}

// The extent of the windows in each dimension.
inline Triple window_extent(const Geometry& g) {
  Triple extent;
  for (int d = 0; d < 3; d++)
    extent[d] = std::max<int64_t>(1, (g.out_size[d] - 1) * g.stride[d] + (g.kernel[d] - 1) * g.dilation[d] + 1);
  return extent;
}

struct Call {
  const Micro& micro;
  const Bias& bias;
  int threads;
  Tally& tally;
};

// The same products without packing, for groups so small that packing would take most of the time; see
// convolution_direct.cpp. Returns false and does nothing if that would be slower.
bool convolve_directly(const Geometry& g, int product, const int16_t* a, const int16_t* b, void* c,
                       const Format& format, const Call& call);

}  // namespace lowp
