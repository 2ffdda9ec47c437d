// Convolution with small groups (depthwise ones have a single channel each), without packing, which would take most of
// the time of a matrix product with few rows. One image and group at a time is converted to padded planes of fp64, in
// which sums of products of int16 are exact, and the taps are added row by row. The chained product rounds in the order
// of convolution.cpp.
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "convolution.hpp"
#include "parallel.hpp"

namespace lowp {
namespace {

// The largest product of input and output channels of a group for which this method is faster.
constexpr int64_t SMALL_GROUP = 16;
constexpr int64_t MOST_DEPTH = int64_t{1} << 21;  // sums of so many products are below 2^51

// Planes of fp64, padded with zeros. Positions `stride` apart, as in neighbouring windows, are adjacent: each plane of two
// dimensions is split into parts by the residues of a position.
class Planes {
 public:
  Planes(int64_t count, const Triple& size, const Triple& before, const Triple& extent, const Triple& stride,
         const Micro& micro)
      : size_(size),
        before_(before),
        extent_(extent),
        stride_(stride),
        rows_(divide_up(extent[1], stride[1])),
        columns_(divide_up(extent[2], stride[2])),
        micro_(micro),
        data_(static_cast<size_t>(count * plane() + BEYOND)) {}

  void fill(const int16_t* source, int64_t count) {
    const int64_t slabs = std::min(size_[0], extent_[0] - before_[0]), rows = std::min(size_[1], extent_[1] - before_[1]);
    for (int64_t c = 0; c < count; c++)
      for (int64_t y0 = 0; y0 < slabs; y0++) {
        const int16_t* from = source + (c * size_[0] + y0) * size_[1] * size_[2];
        double* to = data_.data() + c * plane();
        for (int64_t r = 0; r < std::min(stride_[1], rows); r++) {  // the first row of each residue
          double* row = to + place({y0 + before_[0], r + before_[1], 0});
          for (int64_t y1 = r; y1 < rows; y1 += stride_[1], row += columns_) fill_row(from + y1 * size_[2], row);
        }
      }
  }
  int64_t pixels() const { return volume(size_); }
  int64_t plane() const { return extent_[0] * stride_[1] * stride_[2] * rows_ * columns_; }
  // from one window to the next in each dimension
  Triple steps() const { return {stride_[0] * stride_[1] * stride_[2] * rows_ * columns_, columns_, 1}; }
  // the place of a position, counted from the first stored one
  int64_t place(const Triple& at) const {
    const int64_t part = (at[0] * stride_[1] + at[1] % stride_[1]) * stride_[2] + at[2] % stride_[2];
    return (part * rows_ + at[1] / stride_[1]) * columns_ + at[2] / stride_[2];
  }
  const double* data() const { return data_.data(); }

 private:
  void fill_row(const int16_t* from, double* row) {
    const int64_t stride = stride_[2], length = std::min(size_[2], extent_[2] - before_[2]);
    if (stride == 1) return micro_.widen(from, 1, length, row + before_[2]);
    for (int64_t x = 0; x < std::min(stride, length); x++) {  // the first of each residue
      const int64_t at = x + before_[2];
      micro_.widen(from + x, stride, divide_up(length - x, stride), row + at % stride * rows_ * columns_ + at / stride);
    }
  }

  const Triple size_, before_, extent_, stride_;
  const int64_t rows_, columns_;
  const Micro& micro_;
  std::vector<double> data_;
};

// Whether rows of `length` results are computed together with what lies between them, `step` from one to the next.
inline bool is_dense(int64_t length, int64_t step) { return step <= length + length / 2; }

int64_t dot_steps(const Triple& a, const Triple& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

// Writes sums below 2^51, in the order of the result.
class Sink {
 public:
  Sink(const Micro& micro, const Format& format, void* out) : micro_(micro), format_(format), out_(out) {}

  // Writes sums, plus `addend` unless null, to the elements from `first` on.
  void write(const double* sums, int64_t count, int64_t first, const double* addend, Tally& tally) const {
    const int exponent = format_.exponent;
    if (format_.kind == Kind::chained)
      return micro_.finish_chained_line(sums, count, exponent, addend, static_cast<float*>(out_) + first, tally);
    if (format_.kind == Kind::int16)
      return micro_.finish_int16_line(sums, count, exponent, addend, format_.lowest,
                                      static_cast<int16_t*>(out_) + first, tally);
    for (int64_t i = 0, here; i < count; i += here) {  // a row of a tile of the micro-kernel at a time
      here = std::min<int64_t>(micro_.columns, count - i);
      alignas(64) int64_t whole[64] = {};
      for (int64_t j = 0; j < here; j++) whole[j] = static_cast<int64_t>(sums[i + j]);
      write_row(whole, here, first + i, tally);
    }
  }

 private:
  void write_row(const int64_t* sums, int64_t count, int64_t first, Tally& tally) const {
    alignas(64) char row[64 * 8];
    const auto finish = [&](auto* results, auto function, auto... exponent) {
      function(sums, true, exponent..., {results, micro_.columns, 1}, tally);
      std::copy_n(results, count, static_cast<decltype(results)>(out_) + first);
    };
    if (format_.kind == Kind::float32) finish(reinterpret_cast<float*>(row), micro_.finish_float, format_.exponent);
    if (format_.kind == Kind::float64) finish(reinterpret_cast<double*>(row), micro_.finish_double, format_.exponent);
    if (format_.kind == Kind::int64) finish(reinterpret_cast<int64_t*>(row), micro_.finish_int64);
  }

  const Micro& micro_;
  const Format& format_;
  void* out_;
};

// Distributes the numbers below `count` to threads, each with a worker created before by make() and its own counts.
template <class Make>
void share(int64_t count, const Call& call, Make&& make) {
  std::vector<decltype(make())> workers;
  const int64_t threads = std::min<int64_t>(call.threads, count);
  for (int64_t i = 0; i < threads; i++) workers.push_back(make());
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  parallel_for(threads, 1, call.threads, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t i = begin; i < end; i++) {
      Tally seen;
      for (int64_t item = next++; item < count; item = next++) workers[static_cast<size_t>(i)]->run(item, seen);
      const std::lock_guard<std::mutex> lock(mutex);
      call.tally.merge(seen);
    }
  });
}

// The taps that contribute to one residue of the result's pixels: all of them in the forward product.
struct Correlation {
  std::vector<int64_t> offsets, taps;  // in a plane; numbers of the taps
  Triple counts, from, to;             // pixels; steps in the plane and in the result
  int64_t first;                       // place of the first pixel in the result
};

// The forward product or the input gradient: each of `targets` channels is a sum over `sources`.
struct Sums {
  int64_t sources, targets, source_step, target_step;  // steps between the weights of channels
  int64_t pixels;                                      // of the result
  Planes planes;                                       // of the sources
  std::vector<Correlation> correlations;
};

Sums forward_sums(const Geometry& g, const Micro& micro) {
  const int64_t taps = volume(g.kernel), channels = g.channels / g.groups;
  Sums sums{channels,
            g.out_channels / g.groups,
            taps,
            channels * taps,
            volume(g.out_size),
            Planes(channels, g.size, g.padding, window_extent(g), g.stride, micro),
            {}};
  Correlation all{{}, {}, g.out_size, sums.planes.steps(), {g.out_size[1] * g.out_size[2], g.out_size[2], 1}, 0};
  each(g.kernel, [&](const Triple& k) {
    all.taps.push_back(static_cast<int64_t>(all.taps.size()));
    all.offsets.push_back(sums.planes.place({k[0] * g.dilation[0], k[1] * g.dilation[1], k[2] * g.dilation[2]}));
  });
  sums.correlations.push_back(all);
  return sums;
}

Sums gradient_sums(const Geometry& g, const Micro& micro) {
  const int64_t taps = volume(g.kernel), channels = g.channels / g.groups, outs = g.out_channels / g.groups;
  Triple before{}, extent{};
  gradient_extent(g, before, extent);
  Sums sums{outs,
            channels,
            channels * taps,
            taps,
            volume(g.size),
            Planes(outs, g.out_size, before, extent, {1, 1, 1}, micro),
            {}};
  const Triple steps = sums.planes.steps();
  const Triple plane{g.size[1] * g.size[2], g.size[2], 1};
  const Triple residues{std::min(g.stride[0], g.size[0]), std::min(g.stride[1], g.size[1]),
                        std::min(g.stride[2], g.size[2])};
  each(residues, [&](const Triple& r) {
    const Reach found[3] = {reach(g, 0, r[0]), reach(g, 1, r[1]), reach(g, 2, r[2])};
    Correlation part{{}, {}, {}, steps, {}, dot_steps(r, plane)};
    Triple reached;
    for (int d = 0; d < 3; d++) {
      reached[d] = static_cast<int64_t>(found[d].taps.size());
      part.counts[d] = (g.size[d] - 1 - r[d]) / g.stride[d] + 1;
      part.to[d] = g.stride[d] * plane[d];
    }
    each(reached, [&](const Triple& i) {
      int64_t tap = 0, offset = dot_steps(before, steps);
      for (size_t d = 0; d < 3; d++) {
        const size_t at = static_cast<size_t>(i[d]);
        tap = tap * g.kernel[d] + found[d].taps[at];
        offset += found[d].shifts[at] * steps[d];
      }
      part.taps.push_back(tap);
      part.offsets.push_back(offset);
    });
    sums.correlations.push_back(part);
  });
  return sums;
}

// Runs one image and group of the forward product or the input gradient.
class Correlator {
 public:
  Correlator(const Geometry& g, const Sums& sums, const int16_t* source, const int16_t* weights, const Sink& sink,
             const Call& call)
      : g_(g),
        sums_(sums),
        source_(source),
        weights_(weights),
        sink_(sink),
        micro_(call.micro),
        addends_(call.bias.panels(0, g.groups * sums.targets, 1)),
        planes_(sums.planes),
        result_(static_cast<size_t>(2 * sums.pixels + BEYOND)),
        lines_(result_.size()) {}

  void run(int64_t item, Tally& tally) {
    const int64_t n = item / g_.groups, group = item % g_.groups, sources = n * g_.groups + group;
    planes_.fill(source_ + sources * sums_.sources * planes_.pixels(), sums_.sources);
    const int16_t* weights = weights_ + group * sums_.sources * sums_.targets * volume(g_.kernel);
    for (int64_t target = 0; target < sums_.targets; target++) {
      for (const Correlation& part : sums_.correlations) add(part, weights + target * sums_.target_step);
      const int64_t channel = group * sums_.targets + target;
      sink_.write(result_.data(), sums_.pixels, (n * g_.groups * sums_.targets + channel) * sums_.pixels,
                  addends_.empty() ? nullptr : &addends_[static_cast<size_t>(channel)], tally);
    }
  }

 private:
  // Writes the sums of a part to its pixels of the result.
  void add(const Correlation& part, const int16_t* weights) {
    double values[BLOCK];
    int64_t places[BLOCK], count = 0;
    for (int64_t source = 0; source < sums_.sources; source++)
      for (size_t i = 0; i < part.taps.size(); i++, count++) {
        values[count] = weights[source * sums_.source_step + part.taps[i]];
        places[count] = source * planes_.plane() + part.offsets[i];
      }
    const int64_t rows = part.counts[1], length = part.counts[2], step = part.from[1];
    const bool is_whole = part.to == Triple{rows * length, length, 1}, together = is_dense(length, step);
    double* lines = is_whole ? result_.data() + part.first : lines_.data();
    for (int64_t i0 = 0; i0 < part.counts[0]; i0++, lines += is_whole ? rows * length : 0) {
      const double* from = planes_.data() + i0 * part.from[0];
      const int64_t calls = together ? 1 : rows, reach = together ? (rows - 1) * step + length : length;
      for (int64_t i1 = 0; i1 < calls; i1++)
        micro_.correlate(from + i1 * step, places, values, count, reach, lines + i1 * length);
      if (together && step != length)
        for (int64_t i1 = 1; i1 < rows; i1++) std::copy_n(lines + i1 * step, length, lines + i1 * length);
      if (is_whole) continue;
      double* to = result_.data() + part.first + i0 * part.to[0];
      for (int64_t i1 = 0; i1 < rows; i1++)
        for (int64_t j = 0; j < length; j++) to[i1 * part.to[1] + j * part.to[2]] = lines[i1 * length + j];
    }
  }

  const Geometry& g_;
  const Sums& sums_;
  const int16_t *source_, *weights_;
  const Sink& sink_;
  const Micro& micro_;
  const std::vector<double> addends_;
  Planes planes_;
  std::vector<double> result_, lines_;
};

// Runs the weight gradient of one group. The chained sum of a block of the depth is rounded when the block is full.
class WeightGradient {
 public:
  WeightGradient(const Geometry& g, const int16_t* x, const int16_t* grad, const Sink& sink, bool is_chained,
                 const Micro& micro)
      : g_(g),
        x_(x),
        grad_(grad),
        sink_(sink),
        micro_(micro),
        is_chained_(is_chained),
        channels_(g.channels / g.groups),
        outs_(g.out_channels / g.groups),
        rows_(g.out_size[1]),
        columns_(g.out_size[2]),
        planes_(channels_, g.size, g.padding, window_extent(g), g.stride, micro),
        together_(is_dense(columns_, planes_.steps()[1])),
        step_(together_ ? planes_.steps()[1] : columns_),
        grads_(static_cast<size_t>(outs_ * g.out_size[0] * rows_ * step_)),
        partial_(static_cast<size_t>(outs_ * channels_ * volume(g.kernel))),
        sums_(partial_.size()) {
    each(g.kernel, [&](const Triple& k) {
      taps_.push_back(planes_.place({k[0] * g.dilation[0], k[1] * g.dilation[1], k[2] * g.dilation[2]}));
    });
  }

  void run(int64_t group, Tally& tally) {
    std::fill(partial_.begin(), partial_.end(), 0.0);
    std::fill(sums_.begin(), sums_.end(), 0.0);
    const int64_t pixels = volume(g_.out_size), length = even(pixels), results = static_cast<int64_t>(partial_.size());
    for (int64_t n = 0; n < g_.batch; n++) {
      planes_.fill(x_ + (n * g_.groups + group) * channels_ * volume(g_.size), channels_);
      for (int64_t line = 0; line < outs_ * pixels / columns_; line++)
        micro_.widen(grad_ + (n * g_.groups + group) * outs_ * pixels + line * columns_, 1, columns_,
                     grads_.data() + line * step_);
      for (int64_t done = 0, end; done < length; done = end) {
        end = is_chained_ ? std::min(length, done + BLOCK - (n * length + done) % BLOCK) : length;
        add(done, std::min(end, pixels));
        if (is_chained_ && (n * length + end) % BLOCK == 0) flush();
      }
    }
    flush();
    sink_.write(sums_.data(), results, group * results, nullptr, tally);
  }

 private:
  // Adds the products of pixels first .. past - 1 of an image.
  void add(int64_t first, int64_t past) {
    const int64_t slab = rows_ * columns_, from_slab = planes_.steps()[0], from_row = planes_.steps()[1];
    for (int64_t end; first < past; first = end) {  // neighbours in both operands
      const int64_t unit = together_ ? slab : columns_, i0 = first / slab, row = first % slab / columns_;
      end = std::min(past, (first / unit + 1) * unit);
      const int64_t column = first % columns_, rows = (end - 1) % slab / columns_ - row;
      const int64_t length = rows * step_ + (end - 1) % columns_ + 1 - column;
      const double* grads = grads_.data() + (i0 * rows_ + row) * step_ + column;
      const double* windows = planes_.data() + i0 * from_slab + row * from_row + column;
      double* to = partial_.data();
      for (int64_t o = 0; o < outs_; o++, grads += g_.out_size[0] * rows_ * step_)
        for (int64_t c = 0; c < channels_; c++, to += taps_.size())
          micro_.dots(grads, windows + c * planes_.plane(), taps_.data(), static_cast<int64_t>(taps_.size()), length, to);
    }
  }
  void flush() {
    for (size_t i = 0; i < sums_.size(); i++) {
      sums_[i] = is_chained_ ? static_cast<float>(sums_[i]) + static_cast<float>(partial_[i]) : partial_[i];
      partial_[i] = is_chained_ ? 0 : partial_[i];
    }
  }

  const Geometry& g_;
  const int16_t *x_, *grad_;
  const Sink& sink_;
  const Micro& micro_;
  const bool is_chained_;
  const int64_t channels_, outs_, rows_, columns_;
  Planes planes_;
  const bool together_;  // whether rows of gradients lie as those of windows, with zeros between them
  const int64_t step_;
  std::vector<int64_t> taps_;
  std::vector<double> grads_, partial_, sums_;
};

}  // namespace

bool convolve_directly(const Geometry& g, int product, const int16_t* a, const int16_t* b, void* c,
                       const Format& format, const Call& call) {
  const int64_t channels = g.channels / g.groups, outs = g.out_channels / g.groups, taps = volume(g.kernel);
  const bool empty = g.batch * volume(g.size) * volume(g.out_size) * channels * outs == 0;
  if (empty || g.groups == 1 || channels * outs > SMALL_GROUP) return false;
  const Sink sink(call.micro, format, c);
  if (product == 2) {
    if (g.batch * even(volume(g.out_size)) >= MOST_DEPTH) return false;
    const bool is_chained = format.kind == Kind::chained;
    share(g.groups, call, [&] { return std::make_unique<WeightGradient>(g, a, b, sink, is_chained, call.micro); });
    return true;
  }
  if (taps * even(product == 0 ? channels : outs) > BLOCK) return false;  // rounded more than once
  const Sums sums = product == 0 ? forward_sums(g, call.micro) : gradient_sums(g, call.micro);
  share(g.batch * g.groups, call, [&] { return std::make_unique<Correlator>(g, sums, a, b, sink, call); });
  return true;
}

}  // namespace lowp
