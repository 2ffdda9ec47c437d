// Images as operands of a matrix product: windows, rows, columns, and the destination of the result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "convolution.hpp"
#include "parallel.hpp"

namespace lowp {

// The largest magnitude of a tensor, found when it is asked for; by one thread.
class Magnitude {
 public:
  Magnitude(const int16_t* data, int64_t count) : data_(data), count_(count) {}

  float find(int threads) const {
    if (found_ >= 0) return static_cast<float>(found_);
    std::atomic<int> largest{0};
    parallel_for(count_, 65536, threads, [&](int64_t begin, int64_t end) {
      int16_t least = 0, most = 0;
      for (int64_t i = begin; i < end; i++) {
        least = data_[i] < least ? data_[i] : least;
        most = data_[i] > most ? data_[i] : most;
      }
      const int part = std::max(-int{least}, int{most});
      for (int seen = largest; part > seen && !largest.compare_exchange_weak(seen, part);) {
      }
    });
    found_ = largest;
    return static_cast<float>(found_);
  }

 private:
  const int16_t* data_;
  const int64_t count_;
  mutable int found_ = -1;
};

// An image with its channels innermost, an even number per group, padded with zeros: element (n, position,
// channel) for positions -before .. extent - before.
struct Padded {
  Triple before, extent;
  int64_t group_channels, pixel, image;  // channels per group; int16 per pixel and per image
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

// An image as planes of pairs of channels, padded with zeros: pairs[n][pair of channels][row][position], the operand from
// which a panel of windows is copied. Positions `stride` apart, as in neighbouring windows, are adjacent: a row is split
// into `stride` parts by the residue of the position.
class PairPlanes {
 public:
  PairPlanes(const int16_t* source, int64_t batch, int64_t channels, int64_t groups, const Triple& size,
             const Triple& before, const Triple& extent, int64_t stride, const Micro& micro, int threads)
      : before_(before),
        extent_(extent),
        stride_(stride),
        part_(divide_up(extent[2], stride)),
        groups_(groups),
        group_pairs_(even(channels / groups) / 2),
        data_(new int32_t[static_cast<size_t>(batch * groups * group() + OVERRUN)]) {
    const int64_t rows = extent[0] * extent[1], real = channels / groups, pixels = volume(size);
    parallel_for(batch * groups * group_pairs_ * rows, 1, threads, [&](int64_t begin, int64_t end) {
      std::vector<int32_t> line(static_cast<size_t>(stride == 1 ? 0 : extent[2]));
      for (int64_t r = begin; r < end; r++) {
        const int64_t y0 = r % rows / extent[1] - before[0], y1 = r % extent[1] - before[1];
        const int64_t pair = r / rows % group_pairs_, channel = r / rows / group_pairs_ * real + 2 * pair;
        const bool inside = y0 >= 0 && y0 < size[0] && y1 >= 0 && y1 < size[1];
        const int16_t* first = inside ? source + channel * pixels + (y0 * size[1] + y1) * size[2] : nullptr;
        fill_row(first, inside && 2 * pair + 1 < real ? first + pixels : nullptr, size[2], micro, line.data(),
                 data_.get() + r * row());
      }
    });
  }

  int64_t row() const { return stride_ * part_; }
  int64_t plane() const { return extent_[0] * extent_[1] * row(); }
  int64_t group() const { return group_pairs_ * plane(); }
  int64_t image() const { return groups_ * group(); }
  int64_t group_pairs() const { return group_pairs_; }
  const int32_t* data() const { return data_.get(); }
  // from one row to the next in each dimension except the last, in which it is from one window to the next
  Triple steps() const { return {extent_[1] * row(), row(), 1}; }
  // the place of a position in its plane, counted from the first stored one
  int64_t place(const Triple& at) const {
    return (at[0] * extent_[1] + at[1]) * row() + at[2] % stride_ * part_ + at[2] / stride_;
  }
  int64_t origin() const { return place(before_); }

 private:
  // One row of pairs of two channels (null: zeros) with `length` positions, padded with zeros.
  void fill_row(const int16_t* first, const int16_t* second, int64_t length, const Micro& micro, int32_t* line,
                int32_t* to) const {
    if (!first) {
      std::memset(to, 0, static_cast<size_t>(row()) * sizeof *to);
      return;
    }
    if (stride_ == 1) return fill_line(first, second, length, micro, to);
    fill_line(first, second, length, micro, line);
    for (int64_t residue = 0; residue < stride_; residue++, to += part_) {
      const int64_t count = divide_up(extent_[2] - residue, stride_);
      for (int64_t i = 0; i < count; i++) to[i] = line[residue + i * stride_];
      if (count < part_) to[count] = 0;
    }
  }

  void fill_line(const int16_t* first, const int16_t* second, int64_t length, const Micro& micro, int32_t* to) const {
    const int64_t skipped = std::max<int64_t>(0, -before_[2]), begin = before_[2] + skipped;
    const int64_t count = std::max<int64_t>(0, std::min(length - skipped, extent_[2] - begin));
    std::memset(to, 0, static_cast<size_t>(std::min(begin, extent_[2])) * sizeof *to);
    micro.pair(first + skipped, second ? second + skipped : nullptr, count, to + begin);
    if (begin + count < extent_[2])
      std::memset(to + begin + count, 0, static_cast<size_t>(extent_[2] - begin - count) * sizeof *to);
  }

  Triple before_, extent_;
  int64_t stride_, part_, groups_, group_pairs_;
  std::unique_ptr<int32_t[]> data_;
};

// The lattice of pixels of a batch, in order. Each has a place: n * image + (its three indices) * step.
class Lattice {
 public:
  Lattice(const Triple& counts, int64_t image, const Triple& step) : counts_(counts), image_(image), step_(step) {}

  int64_t pixels() const { return volume(counts_); }

  // Calls visit(done, place, length) for each run of `count` pixels from `first` on: neighbours in the last dimension.
  template <class Visit>
  void runs(int64_t first, int64_t count, Visit&& visit) const {
    int64_t i2 = first % counts_[2], rest = first / counts_[2];
    int64_t i1 = rest % counts_[1];
    rest /= counts_[1];
    int64_t i0 = rest % counts_[0], n = rest / counts_[0];
    for (int64_t done = 0; done < count;) {
      const int64_t length = std::min(count - done, counts_[2] - i2);
      visit(done, n * image_ + i0 * step_[0] + i1 * step_[1] + i2 * step_[2], length);
      done += length;
      i2 = 0;
      if (++i1 < counts_[1]) continue;
      i1 = 0;
      if (++i0 < counts_[0]) continue;
      i0 = 0;
      n++;
    }
  }

  void places(int64_t first, int64_t count, int64_t shift, int64_t* out) const {
    const int64_t step = step_[2];
    runs(first, count, [&](int64_t done, int64_t place, int64_t length) {
      for (int64_t i = 0; i < length; i++) out[done + i] = shift + place + i * step;
    });
  }

 private:
  Triple counts_;
  int64_t image_;
  Triple step_;
};

// Windows as columns: element (k = (tap, channel), column = pixel); `taps` are places in a plane. The numbers of
// neighbouring windows are adjacent, so that a panel can be copied from them for any taps.
class Windows : public Operand {
 public:
  // for a group of channels, with the lattice's first window at `origin` of a plane
  Windows(const PairPlanes& planes, int64_t group, int64_t origin, const Lattice& lattice, int64_t batch,
          const std::vector<int64_t>& taps)
      : Operand(batch * lattice.pixels()), data_(planes.data()), lattice_(lattice) {
    for (const int64_t tap : taps)
      for (int64_t pair = 0; pair < planes.group_pairs(); pair++)
        offsets_.push_back(origin + tap + group * planes.group() + pair * planes.plane());
  }

  void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const override {
    Run runs[64];
    int64_t found = 0;
    lattice_.runs(first, std::min<int64_t>(packer.width, count - first),
                  [&](int64_t done, int64_t place, int64_t length) { runs[found++] = {done, place, length}; });
    packer.copies(data_, offsets_.data() + k0 / 2, (k1 - k0) / 2, runs, found, panel);
  }

 private:
  const int32_t* data_;
  const Lattice lattice_;
  std::vector<int64_t> offsets_;  // of each pair of a window
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
  // `most` is the largest magnitude of the tensor
  WindowColumns(const int16_t* data, const Lattice& lattice, const std::vector<int64_t>& taps, int64_t channels,
                const Magnitude& most)
      : Operand(static_cast<int64_t>(taps.size()) * channels),
        data_(data),
        lattice_(lattice),
        taps_(taps),
        channels_(channels),
        most_(most) {}

  float chunk_norm(int threads) const override { return std::min(LARGEST_NORM, NORM_OF_ONES * most_.find(threads)); }

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
      lattice_.places(n * pixels + pixel, length, 0, offsets);
      int32_t* to = panel + (k - k0) / 2 * packer.width;
      if (together)
        packer.rows(data_ + columns[0], offsets, length, packer.width, to);
      else
        gather(packer, present, columns, offsets, length, to);
      k += even(length);
    }
  }

 private:
  // Adjacent columns, the channels of neighbouring taps, are packed together.
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
  static constexpr float NORM_OF_ONES = 4;  // of CHUNK elements
  static_assert(CHUNK == 16, "the square of the norm of ones");

  const std::vector<int64_t>& taps_;
  const int64_t channels_;
  const Magnitude& most_;
};

// Pixels of a [batch][channels][pixels] tensor, all or with a stride.
class Pixels : public Target {
 public:
  Pixels(const Lattice& lattice, int64_t first) : lattice_(lattice), first_(first) {}
  void offsets(int64_t first, int64_t count, int64_t* out) const override {
    lattice_.places(first, count, first_, out);
  }

 private:
  const Lattice lattice_;
  const int64_t first_;
};

// (tap, channel) columns of a [out channels][channels][taps] tensor; padding channels are not written.
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
