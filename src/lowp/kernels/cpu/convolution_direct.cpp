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

// Planes of fp64, padded with zeros.
class Planes {
 public:
  Planes(int64_t count, const Triple& size, const Triple& before, const Triple& extent)
      : size_(size), before_(before), extent_(extent), data_(static_cast<size_t>(count * volume(extent))) {}

  void fill(const int16_t* source, int64_t count) {
    for (int64_t c = 0; c < count; c++, source += volume(size_)) {
      for (int64_t y0 = 0; y0 < std::min(size_[0], extent_[0] - before_[0]); y0++) {
        for (int64_t y1 = 0; y1 < std::min(size_[1], extent_[1] - before_[1]); y1++) {
          double* row = data_.data() + c * volume(extent_) + before_[2] +
                        ((y0 + before_[0]) * extent_[1] + y1 + before_[1]) * extent_[2];
          const int16_t* from = source + (y0 * size_[1] + y1) * size_[2];
          for (int64_t x = 0; x < std::min(size_[2], extent_[2] - before_[2]); x++) row[x] = from[x];
        }
      }
    }
  }
  Triple steps() const { return {extent_[1] * extent_[2], extent_[2], 1}; }
  int64_t origin() const { return (before_[0] * extent_[1] + before_[1]) * extent_[2] + before_[2]; }
  int64_t plane() const { return volume(extent_); }
  const double* data() const { return data_.data(); }

 private:
  const Triple size_, before_, extent_;
  std::vector<double> data_;
};

int64_t dot_steps(const Triple& a, const Triple& b) { return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]; }

// Writes exact sums, in the order of the result, a tile of the micro-kernel at a time.
class Sink {
 public:
  Sink(const Micro& micro, const Format& format, int64_t depth, void* out)
      : micro_(micro), format_(format), narrow_(depth < int64_t{1} << 21), out_(out) {}

  // Writes whole[i] or, chained, floats[i], plus `addend` unless null, to element first + i.
  void write(const int64_t* whole, const float* floats, int64_t count, int64_t first, const double* addend,
             Tally& tally) const {
    static const int64_t bytes[] = {4, 2, 4, 8, 8};
    const int64_t size = bytes[static_cast<int>(format_.kind)], columns = micro_.columns;
    alignas(64) int64_t sums[12 * 32];
    alignas(64) float chained[12 * 32];
    alignas(64) char results[12 * 32 * 8];
    double addends[12];
    for (double& one : addends) one = addend ? *addend : 0.0;
    for (int64_t i = 0, here; i < count; i += here) {  // whole rows of a tile; then a part of a row
      const int64_t rows = std::max<int64_t>(1, std::min<int64_t>(micro_.rows, (count - i) / columns));
      here = std::min(rows * columns, count - i);
      std::memset(sums, 0, sizeof sums);
      std::memset(chained, 0, sizeof chained);
      if (format_.kind == Kind::chained)
        std::memcpy(chained, floats + i, static_cast<size_t>(here) * sizeof(float));
      else
        std::memcpy(sums, whole + i, static_cast<size_t>(here) * sizeof(int64_t));
      finish(sums, chained, {addend ? addends : nullptr, nullptr, std::min(here, columns)}, static_cast<int>(rows), results, tally);
      std::memcpy(static_cast<char*>(out_) + (first + i) * size, results, static_cast<size_t>(here * size));
    }
  }

 private:
  template <class Out>
  Place<Out> at(void* out, int rows) const {
    return {static_cast<Out*>(out), micro_.columns, rows};
  }

  void finish(const int64_t* sums, const float* chained, const Addends& addends, int rows, char* out,
              Tally& tally) const {
    const int exponent = format_.exponent;
    switch (format_.kind) {
      case Kind::chained:
        return micro_.finish_chained(chained, exponent, addends, at<float>(out, rows), tally);
      case Kind::int16:
        return micro_.finish_int16(sums, narrow_, exponent, addends, format_.lowest, at<int16_t>(out, rows), tally);
      case Kind::float32:
        return micro_.finish_float(sums, narrow_, exponent, at<float>(out, rows), tally);
      case Kind::float64:
        return micro_.finish_double(sums, narrow_, exponent, at<double>(out, rows), tally);
      case Kind::int64:
        return micro_.finish_int64(sums, narrow_, at<int64_t>(out, rows), tally);
    }
  }

  const Micro& micro_;
  const Format& format_;
  const bool narrow_;
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
  Triple size, before, extent;                         // of the sources
  int64_t pixels;                                      // of the result
  std::vector<Correlation> correlations;
};

Sums forward_sums(const Geometry& g) {
  const int64_t taps = volume(g.kernel), channels = g.channels / g.groups;
  Sums sums{channels, g.out_channels / g.groups, taps, channels * taps, g.size, g.padding, window_extent(g),
            volume(g.out_size), {}};
  const Triple steps{sums.extent[1] * sums.extent[2], sums.extent[2], 1};
  Correlation all{{}, {}, g.out_size, {}, {g.out_size[1] * g.out_size[2], g.out_size[2], 1}, 0};
  for (int d = 0; d < 3; d++) all.from[d] = g.stride[d] * steps[d];
  each(g.kernel, [&](const Triple& k) {
    all.taps.push_back(static_cast<int64_t>(all.taps.size()));
    all.offsets.push_back(dot_steps({k[0] * g.dilation[0], k[1] * g.dilation[1], k[2] * g.dilation[2]}, steps));
  });
  sums.correlations.push_back(all);
  return sums;
}

Sums gradient_sums(const Geometry& g) {
  const int64_t taps = volume(g.kernel), channels = g.channels / g.groups;
  Sums sums{g.out_channels / g.groups, channels, channels * taps, taps, g.out_size, {}, {}, volume(g.size), {}};
  gradient_extent(g, sums.before, sums.extent);
  const Triple steps{sums.extent[1] * sums.extent[2], sums.extent[2], 1};
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
      int64_t tap = 0, offset = dot_steps(sums.before, steps);
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
        planes_(sums.sources, sums.size, sums.before, sums.extent),
        result_(static_cast<size_t>(sums.pixels)),
        whole_(result_.size()),
        floats_(result_.size()) {}

  void run(int64_t item, Tally& tally) {
    const int64_t n = item / g_.groups, group = item % g_.groups;
    planes_.fill(source_ + (n * g_.groups + group) * sums_.sources * volume(sums_.size), sums_.sources);
    const int16_t* weights = weights_ + group * sums_.sources * sums_.targets * volume(g_.kernel);
    for (int64_t target = 0; target < sums_.targets; target++) {
      std::fill(result_.begin(), result_.end(), 0.0);
      for (const Correlation& part : sums_.correlations) add(part, weights + target * sums_.target_step);
      for (size_t i = 0; i < result_.size(); i++) {
        whole_[i] = static_cast<int64_t>(result_[i]);
        floats_[i] = static_cast<float>(result_[i]);
      }
      const int64_t channel = group * sums_.targets + target;
      sink_.write(whole_.data(), floats_.data(), sums_.pixels, (n * g_.groups * sums_.targets + channel) * sums_.pixels,
                  addends_.empty() ? nullptr : &addends_[static_cast<size_t>(channel)], tally);
    }
  }

 private:
  void add(const Correlation& part, const int16_t* weights) {
    const size_t taps = part.taps.size(), count = taps * static_cast<size_t>(sums_.sources);
    const double* rows[BLOCK];
    double values[BLOCK], line[64];
    int64_t places[BLOCK];
    for (size_t i = 0; i < count; i++) {
      const int64_t source = static_cast<int64_t>(i / taps);
      values[i] = weights[source * sums_.source_step + part.taps[i % taps]];
      places[i] = source * planes_.plane() + part.offsets[i % taps];
    }
    for (int64_t i0 = 0; i0 < part.counts[0]; i0++) {
      for (int64_t i1 = 0; i1 < part.counts[1]; i1++) {
        for (int64_t i2 = 0; i2 < part.counts[2]; i2 += 64) {
          const int64_t length = std::min<int64_t>(64, part.counts[2] - i2), place = dot_steps({i0, i1, i2}, part.from);
          for (size_t i = 0; i < count; i++) rows[i] = planes_.data() + places[i] + place;
          double* to = result_.data() + part.first + dot_steps({i0, i1, i2}, part.to);
          micro_.correlate(rows, values, static_cast<int64_t>(count), part.from[2], length,
                           part.to[2] == 1 ? to : line);
          for (int64_t j = 0; part.to[2] != 1 && j < length; j++) to[j * part.to[2]] = line[j];
        }
      }
    }
  }

  const Geometry& g_;
  const Sums& sums_;
  const int16_t *source_, *weights_;
  const Sink& sink_;
  const Micro& micro_;
  const std::vector<double> addends_;
  Planes planes_;
  std::vector<double> result_;
  std::vector<int64_t> whole_;
  std::vector<float> floats_;
};

// Runs the weight gradient of one group. The sum of a block of the depth is rounded when the block is full.
class WeightGradient {
 public:
  WeightGradient(const Geometry& g, const int16_t* x, const int16_t* grad, const Sink& sink, const Micro& micro)
      : g_(g),
        x_(x),
        grad_(grad),
        sink_(sink),
        micro_(micro),
        channels_(g.channels / g.groups),
        outs_(g.out_channels / g.groups),
        length_(even(volume(g.out_size))),
        planes_(channels_, g.size, g.padding, window_extent(g)),
        window_(static_cast<size_t>(length_)),
        grads_(static_cast<size_t>(outs_ * length_)),
        partial_(static_cast<size_t>(outs_ * channels_ * volume(g.kernel))),
        whole_(partial_.size()),
        floats_(partial_.size()) {}

  void run(int64_t group, Tally& tally) {
    std::fill(partial_.begin(), partial_.end(), 0.0);
    std::fill(whole_.begin(), whole_.end(), 0);
    std::fill(floats_.begin(), floats_.end(), 0.0f);
    const int64_t pixels = volume(g_.out_size), results = static_cast<int64_t>(partial_.size());
    for (int64_t n = 0; n < g_.batch; n++) {
      planes_.fill(x_ + (n * g_.groups + group) * channels_ * volume(g_.size), channels_);
      const int16_t* grads = grad_ + (n * g_.groups + group) * outs_ * pixels;
      for (int64_t i = 0; i < outs_ * pixels; i++)
        grads_[static_cast<size_t>(i / pixels * length_ + i % pixels)] = grads[i];
      int64_t column = 0;
      for (int64_t c = 0; c < channels_; c++) {
        each(g_.kernel, [&](const Triple& k) {
          copy_window(c, k);
          for (int64_t o = 0; o < outs_; o++)
            add(static_cast<size_t>(o * channels_ * volume(g_.kernel) + column), n * length_,
                grads_.data() + o * length_);
          column++;
        });
      }
    }
    for (size_t i = 0; i < partial_.size(); i++) flush(i);
    sink_.write(whole_.data(), floats_.data(), results, group * results, nullptr, tally);
  }

 private:
  void copy_window(int64_t c, const Triple& k) {
    const Triple steps = planes_.steps();
    const Triple tap{k[0] * g_.dilation[0], k[1] * g_.dilation[1], k[2] * g_.dilation[2]};
    const double* from = planes_.data() + c * planes_.plane() + dot_steps(tap, steps);
    double* to = window_.data();
    for (int64_t i0 = 0; i0 < g_.out_size[0]; i0++) {
      for (int64_t i1 = 0; i1 < g_.out_size[1]; i1++, to += g_.out_size[2]) {
        const double* row = from + i0 * g_.stride[0] * steps[0] + i1 * g_.stride[1] * steps[1];
        for (int64_t i2 = 0; i2 < g_.out_size[2]; i2++) to[i2] = row[i2 * g_.stride[2]];
      }
    }
  }

  // Adds the products of an image, which start at `depth`, to result i.
  void add(size_t i, int64_t depth, const double* grads) {
    for (int64_t done = 0; done < length_;) {
      const int64_t count = std::min(BLOCK - (depth + done) % BLOCK, length_ - done);
      partial_[i] += micro_.dot(grads + done, window_.data() + done, count);
      done += count;
      if ((depth + done) % BLOCK == 0) flush(i);
    }
  }
  void flush(size_t i) {
    whole_[i] += static_cast<int64_t>(partial_[i]);
    floats_[i] += static_cast<float>(partial_[i]);
    partial_[i] = 0;
  }

  const Geometry& g_;
  const int16_t *x_, *grad_;
  const Sink& sink_;
  const Micro& micro_;
  const int64_t channels_, outs_, length_;
  Planes planes_;
  std::vector<double> window_, grads_, partial_;
  std::vector<int64_t> whole_;
  std::vector<float> floats_;
};

}  // namespace

bool convolve_directly(const Geometry& g, int product, const int16_t* a, const int16_t* b, void* c,
                       const Format& format, const Call& call) {
  const int64_t channels = g.channels / g.groups, outs = g.out_channels / g.groups, taps = volume(g.kernel);
  const bool empty = g.batch * volume(g.size) * volume(g.out_size) * channels * outs == 0;
  if (empty || g.groups == 1 || channels * outs > SMALL_GROUP) return false;
  if (product == 2) {
    const Sink sink(call.micro, format, g.batch * even(volume(g.out_size)), c);
    share(g.groups, call, [&] { return std::make_unique<WeightGradient>(g, a, b, sink, call.micro); });
    return true;
  }
  if (taps * even(product == 0 ? channels : outs) > BLOCK) return false;  // rounded more than once
  const Sums sums = product == 0 ? forward_sums(g) : gradient_sums(g);
  const Sink sink(call.micro, format, BLOCK, c);
  share(g.batch * g.groups, call, [&] { return std::make_unique<Correlator>(g, sums, a, b, sink, call); });
  return true;
}

}  // namespace lowp
