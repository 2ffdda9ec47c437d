// Convolution in 1 to 3 dimensions as integer matrix products. Nothing of the size of all windows is ever stored: the
// image is copied once, padded, with its channels innermost, and each panel of windows (16 KiB) is packed from that
// copy where it is used. The three products of training are three matrix products:
//   forward          y[out channel, pixel]      = sum over (tap, channel)     w * x
//   input gradient   dx[channel, pixel]         = sum over (tap, out channel) w * g, one product for each residue of
//   the
//                                                 pixel modulo the stride, so that no zero between strides is
//                                                 multiplied
//   weight gradient  dw[out channel, (tap, channel)] = sum over (image, pixel) g * x
// The depth runs in that order, the last index fastest; channels (and in the last row the pixels of an image) are
// padded with zeros to an even number. The order decides where the chained product rounds, so it is part of the
// definition.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "gemm.hpp"
#include "parallel.hpp"

namespace lowp {
namespace {

using Triple = std::array<int64_t, 3>;

int64_t volume(const Triple& t) { return t[0] * t[1] * t[2]; }
int64_t even(int64_t n) { return (n + 1) / 2 * 2; }
int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

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
      const int64_t tap = k / length_, channel = k % length_, length = std::min(length_ - channel, k1 - k);
      const int16_t* lines[64];
      for (int64_t w = 0; w < packer.width; w++)
        lines[w] = w < present ? data_ + bases[w] + taps_[static_cast<size_t>(tap)] + channel : nullptr;
      packer.lines(lines, length, panel + (k - k0) / 2 * packer.width);
      k += length;
    }
  }

 private:
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
        gather(packer.width, present, columns, offsets, length, to);
      k += even(length);
    }
  }

 private:
  void gather(int width, int64_t present, const int64_t* columns, const int64_t* offsets, int64_t length,
              int32_t* to) const {
    for (int64_t k = 0; k < length; k += 2) {
      for (int64_t w = 0; w < width; w++) {
        const uint16_t low = w < present ? static_cast<uint16_t>(data_[offsets[k] + columns[w]]) : uint16_t{0};
        const uint16_t high =
            w < present && k + 1 < length ? static_cast<uint16_t>(data_[offsets[k + 1] + columns[w]]) : uint16_t{0};
        to[k / 2 * width + w] = static_cast<int32_t>(low | static_cast<uint32_t>(high) << 16);
      }
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

template <class Visit>
void each(const Triple& counts, Visit&& visit) {
  Triple i{};
  for (i[0] = 0; i[0] < counts[0]; i[0]++)
    for (i[1] = 0; i[1] < counts[1]; i[1]++)
      for (i[2] = 0; i[2] < counts[2]; i[2]++) visit(i);
}

// One product for each group, and for the input gradient one for each residue too; all run together.
class Products {
 public:
  Products(const Format& format, void* out) : format_(format), out_(out) {}

  void add(std::unique_ptr<Operand> left, std::unique_ptr<Operand> right, int64_t depth, std::unique_ptr<Target> target,
           int64_t first_element, int64_t row_stride) {
    static const int64_t bytes[] = {4, 2, 4, 8, 8};
    target->data = static_cast<char*>(out_) + first_element * bytes[static_cast<int>(format_.kind)];
    target->row_stride = row_stride;
    products_.push_back({left.get(), right.get(), depth, target.get()});
    operands_.push_back(std::move(left));
    operands_.push_back(std::move(right));
    targets_.push_back(std::move(target));
  }

  void run(const Micro& micro, int threads, Tally& tally) const {
    lowp::run(micro, products_, format_, false, threads, tally);
  }

 private:
  const Format format_;
  void* out_;
  std::vector<Product> products_;
  std::vector<std::unique_ptr<Operand>> operands_;
  std::vector<std::unique_ptr<Target>> targets_;
};

struct Call {
  const Micro& micro;
  int threads;
  Tally& tally;
};

Padded pad_for_windows(const Geometry& g, const int16_t* x, const Call& call) {
  Triple extent;
  for (int d = 0; d < 3; d++)
    extent[d] = std::max<int64_t>(1, (g.out_size[d] - 1) * g.stride[d] + (g.kernel[d] - 1) * g.dilation[d] + 1);
  return Padded(x, g.batch, g.channels, g.groups, g.size, g.padding, extent, call.micro, call.threads);
}

// int16 from one window's first element to that of the next pixel's window, in each dimension
Triple window_steps(const Geometry& g, const Padded& padded) {
  const Triple steps = padded.steps();
  return {g.stride[0] * steps[0], g.stride[1] * steps[1], g.stride[2] * steps[2]};
}

std::vector<int64_t> window_taps(const Geometry& g, const Padded& padded) {
  const Triple steps = padded.steps();
  std::vector<int64_t> taps;
  each(g.kernel, [&](const Triple& k) {
    taps.push_back(k[0] * g.dilation[0] * steps[0] + k[1] * g.dilation[1] * steps[1] + k[2] * g.dilation[2] * steps[2]);
  });
  return taps;
}

void forward(const Geometry& g, const int16_t* x, const int16_t* w, Products& products, const Call& call) {
  const Padded padded = pad_for_windows(g, x, call);
  const std::vector<int64_t> taps = window_taps(g, padded);
  const int64_t out_channels = g.out_channels / g.groups, channels = g.channels / g.groups,
                length = padded.group_channels;
  const int64_t tap_count = volume(g.kernel), depth = tap_count * length, out_pixels = volume(g.out_size);
  std::vector<int16_t> weights(static_cast<size_t>(g.out_channels * depth));
  for (int64_t o = 0; o < g.out_channels; o++)
    for (int64_t c = 0; c < channels; c++)
      for (int64_t t = 0; t < tap_count; t++)
        weights[static_cast<size_t>(o * depth + t * length + c)] = w[(o * channels + c) * tap_count + t];
  const Lattice from(g.out_size, padded.image, window_steps(g, padded));
  const Lattice to(g.out_size, g.out_channels * out_pixels, {g.out_size[1] * g.out_size[2], g.out_size[2], 1});
  for (int64_t group = 0; group < g.groups; group++)
    products.add(std::make_unique<Rows>(weights.data() + group * out_channels * depth, out_channels, depth),
                 std::make_unique<Windows>(padded.data.get() + group * length, from, g.batch, taps, length), depth,
                 std::make_unique<Pixels>(to, 0), group * out_channels * out_pixels, out_pixels);
  products.run(call.micro, call.threads, call.tally);
}

// The taps that reach a pixel of residue r: k with r + padding - k * dilation = shift * stride.
struct Reach {
  std::vector<int64_t> taps, shifts;
};

Reach reach(const Geometry& g, int d, int64_t residue) {
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

Padded pad_for_input_gradient(const Geometry& g, const int16_t* grad, const Call& call) {
  Triple before{}, extent{};
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
  return Padded(grad, g.batch, g.out_channels, g.groups, g.out_size, before, extent, call.micro, call.threads);
}

void input_gradient(const Geometry& g, const int16_t* grad, const int16_t* w, Products& products, const Call& call) {
  const Padded padded = pad_for_input_gradient(g, grad, call);
  const Triple steps = padded.steps();
  const int64_t out_channels = g.out_channels / g.groups, channels = g.channels / g.groups,
                length = padded.group_channels;
  const int64_t tap_count = volume(g.kernel), pixels = volume(g.size);
  const Triple plane{g.size[1] * g.size[2], g.size[2], 1};
  const Triple residues{std::min(g.stride[0], g.size[0]), std::min(g.stride[1], g.size[1]),
                        std::min(g.stride[2], g.size[2])};
  std::vector<std::unique_ptr<std::vector<int16_t>>> weights;  // kept until the products have run
  std::vector<std::unique_ptr<std::vector<int64_t>>> taps;
  each(residues, [&](const Triple& r) {
    const Reach found[3] = {reach(g, 0, r[0]), reach(g, 1, r[1]), reach(g, 2, r[2])};
    Triple reached, counts, step;
    int64_t first = 0;
    for (int d = 0; d < 3; d++) {
      reached[d] = static_cast<int64_t>(found[d].taps.size());
      counts[d] = (g.size[d] - 1 - r[d]) / g.stride[d] + 1;
      step[d] = g.stride[d] * plane[d];
      first += r[d] * plane[d];
    }
    const int64_t depth = volume(reached) * length;
    taps.push_back(std::make_unique<std::vector<int64_t>>());
    weights.push_back(std::make_unique<std::vector<int16_t>>(static_cast<size_t>(g.channels * depth)));
    int16_t* rows = weights.back()->data();
    each(reached, [&](const Triple& i) {
      const int64_t place = static_cast<int64_t>(taps.back()->size()) * length;
      int64_t tap = 0, offset = 0;
      for (size_t d = 0; d < 3; d++) {
        const size_t at = static_cast<size_t>(i[d]);
        tap = tap * g.kernel[d] + found[d].taps[at];
        offset += found[d].shifts[at] * steps[d];
      }
      taps.back()->push_back(offset);
      for (int64_t o = 0; o < g.out_channels; o++)
        for (int64_t c = 0; c < channels; c++)
          rows[(o / out_channels * channels + c) * depth + place + o % out_channels] =
              w[(o * channels + c) * tap_count + tap];
    });
    const Lattice from(counts, padded.image, steps), to(counts, g.channels * pixels, step);
    for (int64_t group = 0; group < g.groups; group++)
      products.add(std::make_unique<Rows>(rows + group * channels * depth, channels, depth),
                   std::make_unique<Windows>(padded.data.get() + padded.origin() + group * length, from, g.batch,
                                             *taps.back(), length),
                   depth, std::make_unique<Pixels>(to, first), group * channels * pixels, pixels);
  });
  products.run(call.micro, call.threads, call.tally);
}

void weight_gradient(const Geometry& g, const int16_t* x, const int16_t* grad, Products& products, const Call& call) {
  const Padded padded = pad_for_windows(g, x, call);
  const std::vector<int64_t> taps = window_taps(g, padded);
  const int64_t out_channels = g.out_channels / g.groups, channels = g.channels / g.groups,
                length = padded.group_channels;
  const int64_t tap_count = volume(g.kernel), out_pixels = volume(g.out_size), row = channels * tap_count;
  const Lattice from(g.out_size, padded.image, window_steps(g, padded));
  for (int64_t group = 0; group < g.groups; group++)
    products.add(std::make_unique<ImageRows>(grad + group * out_channels * out_pixels, out_channels, out_pixels,
                                             g.out_channels * out_pixels),
                 std::make_unique<WindowColumns>(padded.data.get() + group * length, from, taps, length),
                 g.batch * even(out_pixels), std::make_unique<Weights>(tap_count, channels), group * out_channels * row,
                 row);
  products.run(call.micro, call.threads, call.tally);
}

}  // namespace
}  // namespace lowp

// One of the three products of a convolution, on contiguous int16 tensors; see convolution_exact in integer.py.
//   product   0 forward (a = x, b = w, c = y), 1 input gradient (a = grad, b = w, c = dx), 2 weight gradient (a = x, b
//   = grad,
//             c = dw)
//   geometry  int64[22]: batch, channels, out channels, groups; then three numbers each (1 or 0 for a missing
//   dimension):
//             size, out size, kernel, stride, padding, dilation
// The rest is as in lowp_integer_matmul.
LOWP_EXPORT int lowp_integer_convolution(const char* forced, int product, const int16_t* a, const int16_t* b, void* c,
                                         const int64_t* geometry, int kind, int exponent, int lowest, int threads,
                                         int64_t* seen, double* largest) {
  const lowp::Micro* micro = lowp::choose_micro(forced);
  if (!micro) return 1;
  try {
    lowp::Tally tally;
    const lowp::Geometry shape(geometry);
    const lowp::Call call{*micro, threads, tally};
    lowp::Products products({static_cast<lowp::Kind>(kind), exponent, lowest}, c);
    if (product == 0) lowp::forward(shape, a, b, products, call);
    if (product == 1) lowp::input_gradient(shape, a, b, products, call);
    if (product == 2) lowp::weight_gradient(shape, a, b, products, call);
    seen[0] = tally.saturated;
    seen[1] = tally.largest_mantissa;
    seen[2] = tally.largest_sum;
    *largest = tally.largest_value;
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}
