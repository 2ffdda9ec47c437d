// Convolution in 1 to 3 dimensions as integer matrix products. The windows are never stored as a whole: the image is
// copied once, with padding, and each panel of windows (16 KiB) is packed from that copy when it is used. Windows as
// columns need pairs of channels, with neighbours in the image adjacent in the panel: planes of pairs. Their transpose
// needs pairs of pixels: channels innermost. The three products of training are three matrix products:
//   forward          y[out channel, pixel]      = sum over (tap, channel)     w * x
//   input gradient   dx[channel, pixel]         = sum over (tap, out channel) w * g, one product for each residue of
//   the
//                                                 pixel modulo the stride, so that no zero between strides is
//                                                 multiplied
//   weight gradient  dw[out channel, (tap, channel)] = sum over (image, pixel) g * x
// The depth has this order, the last index fastest; channels (and in the last row the pixels of an image) are
// padded with zeros to an even number. The order determines where the chained product rounds, so it is part of the
// definition.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "convolution_windows.hpp"

// mantissas.cpp

namespace lowp {
namespace {

// One product for each group, and for the input gradient one for each residue; all run together.
class Products {
 public:
  Products(const Format& format, void* out, const Call& call) : format_(format), out_(out), call_(call) {}

  // `first_row`: the channel of the result for the first row of the product
  void add(std::unique_ptr<Operand> left, std::unique_ptr<Operand> right, int64_t depth, std::unique_ptr<Target> target,
           int64_t first_row, int64_t first_element, int64_t row_stride) {
    target->data = static_cast<char*>(out_) + first_element * BYTES[static_cast<int>(format_.kind)];
    target->row_stride = row_stride;
    addends_.push_back(call_.bias.panels(first_row, left->count, call_.micro.rows));
    const double* addends = call_.bias.numbers ? addends_.back().data() : nullptr;
    products_.push_back({left.get(), right.get(), depth, target.get(), addends, nullptr});
    operands_.push_back(std::move(left));
    operands_.push_back(std::move(right));
    targets_.push_back(std::move(target));
  }

  // Sets the result to zeros, for the parts without a product; false if something is added to them.
  bool fill_zeros(int64_t count) {
    if (call_.bias.numbers) return false;
    if (!zeros_ && count > 0) std::memset(out_, 0, static_cast<size_t>(count * BYTES[static_cast<int>(format_.kind)]));
    return zeros_ = true;
  }

  void run() const { lowp::run(call_.micro, products_, format_, false, call_.threads, call_.tally); }

 private:
  static constexpr int64_t BYTES[] = {4, 2, 4, 8, 8};

  const Format format_;
  void* out_;
  bool zeros_ = false;
  const Call& call_;
  std::vector<Product> products_;
  std::vector<std::unique_ptr<Operand>> operands_;
  std::vector<std::unique_ptr<Target>> targets_;
  std::vector<std::vector<double>> addends_;
};

Padded pad_for_windows(const Geometry& g, const int16_t* x, const Call& call) {
  return Padded(x, g.batch, g.channels, g.groups, g.size, g.padding, window_extent(g), call.micro, call.threads);
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
  const PairPlanes planes(x, g.batch, g.channels, g.groups, g.size, g.padding, window_extent(g), g.stride[2],
                          call.micro, call.threads);
  std::vector<int64_t> taps;
  each(g.kernel, [&](const Triple& k) {
    taps.push_back(planes.place({k[0] * g.dilation[0], k[1] * g.dilation[1], k[2] * g.dilation[2]}));
  });
  const int64_t out_channels = g.out_channels / g.groups, channels = g.channels / g.groups,
                length = 2 * planes.group_pairs();
  const int64_t tap_count = volume(g.kernel), depth = tap_count * length, out_pixels = volume(g.out_size);
  std::vector<int16_t> weights(static_cast<size_t>(g.out_channels * depth));
  parallel_for(g.out_channels, 8, call.threads, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; o++)
      for (int64_t c = 0; c < channels; c++)
        for (int64_t t = 0; t < tap_count; t++)
          weights[static_cast<size_t>(o * depth + t * length + c)] = w[(o * channels + c) * tap_count + t];
  });
  const Triple steps = planes.steps();
  const Lattice from(g.out_size, planes.image(), {g.stride[0] * steps[0], g.stride[1] * steps[1], 1});
  const Lattice to(g.out_size, g.out_channels * out_pixels, {g.out_size[1] * g.out_size[2], g.out_size[2], 1});
  for (int64_t group = 0; group < g.groups; group++)
    products.add(std::make_unique<Rows>(weights.data() + group * out_channels * depth, out_channels, depth),
                 std::make_unique<Windows>(planes, group, 0, from, g.batch, taps), depth,
                 std::make_unique<Pixels>(to, 0), group * out_channels, group * out_channels * out_pixels, out_pixels);
  products.run();
}

void input_gradient(const Geometry& g, const int16_t* grad, const int16_t* w, Products& products, const Call& call) {
  Triple before{}, extent{};
  gradient_extent(g, before, extent);
  const PairPlanes planes(grad, g.batch, g.out_channels, g.groups, g.out_size, before, extent, 1, call.micro,
                          call.threads);
  const Triple steps = planes.steps();
  const int64_t out_channels = g.out_channels / g.groups, channels = g.channels / g.groups,
                length = 2 * planes.group_pairs();
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
    if (depth == 0 && products.fill_zeros(g.batch * g.channels * pixels)) return;
    taps.push_back(std::make_unique<std::vector<int64_t>>());
    weights.push_back(std::make_unique<std::vector<int16_t>>(static_cast<size_t>(g.channels * depth)));
    int16_t* rows = weights.back()->data();
    std::vector<int64_t> read;  // the kernel's tap of each of these
    each(reached, [&](const Triple& i) {
      int64_t tap = 0, offset = 0;
      for (size_t d = 0; d < 3; d++) {
        const size_t at = static_cast<size_t>(i[d]);
        tap = tap * g.kernel[d] + found[d].taps[at];
        offset += found[d].shifts[at] * steps[d];
      }
      taps.back()->push_back(offset);
      read.push_back(tap);
    });
    // eight channels at a time: their rows stay in the first-level cache while the kernels are read in memory order
    parallel_for(channels, 8, call.threads, [&](int64_t begin, int64_t end) {
      for (int64_t first_channel = begin; first_channel < end; first_channel += 8)
        for (int64_t o = 0; o < g.out_channels; o++)
          for (int64_t c = first_channel; c < std::min(first_channel + 8, end); c++) {
            int16_t* row = rows + (o / out_channels * channels + c) * depth + o % out_channels;
            for (size_t t = 0; t < read.size(); t++)
              row[static_cast<int64_t>(t) * length] = w[(o * channels + c) * tap_count + read[t]];
          }
    });
    const Lattice from(counts, planes.image(), steps), to(counts, g.channels * pixels, step);
    for (int64_t group = 0; group < g.groups; group++)
      products.add(std::make_unique<Rows>(rows + group * channels * depth, channels, depth),
                   std::make_unique<Windows>(planes, group, planes.origin(), from, g.batch, *taps.back()), depth,
                   std::make_unique<Pixels>(to, first), group * channels, group * channels * pixels, pixels);
  });
  products.run();
}

void weight_gradient(const Geometry& g, const int16_t* x, const int16_t* grad, Products& products, const Call& call) {
  const Padded padded = pad_for_windows(g, x, call);
  const std::vector<int64_t> taps = window_taps(g, padded);
  const int64_t out_channels = g.out_channels / g.groups, channels = g.channels / g.groups,
                length = padded.group_channels;
  const int64_t tap_count = volume(g.kernel), out_pixels = volume(g.out_size), row = channels * tap_count;
  const Lattice from(g.out_size, padded.image, window_steps(g, padded));
  const Magnitude most(x, g.batch * g.channels * volume(g.size));
  for (int64_t group = 0; group < g.groups; group++)
    products.add(std::make_unique<ImageRows>(grad + group * out_channels * out_pixels, out_channels, out_pixels,
                                             g.out_channels * out_pixels),
                 std::make_unique<WindowColumns>(padded.data.get() + group * length, from, taps, length, most),
                 g.batch * even(out_pixels), std::make_unique<Weights>(tap_count, channels), group * out_channels,
                 group * out_channels * row, row);
  products.run();
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
//   bias      null, or one number per channel of the result; not for product 2
// The other arguments are those of lowp_integer_matmul.
LOWP_EXPORT int lowp_integer_convolution(const char* forced, int product, const int16_t* a, const int16_t* b, void* c,
                                         const int64_t* geometry, int kind, int exponent, int lowest,
                                         const float* bias, int bias_exponent, int threads, int64_t* seen,
                                         double* largest) {
  const lowp::Micro* micro = lowp::choose_micro(forced);
  if (!micro) return 1;
  try {
    lowp::Tally tally;
    const lowp::Geometry shape(geometry);
    const lowp::Bias added{bias, product == 1 ? shape.channels : shape.out_channels, bias_exponent};
    if (static_cast<lowp::Kind>(kind) == lowp::Kind::int16 && !added.is_finite()) return 3;
    const lowp::Call call{*micro, added, threads, tally};
    const lowp::Format format{static_cast<lowp::Kind>(kind), exponent, lowest};
    lowp::Products products(format, c, call);
    if (lowp::convolve_directly(shape, product, a, b, c, format, call)) product = -1;
    if (product == 0) lowp::forward(shape, a, b, products, call);
    if (product == 1) lowp::input_gradient(shape, a, b, products, call);
    if (product == 2) lowp::weight_gradient(shape, a, b, products, call);
    tally.report(seen, largest);
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}
