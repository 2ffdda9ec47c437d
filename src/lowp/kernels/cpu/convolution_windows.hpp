// Images as operands of a matrix product: windows, rows and columns of them, and where the result goes.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>

#include "convolution.hpp"
#include "parallel.hpp"

namespace lowp {

// An image with its channels innermost, an even number of them a group, and zeros around: element (n, position,
// channel) for positions -before .. extent - before.
struct Padded {
  Triple before, extent;
  int64_t group_channels, pixel, image;  // channels a group; int16 a pixel and an image
  std::unique_ptr<int16_t[]> data;

  Padded(const int16_t* source, int64_t batch, int64_t channels, int64_t groups, const Triple& size,
         const Triple& before, const Triple& extent, const Micro& micro, int threads)
      : before(before),
        extent(extent),
        group_channels(even(channels / groups)),
        pixel(group_channels * groups),
        image(pixel * volume(extent)),
        data(new int16_t[static_cast<size_t>(batch * image)]) {
    const int64_t rows = extent[0] * extent[1], row = extent[2] * pixel, real = channels / groups;
    const int64_t first = std::max<int64_t>(0, -before[2]), past = std::min(size[2], extent[2] - before[2]);
    parallel_for(batch * rows, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const int64_t n = r / rows, y0 = r % rows / extent[1] - before[0], y1 = r % extent[1] - before[1];
        int16_t* to = data.get() + r * row;
        const bool inside = y0 >= 0 && y0 < size[0] && y1 >= 0 && y1 < size[1] && first < past;
        if (!inside || real != group_channels) {
          std::memset(to, 0, static_cast<size_t>(row) * sizeof(int16_t));
          if (!inside) continue;
        }
        std::memset(to, 0, static_cast<size_t>((first + before[2]) * pixel) * sizeof(int16_t));
        std::memset(to + (past + before[2]) * pixel, 0,
                    static_cast<size_t>((extent[2] - past - before[2]) * pixel) * sizeof(int16_t));
        for (int64_t g = 0; g < groups; g++) {
          const int16_t* from =
              source + (n * channels + g * real) * volume(size) + (y0 * size[1] + y1) * size[2] + first;
          micro.interleave(from, volume(size), real, past - first,
                           to + (first + before[2]) * pixel + g * group_channels, pixel);
        }
      }
    });
  }

  // int16 from one position to the next in each dimension, and from the first one to position 0, 0, 0
  Triple steps() const { return {extent[1] * extent[2] * pixel, extent[2] * pixel, pixel}; }
  int64_t origin() const { return ((before[0] * extent[1] + before[1]) * extent[2] + before[2]) * pixel; }
};

// Visits the lattice of pixels of a batch in order, giving each one's place n * image + (its three indices) * step.
class Lattice {
 public:
  Lattice(const Triple& counts, int64_t image, const Triple& step) : counts_(counts), image_(image), step_(step) {}

  int64_t pixels() const { return volume(counts_); }

  template <class Visit>
  void visit(int64_t first, int64_t count, Visit&& visit) const {
    int64_t i2 = first % counts_[2], rest = first / counts_[2];
    int64_t i1 = rest % counts_[1];
    rest /= counts_[1];
    int64_t i0 = rest % counts_[0], n = rest / counts_[0];
    for (int64_t done = 0; done < count; done++) {
      visit(done, n * image_ + i0 * step_[0] + i1 * step_[1] + i2 * step_[2]);
      if (++i2 < counts_[2]) continue;
      i2 = 0;
      if (++i1 < counts_[1]) continue;
      i1 = 0;
      if (++i0 < counts_[0]) continue;
      i0 = 0;
      n++;
    }
  }

 private:
  Triple counts_;
  int64_t image_;
  Triple step_;
};

// Windows as columns: element (k = (tap, channel), column = pixel).
class Windows : public Operand {
 public:
  Windows(const int16_t* data, const Lattice& lattice, int64_t batch, const std::vector<int64_t>& taps, int64_t length)
      : Operand(batch * lattice.pixels()), data_(data), lattice_(lattice), taps_(taps), length_(length) {}

  void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const override {
    int64_t bases[64];
    const int64_t present = std::min<int64_t>(packer.width, count - first);
    lattice_.visit(first, present, [&](int64_t w, int64_t place) { bases[w] = place; });
    for (int64_t k = k0; k < k1;) {
      const int64_t tap = k / length_, channel = k % length_, length = std::min(run_of(tap) - channel, k1 - k);
      const int16_t* lines[64];
      for (int64_t w = 0; w < packer.width; w++)
        lines[w] = w < present ? data_ + bases[w] + taps_[static_cast<size_t>(tap)] + channel : nullptr;
      packer.lines(lines, length, panel + (k - k0) / 2 * packer.width);
      k += length;
    }
  }

 private:
  // How many elements from a tap on lie side by side: neighbouring taps of a row do.
  int64_t run_of(int64_t tap) const {
    size_t last = static_cast<size_t>(tap);
    while (last + 1 < taps_.size() && taps_[last + 1] == taps_[last] + length_) last++;
    return (static_cast<int64_t>(last) - tap + 1) * length_;
  }

  const int16_t* data_;
  const Lattice lattice_;
  const std::vector<int64_t>& taps_;
  const int64_t length_;
};

// Rows of a small dense matrix.
class Rows : public Operand {
 public:
  Rows(const int16_t* data, int64_t count, int64_t stride) : Operand(count), data_(data), stride_(stride) {}

  void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const override {
    const int16_t* lines[64];
    for (int w = 0; w < packer.width; w++) lines[w] = first + w < count ? data_ + (first + w) * stride_ + k0 : nullptr;
    packer.lines(lines, k1 - k0, panel);
  }

 private:
  const int16_t* data_;
  const int64_t stride_;
};

// Channels of a plain [batch][channels][pixels] tensor as rows whose depth is (image, pixel), pixels padded to even.
class ImageRows : public Operand {
 public:
  ImageRows(const int16_t* data, int64_t count, int64_t pixels, int64_t image)
      : Operand(count), data_(data), pixels_(pixels), image_(image) {}

  void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const override {
    for (int64_t k = k0; k < k1;) {
      const int64_t n = k / even(pixels_), pixel = k % even(pixels_);
      const int64_t length = std::min(pixels_ - pixel, k1 - k);
      const int16_t* lines[64];
      for (int w = 0; w < packer.width; w++)
        lines[w] = first + w < count ? data_ + n * image_ + (first + w) * pixels_ + pixel : nullptr;
      packer.lines(lines, length, panel + (k - k0) / 2 * packer.width);
      k += even(length);
    }
  }

 private:
  const int16_t* data_;
  const int64_t pixels_, image_;
};

// (tap, channel) as columns whose depth is (image, pixel): the transposed windows.
class WindowColumns : public Operand {
 public:
  WindowColumns(const int16_t* data, const Lattice& lattice, const std::vector<int64_t>& taps, int64_t channels)
      : Operand(static_cast<int64_t>(taps.size()) * channels),
        data_(data),
        lattice_(lattice),
        taps_(taps),
        channels_(channels) {}

  void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const override {
    int64_t columns[64];
    const int64_t present = std::min<int64_t>(packer.width, count - first);
    for (int64_t w = 0; w < present; w++)
      columns[w] = taps_[static_cast<size_t>((first + w) / channels_)] + (first + w) % channels_;
    const bool together = present == packer.width && columns[present - 1] == columns[0] + present - 1;
    const int64_t pixels = lattice_.pixels();
    for (int64_t k = k0; k < k1;) {
      const int64_t n = k / even(pixels), pixel = k % even(pixels), length = std::min(pixels - pixel, k1 - k);
      int64_t offsets[STEP];
      lattice_.visit(n * pixels + pixel, length, [&](int64_t i, int64_t place) { offsets[i] = place; });
      int32_t* to = panel + (k - k0) / 2 * packer.width;
      if (together)
        packer.rows(data_ + columns[0], offsets, length, packer.width, to);
      else
        gather(packer, present, columns, offsets, length, to);
      k += even(length);
    }
  }

 private:
  // Columns that lie side by side, the channels of neighbouring taps, are packed together.
  void gather(const Packer& packer, int64_t present, const int64_t* columns, const int64_t* offsets, int64_t length,
              int32_t* to) const {
    const size_t size = static_cast<size_t>(even(length) / 2 * packer.width) * sizeof *to;
    if (present < packer.width) std::memset(to, 0, size);
    for (int64_t w = 0, end; w < present; w = end) {
      for (end = w + 1; end < present && columns[end] == columns[w] + end - w;) end++;
      packer.some_rows(data_ + columns[w], offsets, length, end - w, to + w);
    }
  }

  const int16_t* data_;
  const Lattice lattice_;
  const std::vector<int64_t>& taps_;
  const int64_t channels_;
};

// Pixels of a [batch][channels][pixels] tensor, all or every few.
class Pixels : public Target {
 public:
  Pixels(const Lattice& lattice, int64_t first) : lattice_(lattice), first_(first) {}
  void offsets(int64_t first, int64_t count, int64_t* out) const override {
    lattice_.visit(first, count, [&](int64_t i, int64_t place) { out[i] = first_ + place; });
  }

 private:
  const Lattice lattice_;
  const int64_t first_;
};

// (tap, channel) columns of a [out channels][channels][taps] tensor; channels that only pad are not written.
class Weights : public Target {
 public:
  Weights(int64_t taps, int64_t channels) : taps_(taps), channels_(channels) {}
  void offsets(int64_t first, int64_t count, int64_t* out) const override {
    for (int64_t i = 0; i < count; i++) {
      const int64_t tap = (first + i) / even(channels_), channel = (first + i) % even(channels_);
      out[i] = channel < channels_ ? channel * taps_ + tap : -1;
    }
  }

 private:
  const int64_t taps_, channels_;
};

}  // namespace lowp
