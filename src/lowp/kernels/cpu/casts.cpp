// The C functions that lowp/kernels/cpu.py calls: they choose the instruction set and share the work among threads.
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>

#include "bits.hpp"
#include "cast.hpp"
#include "parallel.hpp"

#define LOWP_EXPORT extern "C" __attribute__((visibility("default")))

namespace lowp {
namespace {

constexpr int64_t kStreamBytes = int64_t{1} << 23;  // larger results do not stay in a core's share of the cache

const Kernels* kernels_of(int level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (level == 2 && avx512) return &kAvx512Kernels;
  if (level == 1 && avx2) return &kAvx2Kernels;
#endif
  return level == 0 ? &kPortableKernels : nullptr;
}

const Kernels* best_kernels() {
  for (int level = 2; level > 0; --level)
    if (const Kernels* found = kernels_of(level)) return found;
  return &kPortableKernels;
}

std::atomic<const Kernels*> chosen{nullptr};

const Kernels& kernels() {
  const Kernels* found = chosen.load(std::memory_order_acquire);
  if (found == nullptr) chosen.store(found = best_kernels(), std::memory_order_release);
  return *found;
}

int64_t bytes_of(int type) { return type == kFp64 ? 8 : type == kFp32 ? 4 : 2; }

int enough_threads(int64_t count, int threads) { return count < kSerial ? 1 : threads; }

// Writing around the cache pays only where the output is not also the input, whose lines are there already.
bool streams(const void* in, const void* out, int64_t bytes) { return in != out && bytes >= kStreamBytes; }

// The sum is taken in the order of the blocks, whichever thread has added up which.
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

void merge(const Statistics& part, Statistics* all) {
  for (int bin = 0; bin < 256; ++bin) all->histogram[bin] += part.histogram[bin];
  all->zeros += part.zeros;
  all->nans += part.nans;
  all->infinities += part.infinities;
  if (part.maximum > all->maximum) all->maximum = part.maximum;
}

void merge(const SpectrumSeen& part, SpectrumSeen* all) {
  for (int bin = 0; bin < kSpectrumBins; ++bin) all->bins[bin] += part.bins[bin];
  for (int length = 0; length < kSignificant; ++length) all->significant[length] += part.significant[length];
  for (int exponent = 0; exponent < 256; ++exponent) all->powers[exponent] += part.powers[exponent];
  all->zeros += part.zeros;
  all->nans += part.nans;
  all->infinities += part.infinities;
  all->checksum += part.checksum;
  if (part.maximum > all->maximum) all->maximum = part.maximum;
}

void merge(const Effects& part, Effects* all) {
  all->flushed += part.flushed;
  all->overflowed += part.overflowed;
  all->inexact += part.inexact;
  all->nans += part.nans;
  all->stalled += part.stalled;
}

void merge(const Mantissas& part, Mantissas* all) {
  if (part.maximum > all->maximum) all->maximum = part.maximum;
  all->saturated += part.saturated;
  all->non_finite += part.non_finite;
  all->any |= part.any;
}

void merge(const Grid& part, Grid* all) {
  if (part.maximum > all->maximum) all->maximum = part.maximum;
  if (part.lowest < all->lowest) all->lowest = part.lowest;
}

void merge(const Stepped& part, Stepped* all) {
  merge(part.update, &all->update);
  merge(part.weight, &all->weight);
}

void tell(const Mantissas& seen, int64_t* counts) {
  counts[0] = seen.maximum, counts[1] = seen.saturated, counts[2] = seen.non_finite, counts[3] = seen.any;
}

// Runs work(part, begin, end) in pieces and merges the parts.
template <class Part, class Work>
void gather(int64_t count, int64_t grain, int threads, Part* all, Work work) {
  std::mutex merging;
  parallel_for(count, grain, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    Part part{};
    work(&part, begin, end);
    std::lock_guard<std::mutex> lock(merging);
    merge(part, all);
  });
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// 0 portable, 1 AVX2, 2 AVX-512; -1 the best one that this CPU has. Returns the level in use, or -1 for one it lacks.
LOWP_EXPORT int lowp_casts_select(int level) {
  const Kernels* wanted = level < 0 ? best_kernels() : kernels_of(level);
  if (wanted == nullptr) return -1;
  chosen.store(wanted, std::memory_order_release);
  if (level >= 0) return level;
  for (level = 2; level > 0; --level)
    if (kernels_of(level) == wanted) break;
  return level;
}

// `index` is that of the first element in a tensor that x is a piece of: it decides which random words are drawn.
LOWP_EXPORT void lowp_quantize(const lowp_cast* cast, int type, const void* x, void* out, int64_t count, uint64_t seed,
                               int64_t index, int threads) {
  // Between two blocks of random numbers the memory has time to spare: there ordinary stores are faster.
  const bool stream = !draws(cast->rounding) && streams(x, out, count * bytes_of(type));
  const Task task{cast, x, out, type, type, seed, stream, index};
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.quantize(task, begin, end); });
}

// Returns the number of NaN that have no code.
LOWP_EXPORT int64_t lowp_encode(const lowp_cast* cast, int type, const void* x, int code_bytes, void* out,
                                int64_t count, uint64_t seed, int64_t index, int threads) {
  const Task task{cast, x, out, type, code_bytes, seed, false, index};
  const Kernels& kernel = kernels();
  std::atomic<int64_t> nans{0};
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { nans += kernel.encode(task, begin, end); });
  return nans;
}

LOWP_EXPORT void lowp_decode(const lowp_cast* cast, int code_bytes, const void* codes, int type, void* out,
                             int64_t count, int threads) {
  const Task task{cast, codes, out, code_bytes, type, 0, streams(codes, out, count * bytes_of(type))};
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.decode(task, begin, end); });
}

// x has rows of `row` elements; each `group` of a row has a scale and, unless null, a zero point.
LOWP_EXPORT void lowp_quantize_scaled(const lowp_cast* cast, int type, const void* x, void* out, int64_t count,
                                      int64_t row, int64_t group, const double* scale, const int32_t* zero_point,
                                      uint64_t seed, int64_t index, int threads) {
  const Task task{cast, x, out, type, type, seed, streams(x, out, count * bytes_of(type)), index};
  const Scales scales{scale, zero_point, row, group};
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.quantize_scaled(task, scales, begin, end); });
}

// counts: largest |mantissa|, saturated, non-finite, any that was not zero. `out` takes the mantissas, `values` what they stand for, and may
// be x; either may be null.
LOWP_EXPORT void lowp_write_int16(const lowp_cast* cast, int type, const void* x, int exponent, void* out,
                                  float* values, int64_t count, uint64_t seed, int threads, int64_t* counts) {
  const Task task{cast, x, out, type, 0, seed, false};
  const Kernels& kernel = kernels();
  Mantissas all{};
  gather(count, kBlock, threads, &all, [&](Mantissas* part, int64_t begin, int64_t end) {
    kernel.to_int16(task, exponent, values, part, begin, end);
  });
  tell(all, counts);
}

LOWP_EXPORT void lowp_sum_int16(const int16_t* mantissas, int64_t outer, int64_t channels, int64_t inner, int64_t* out,
                                int threads) {
  const Kernels& kernel = kernels();
  parallel_for(channels, inner == 1 ? 64 : 1, enough_threads(outer * channels * inner, threads),
               [&](int64_t begin, int64_t end) {
                 kernel.sum_int16(mantissas, outer, channels, inner, out, begin, end);
               });
}

LOWP_EXPORT void lowp_from_int16(const int16_t* mantissas, int exponent, float* out, int64_t count, int threads) {
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.from_int16(mantissas, exponent, out, begin, end); });
}

// found: the bits of the largest |x|; with `lowest`, the biased exponent of the lowest bit (1000 of zeros), and then
// the largest |x| may not be seen where no int16 holds the numbers.
LOWP_EXPORT void lowp_grid(const float* x, int64_t count, int lowest, int threads, int64_t* found) {
  const Kernels& kernel = kernels();
  Grid all;
  gather(count, kBlock, threads, &all, [&](Grid* part, int64_t begin, int64_t end) {
    kernel.grid(x, lowest != 0, part, begin, end);
  });
  found[0] = all.maximum, found[1] = all.lowest;
}

// Casts all of x, of fp32, which has to be finite: under a format's own scale, that of the largest magnitude, or without
// one (`scale` null). Returns 0; 1, with nothing written, where x is not finite or its scale is none below the limit.
LOWP_EXPORT int lowp_quantize_finite(const lowp_cast* cast, const lowp_scale* scale, const float* x, float* out,
                                     int64_t count, uint64_t seed, int threads) {
  int64_t found[2];
  lowp_grid(x, count, 0, threads, found);
  constexpr int64_t kInfinity = 0x7f800000, kSmallestNormal = 0x00800000;
  if (found[0] >= kInfinity) return 1;
  if (scale == nullptr) {
    lowp_quantize(cast, kFp32, x, out, count, seed, 0, threads);
    return 0;
  }
  const uint32_t bits = static_cast<uint32_t>(found[0]);
  float number;
  std::memcpy(&number, &bits, sizeof(number));
  // a subnormal, which the thread may be set to take for zero, is its integer
  const double largest = bits < kSmallestNormal ? bits * 0x1p-149 : static_cast<double>(number);
  const double wanted = largest * scale->headroom / scale->maximum;
  if (!(wanted < scale->limit)) return 1;
  const double rounded = static_cast<float>(wanted);
  const double chosen = wanted == 0 ? 1.0 : rounded > scale->smallest ? rounded : scale->smallest;
  lowp_quantize_scaled(cast, kFp32, x, out, count, count, count > 0 ? count : 1, &chosen, nullptr, seed, 0, threads);
  return 0;
}

// Writes x * 2**-exponent and returns the largest |mantissa|; -1 where some x is no int16 under this exponent.
LOWP_EXPORT int64_t lowp_exact_int16(const float* x, int exponent, int16_t* out, int64_t count, int threads) {
  const Kernels& kernel = kernels();
  std::atomic<int64_t> largest{0};
  std::atomic<bool> wrong{false};
  parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    int64_t part = 0;
    if (wrong.load(std::memory_order_relaxed)) return;
    if (!kernel.exact_int16(x, exponent, out, &part, begin, end)) wrong = true;
    for (int64_t seen = largest; part > seen && !largest.compare_exchange_weak(seen, part);) {
    }
  });
  return wrong ? -1 : largest.load();
}

// Whether the mantissas are those of x under this exponent, every one of them: exactly (returns 0), or with `rounded` as
// x is rounded to nearest even and saturated from `lowest` to 32767 (returns the bits of the largest |x|). -1 if not.
// Both lie in rows of `columns` elements, one every `stride` elements.
LOWP_EXPORT int64_t lowp_same_int16(const float* x, const int16_t* mantissas, int64_t rows, int64_t columns,
                                    int64_t stride, int exponent, int rounded, int lowest, int threads) {
  const Kernels& kernel = kernels();
  std::atomic<int64_t> largest{0};
  std::atomic<bool> wrong{false};
  const auto compare = [&](const float* in, const int16_t* kept, int64_t begin, int64_t end) {
    uint32_t part = 0;
    if (wrong.load(std::memory_order_relaxed)) return;
    if (!kernel.same_int16(in, kept, exponent, static_cast<float>(lowest), rounded ? &part : nullptr, begin, end))
      wrong = true;
    for (int64_t seen = largest; part > seen && !largest.compare_exchange_weak(seen, part);) {
    }
  };
  if (rows == 1) {
    parallel_for(columns, kBlock, enough_threads(columns, threads),
                 [&](int64_t begin, int64_t end) { compare(x, mantissas, begin, end); });
  } else {
    parallel_for(rows, 1, enough_threads(rows * columns, threads), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) compare(x + row * stride, mantissas + row * stride, 0, columns);
    });
  }
  return wrong ? -1 : largest.load();
}

// The update of a weight, then the weight, each rounded once; exponents: of the old mantissas, the update, the weight.
// counts: those of lowp_write_int16, of the update and then of the weight.
LOWP_EXPORT void lowp_step_int16(float* weight, int16_t* mantissas, const int* exponents, int lowest, int64_t count,
                                 int threads, int64_t* counts) {
  const Step step{weight, mantissas, exponents[0], exponents[1], exponents[2], lowest};
  const Kernels& kernel = kernels();
  Stepped all{};
  gather(count, kBlock, threads, &all,
         [&](Stepped* part, int64_t begin, int64_t end) { kernel.step_int16(step, part, begin, end); });
  tell(all.update, counts);
  tell(all.weight, counts + 4);
}

// Writes x of fp32 in place as two words, the second `low_bits` lower. Exponents -100 to 100; counts: those of
// lowp_write_int16, of the first word.
LOWP_EXPORT void lowp_words_int16(float* x, int exponent, int low_bits, int lowest, int64_t count, int threads,
                                  int64_t* counts) {
  const Kernels& kernel = kernels();
  Mantissas all{};
  gather(count, kBlock, threads, &all, [&](Mantissas* part, int64_t begin, int64_t end) {
    kernel.words_int16(x, exponent, low_bits, lowest, part, begin, end);
  });
  tell(all, counts);
}

// counts: 256 bins, zeros, NaN, infinities; reals: largest finite |x|, sum of squares. Returns 0, or 1 without memory.
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

// What the profiler records of x / scale: bins are of a 32nd of an octave, the energy is that of the finite numbers. Not
// for fp64. Returns 0, or 1 without memory.
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

// The largest |x| of several fp32 tensors, 0 of none; infinite or NaN where an element is.
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

// What the profiler records of a step of fp32 weights. counts: the joint counts, then those without an update; energy:
// 96 sums of squares of the gradients, added up piece by piece in an order that does not depend on the threads.
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

// lowp_statistics of x, and in counts[259 ..] what the cast does: flushed, overflowed, inexact, stalled. `out` and
// `previous` may be null.
LOWP_EXPORT int lowp_quantize_statistics(const lowp_cast* cast, int type, const void* x, const void* previous,
                                         void* out, int64_t count, uint64_t seed, int threads, int64_t* counts,
                                         double* reals) {
  struct Both {
    Statistics statistics;
    Effects effects;
  };
  const Task task{cast, x, out, type, type, seed, false};
  const Kernels& kernel = kernels();
  const PartialSums partial(count);
  if (partial.sums == nullptr) return 1;
  Statistics all{};
  Effects effects{};
  std::mutex merging;
  parallel_for(count, kSumBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    Both part{};
    kernel.effects(task, previous, &part.statistics, partial.sums, &part.effects, begin, end);
    std::lock_guard<std::mutex> lock(merging);
    merge(part.statistics, &all);
    merge(part.effects, &effects);
  });
  for (int bin = 0; bin < 256; ++bin) counts[bin] = all.histogram[bin];
  counts[256] = all.zeros, counts[257] = all.nans, counts[258] = all.infinities;
  counts[259] = effects.flushed, counts[260] = effects.overflowed;
  counts[261] = effects.inexact, counts[262] = effects.stalled;
  reals[0] = all.maximum, reals[1] = partial.total();
  return 0;
}

// Philox-4x32-10: four words for each counter from (counter, 0, 0) on.
LOWP_EXPORT void lowp_random_words(uint64_t seed, uint64_t counter, int64_t counters, uint32_t* out) {
  kernels().random_words(seed, counter, counters, out);
}

LOWP_EXPORT void lowp_random_block(uint64_t seed, const uint32_t* counter, uint32_t* out) {
  kernels().random_block(seed, counter, out);
}
