// The C functions for statistics of tensors and of steps, called by lowp/kernels/cpu/__init__.py and spectra.py.
#include <cstring>
#include <mutex>
#include <new>

#include "bits.hpp"
#include "calls.hpp"

namespace lowp {
namespace {

// The sum is taken in the order of the blocks, independent of the threads that summed them.
struct PartialSums {
  explicit PartialSums(int64_t count)
      : blocks((count + kSumBlock - 1) / kSumBlock), sums(blocks <= 64 ? here : new (std::nothrow) double[blocks]) {}
  ~PartialSums() {
    if (sums != here) delete[] sums;
  }
  PartialSums(const PartialSums&) = delete;
  PartialSums& operator=(const PartialSums&) = delete;

  double total() const {
    double sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += sums[block];
    return sum;
  }

  int64_t blocks;
  double here[64];
  double* sums;
};

}  // namespace

static void merge(const Statistics& part, Statistics* all) {
  for (int bin = 0; bin < 256; ++bin) all->histogram[bin] += part.histogram[bin];
  all->zeros += part.zeros;
  all->nans += part.nans;
  all->infinities += part.infinities;
  if (part.maximum > all->maximum) all->maximum = part.maximum;
}

static void merge(const SpectrumSeen& part, SpectrumSeen* all) {
  for (int bin = 0; bin < kSpectrumBins; ++bin) all->bins[bin] += part.bins[bin];
  for (int length = 0; length < kSignificant; ++length) all->significant[length] += part.significant[length];
  for (int exponent = 0; exponent < 256; ++exponent) all->powers[exponent] += part.powers[exponent];
  all->zeros += part.zeros;
  all->nans += part.nans;
  all->infinities += part.infinities;
  all->checksum += part.checksum;
  if (part.maximum > all->maximum) all->maximum = part.maximum;
}

}  // namespace lowp

using namespace lowp;

// counts: 256 bins, zeros, NaN, infinities; reals: largest finite |x|, sum of squares. Returns 0, or 1 if memory runs out.
LOWP_EXPORT int lowp_statistics(int type, const void* x, int64_t count, int threads, int64_t* counts, double* reals) {
  const Task task{nullptr, x, nullptr, type, type, 0, false};
  const Kernels& kernel = kernels();
  const PartialSums partial(count);
  if (partial.sums == nullptr) return 1;
  Statistics all{};
  gather(count, kSumBlock, threads, &all, [&](Statistics* part, int64_t begin, int64_t end) {
    kernel.statistics(task, part, partial.sums, begin, end);
  });
  for (int bin = 0; bin < 256; ++bin) counts[bin] = all.histogram[bin];
  counts[256] = all.zeros, counts[257] = all.nans, counts[258] = all.infinities;
  reals[0] = all.maximum, reals[1] = partial.total();
  return 0;
}

// The profiler's counts of x / scale: a bin is a 32nd of an octave, the energy is that of the finite numbers. Not for fp64.
// Returns 0, or 1 if memory runs out.
LOWP_EXPORT int lowp_spectrum(int type, const void* x, int64_t count, double scale, int threads, void* seen) {
  const Task task{nullptr, x, nullptr, type, type, 0, false};
  const Kernels& kernel = kernels();
  const PartialSums partial(count);
  if (partial.sums == nullptr) return 1;
  SpectrumSeen* const all = static_cast<SpectrumSeen*>(seen);
  std::memset(all, 0, sizeof *all);
  if (enough_threads(count, threads) == 1) {
    kernel.spectrum(task, static_cast<float>(scale), all, partial.sums, 0, count);
  } else {
    gather(count, kSumBlock, threads, all, [&](SpectrumSeen* part, int64_t begin, int64_t end) {
      kernel.spectrum(task, static_cast<float>(scale), part, partial.sums, begin, end);
    });
  }
  all->bins[0] -= all->zeros, all->significant[1] -= all->zeros, all->powers[0] = 0;
  all->sum_squares = partial.total();
  return 0;
}

// The largest |x| of several fp32 tensors, 0 without elements; infinite or NaN if an element is.
LOWP_EXPORT float lowp_largest(const float* const* tensors, const int64_t* counts, int64_t number, int threads) {
  const Kernels& kernel = kernels();
  int32_t most = 0;
  for (int64_t place = 0; place < number; ++place) {
    const float* const x = tensors[place];
    std::mutex merging;
    parallel_for(counts[place], kBlock, enough_threads(counts[place], threads), [&](int64_t begin, int64_t end) {
      const int32_t found = kernel.largest(x + begin, end - begin);
      std::lock_guard<std::mutex> lock(merging);
      if (found > most) most = found;
    });
  }
  return lowp::bit_cast<float>(most);
}

// Some numbers of each of several tensors, as they are stored in `bytes`: every steps[t]-th of counts[t], counted round its
// end; zeros of a tensor without any. The places of one are far apart, so that what is read next is asked for before.
LOWP_EXPORT void lowp_take(int64_t bytes, const char* const* tensors, const int64_t* counts, const int64_t* steps,
                           int64_t number, int64_t each, char* out) {
  constexpr int64_t kAsked = 16;
  for (int64_t tensor = 0; tensor < number; ++tensor, out += each * bytes) {
    const char* const x = tensors[tensor];
    const int64_t count = counts[tensor], step = steps[tensor];
    if (count == 0) std::memset(out, 0, static_cast<size_t>(each * bytes));
    int64_t ahead = count ? kAsked * step % count : 0;
    for (int64_t i = 0, place = 0; count && i < each; ++i) {
      __builtin_prefetch(x + ahead * bytes);
      if (bytes == 4) std::memcpy(out + i * 4, x + place * 4, 4);
      else std::memcpy(out + i * bytes, x + place * bytes, static_cast<size_t>(bytes));
      place = place + step < count ? place + step : place + step - count;
      ahead = ahead + step < count ? ahead + step : ahead + step - count;
    }
  }
}

// The profiler's counts of a step of fp32 weights. counts: the joint counts, then weights without an update; energy: 96
// sums of squares of the gradients, added in an order that does not depend on the threads.
LOWP_EXPORT void lowp_updates(const float* weight, const float* update, const float* gradient, int64_t count,
                              int threads, int64_t* counts, double* energy) {
  constexpr int kPieces = 16;
  const Update given{weight, update, gradient};
  const Kernels& kernel = kernels();
  const int64_t piece = (count + kPieces - 1) / kPieces;
  double sums[kPieces][kUpdateRows] = {};
  std::mutex merging;
  std::memset(counts, 0, sizeof(int64_t) * (kUpdateCells + 1));
  const auto count_pieces = [&](UpdatesSeen* seen, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t begin = i * piece < count ? i * piece : count;
      kernel.updates(given, seen, sums[i], begin, begin + piece < count ? begin + piece : count);
    }
  };
  const int used = enough_threads(count, threads);
  static_assert(sizeof(UpdatesSeen) == sizeof(int64_t) * (kUpdateCells + 1), "counts are laid out as UpdatesSeen");
  if (used == 1) count_pieces(reinterpret_cast<UpdatesSeen*>(counts), 0, kPieces);
  if (used > 1) parallel_for(kPieces, 1, used, [&](int64_t from, int64_t to) {
    UpdatesSeen own{};
    count_pieces(&own, from, to);
    std::lock_guard<std::mutex> lock(merging);
    for (int cell = 0; cell < kUpdateCells; ++cell) counts[cell] += own.joint[cell];
    counts[kUpdateCells] += own.none;
  });
  for (int row = 0; row < kUpdateRows; ++row) {
    energy[row] = 0;
    for (int i = 0; i < kPieces; ++i) energy[row] += sums[i][row];
  }
}
