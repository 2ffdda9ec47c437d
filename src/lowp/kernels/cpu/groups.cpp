// The C functions of casts whose numbers share scales, called by lowp/kernels/cpu/__init__.py. Returned where a 16-bit tensor is
// written: kLost if it cannot hold a value under a power of two. All return -1 if memory runs out.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <new>

#include "calls.hpp"
#include "product.hpp"

namespace lowp {
namespace {

constexpr int64_t kLong = 16 * 1024;  // longer groups are read twice: first for their scales, by all threads

int64_t groups_of_row(const Groups& groups) { return (groups.row + groups.group - 1) / groups.group; }

// Where a group begins, or the end of the last.
int64_t start(const Groups& groups, int64_t group) {
  const int64_t of_row = groups_of_row(groups);
  return group / of_row * groups.row + group % of_row * groups.group;
}

// The largest numbers of groups begin .. end of a whole tensor.
void find(const Task& task, const Groups& groups, int64_t count, int threads, double* found) {
  const Kernels& kernel = kernels();
  std::mutex merging;
  parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end;) {
      const int64_t row = first / groups.row, column = first % groups.row, group = column / groups.group;
      const int64_t last = std::min({(group + 1) * groups.group, groups.row, end - first + column}) - column + first;
      const double part = kernel.find_largest(task, first, last);
      std::lock_guard<std::mutex> lock(merging);
      double& all = found[row * groups_of_row(groups) + group];
      const double most = std::max(std::fabs(all), std::fabs(part));
      all = std::signbit(all) || std::signbit(part) ? -most : most;
      first = last;
    }
  });
}

// The scale of a whole tensor, if its format has one and scales are to be found.
void find_outer(const Task& task, Groups& groups, int64_t count, int threads) {
  if (groups.sharing->outer.bits == 0 || groups.scale != nullptr) return;
  const Groups all{groups.sharing, count, count, 1, nullptr, nullptr, nullptr, 0, false};
  double largest = 0;
  find(task, all, count, threads, &largest);
  groups.outer = kernels().outer_scale(*groups.sharing, std::fabs(largest));
}

// Rows of numbers `inner` apart that draw: their random words are those of the tensor in which every row lies together.
// Tiles of whole rows are gathered, cast and put back. To fp32; returns as `share`.
int draw_across(const Task& task, const Groups& groups, int64_t count, int threads) {
  constexpr int64_t kTile = 16 * 1024;  // numbers
  const Kernels& kernel = kernels();
  const int64_t row = groups.row, inner = groups.inner, outer = count / (row * inner);
  const int64_t most = std::min({inner, kBlock, std::max<int64_t>(16, kTile / row / 16 * 16)}), tiles = (inner + most - 1) / most;
  std::atomic<int> met{0};
  parallel_for(outer * tiles, 1, enough_threads(count, threads), [&](int64_t begin, int64_t end) noexcept {
    const std::unique_ptr<float[]> tile(new (std::nothrow) float[2 * most * row + kBlock]);
    if (tile == nullptr) met = -1;
    for (int64_t part = begin; part < end && met >= 0; ++part) {
      const int64_t first = part % tiles * most, columns = std::min(most, inner - first);
      const int64_t corner = part / tiles * row * inner + first, index = part / tiles * row * inner + first * row;
      float *const out = static_cast<float*>(task.out) + corner, *const gathered = tile.get(), *const cast = gathered + columns * row;
      float* const line = tile.get() + 2 * most * row;
      for (int64_t k = 0; k < row; ++k) {
        kernel.read_lines({task.in, task.in_type, nullptr, 0, corner + k * inner, 0, 1, columns, 0, 0, false}, line, 0);
        for (int64_t i = 0; i < columns; ++i) gathered[i * row + k] = line[i];
      }
      const Task own{nullptr, gathered, cast, kFp32, kFp32, task.seed, false, task.index + index};
      const Groups rows{groups.sharing, row, groups.group, groups.outer, nullptr, nullptr, nullptr, 0, false};
      met |= kernel.quantize_groups(own, rows, 0, columns * row);
      for (int64_t k = 0; k < row; ++k)
        for (int64_t i = 0; i < columns; ++i) out[k * inner + i] = cast[i * row + k];
    }
  });
  return met;
}

// The parts of a tensor, whose scales are known or to be found: work(begin, end). Returns what was met, or -1 if memory runs out.
template <class Work>
int share(const Task& task, Groups& groups, int64_t count, int threads, Work work) {
  const Kernels& kernel = kernels();
  const int used = enough_threads(count, threads);
  std::unique_ptr<double[]> scales;
  find_outer(task, groups, count, threads);
  if (groups.inner > 1) {
    const int64_t columns = std::min(groups.inner, beside(groups)), bands = count / (groups.row * groups.inner) * groups_of_row(groups);
    const int64_t parts = (groups.inner + beside(groups) - 1) / beside(groups);
    parallel_for(bands * parts, std::max<int64_t>(kBlock / (columns * std::min(groups.group, groups.row)), 1), used, work);
    return 0;
  }
  bool finite = true;
  const int64_t number = count / groups.row * groups_of_row(groups);
  if (groups.scale == nullptr && std::min(groups.group, groups.row) > kLong) {
    const std::unique_ptr<double[]> found(new (std::nothrow) double[number]());
    scales.reset(new (std::nothrow) double[number]);
    if (found == nullptr || scales == nullptr) return -1;
    find(task, groups, count, threads, found.get());
    for (int64_t group = 0; group < number; group += kBlock)
      kernel.choose_scales(groups, group, &found[group], std::min(kBlock, number - group), &scales[group]);
    groups.most = 0;
    for (int64_t group = 0; group < number; ++group) {
      finite &= !std::signbit(found[group]);
      groups.most = finite ? std::max(groups.most, found[group]) : HUGE_VAL;
    }
    groups.scale = scales.get();
  }
  if (groups.scale != nullptr) {
    parallel_for(count, kBlock, used, work);
  } else {
    const int64_t length = std::min(groups.group, groups.row);
    parallel_for(number, std::max<int64_t>(kBlock / length, 1), used, [&](int64_t begin, int64_t end) {
      work(start(groups, begin), start(groups, end));
    });
  }
  return finite ? 0 : kNotFinite;
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// x has rows of `row` elements, `group` of which share a scale. `scale`: those of all groups; null: they are found, and an
// infinity or a NaN is told. `inner`: the distance of a row's elements; above one scales must be found, and numbers draw, in
// fp32, as elements of the tensor in which rows lie together, or of x where `across` columns, at most kBeside, share scales.
LOWP_EXPORT int lowp_quantize_groups(const lowp_sharing* sharing, int type, const void* x, int out_type, void* out, int64_t count,
                                     int64_t row, int64_t group, int64_t inner, int64_t across, const double* scale,
                                     const int32_t* zero_point, uint64_t seed, int64_t index, int threads) {
  const bool stream = !draws(sharing->element.rounding) && streams(x, out, count * bytes_of(out_type));
  const Task task{nullptr, x, out, type, out_type, seed, stream, index};
  Groups groups{sharing, row, group, 1, scale, zero_point, nullptr, 0, false, inner, across};
  const Kernels& kernel = kernels();
  expect_writes(out, count * bytes_of(out_type));
  const bool draws_apart = groups.draws_across() && !(groups.has_whole_counters() && index % 4 == 0);
  if (draws_apart || (sharing->corrects && inner > 1 && across == 1)) {
    find_outer(task, groups, count, threads);
    return draw_across(task, groups, count, threads);
  }
  std::atomic<int> met{0};
  const int known = share(task, groups, count, threads, [&](int64_t begin, int64_t end) {
    met |= kernel.quantize_groups(task, groups, begin, end);
  });
  return known < 0 ? known : known | met;
}

// All elements under one scale that is given, in fp32; their largest finite magnitude is found in the same pass. Returns whether
// all are finite.
LOWP_EXPORT int lowp_quantize_measured(const lowp_sharing* sharing, int type, const void* x, void* out, int64_t count, double scale,
                                       double* largest, uint64_t seed, int64_t index, int threads) {
  constexpr int64_t kPart = 8 * kBlock;  // read twice, the second time from a cache
  const Task task{nullptr, x, out, type, kFp32, seed, false, index};
  const Groups groups{sharing, count, count, 1, &scale, nullptr, nullptr, 0, false, 1};
  const Kernels& kernel = kernels();
  std::mutex merging;
  double most = 0;
  bool finite = true;
  parallel_for(count, kPart, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    double own = 0;
    bool known = true;
    for (int64_t first = begin; first < end; first += kPart) {
      const int64_t last = std::min(first + kPart, end);
      const double part = kernel.find_largest(task, first, last);
      own = std::max(own, std::fabs(part));
      known &= !std::signbit(part);
      kernel.quantize_groups(task, groups, first, last);
    }
    std::lock_guard<std::mutex> lock(merging);
    most = std::max(most, own);
    finite &= known;
  });
  *largest = most;
  return finite;
}

// Also writes the scales as they are kept, and that of the whole tensor. Returns the number of NaNs without a code.
LOWP_EXPORT int64_t lowp_encode_groups(const lowp_sharing* sharing, int type, const void* x, void* codes, int packed,
                                       void* stored, int stored_bytes, double* outer, int64_t count, int64_t row,
                                       int64_t group, uint64_t seed, int64_t index, int threads) {
  const Task task{nullptr, x, codes, type, 0, seed, false, index};
  Groups groups{sharing, row, group, 1, nullptr, nullptr, stored, stored_bytes, packed != 0};
  const Kernels& kernel = kernels();
  expect_writes(codes, (count * (packed ? sharing->element.bits : sharing->element.bits > 8 ? 16 : 8) + 7) / 8);
  std::atomic<int64_t> nans{0};
  const int known = share(task, groups, count, threads, [&](int64_t begin, int64_t end) {
    nans += kernel.encode_groups(task, groups, begin, end);
  });
  *outer = groups.outer;
  return known < 0 ? known : nans.load();
}

LOWP_EXPORT int lowp_decode_groups(const lowp_sharing* sharing, const void* codes, int packed, void* stored, int stored_bytes,
                                   double outer, const int32_t* zero_point, int type, void* out, int64_t count,
                                   int64_t row, int64_t group, int threads) {
  const Task task{nullptr, codes, out, 0, type, 0, streams(codes, out, count * bytes_of(type))};
  const Groups groups{sharing, row, group, outer, nullptr, zero_point, stored, stored_bytes, packed != 0};
  const Kernels& kernel = kernels();
  expect_writes(out, count * bytes_of(type));
  std::atomic<bool> lost{false};
  parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    if (kernel.decode_groups(task, groups, begin, end)) lost = true;
  });
  return lost;
}
