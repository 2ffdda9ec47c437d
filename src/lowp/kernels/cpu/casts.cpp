// The C functions of casts, which lowp/kernels/cpu/__init__.py calls: they choose the instruction set and share the work among
// threads.
#include <atomic>

#include "calls.hpp"
#include "levels.hpp"

namespace lowp {
namespace {

const Kernels* kernels_of(int level) {
#if defined(__x86_64__)
  static const Kernels* const all[] = {&kPortableKernels, &kAvx2Kernels, &kAvx512Kernels};
  if (level >= 0 && level <= best_level()) return all[level];
  return nullptr;
#else
  return level == kPortable ? &kPortableKernels : nullptr;
#endif
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* found = chosen.load(std::memory_order_acquire);
  if (found == nullptr) chosen.store(found = kernels_of(best_level()), std::memory_order_release);
  return *found;
}

}  // namespace lowp

using namespace lowp;

// 0 portable, 1 AVX2, 2 AVX-512; -1 the best of this CPU. Returns the level in use, or -1 for one that the CPU lacks.
LOWP_EXPORT int lowp_casts_select(int level) {
  if (level < 0) level = best_level();
  const Kernels* wanted = kernels_of(level);
  if (wanted == nullptr) return -1;
  chosen.store(wanted, std::memory_order_release);
  return level;
}

// `index`: of x's first element in the tensor of which x is a part; it determines the random words. `keeps`: infinities and
// NaN stay, whatever the cast makes of them.
LOWP_EXPORT void lowp_quantize(const lowp_cast* cast, int type, const void* x, int out_type, void* out, int64_t count,
                               uint64_t seed, int64_t index, int keeps, int threads) {
  // Stochastic rounding is not bound by memory: ordinary stores are faster.
  const bool stream = !draws(cast->rounding) && streams(x, out, count * bytes_of(out_type));
  const Task task{cast, x, out, type, out_type, seed, stream, index, keeps != 0};
  const Kernels& kernel = kernels();
  expect_writes(out, count * bytes_of(out_type));
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.quantize(task, begin, end); });
}

// Returns the number of NaNs without a code.
LOWP_EXPORT int64_t lowp_encode(const lowp_cast* cast, int type, const void* x, int code_bytes, void* out,
                                int64_t count, uint64_t seed, int64_t index, int threads) {
  const Task task{cast, x, out, type, code_bytes, seed, false, index};
  const Kernels& kernel = kernels();
  expect_writes(out, count * code_bytes);
  std::atomic<int64_t> nans{0};
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { nans += kernel.encode(task, begin, end); });
  return nans;
}

LOWP_EXPORT void lowp_decode(const lowp_cast* cast, int code_bytes, const void* codes, int type, void* out,
                             int64_t count, int threads) {
  const Task task{cast, codes, out, code_bytes, type, 0, streams(codes, out, count * bytes_of(type))};
  const Kernels& kernel = kernels();
  expect_writes(out, count * bytes_of(type));
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.decode(task, begin, end); });
}

// Philox-4x32-10: four words for each counter from (counter, 0, 0) on.
LOWP_EXPORT void lowp_random_words(uint64_t seed, uint64_t counter, int64_t counters, uint32_t* out) {
  kernels().random_words(seed, counter, counters, out);
}

LOWP_EXPORT void lowp_random_block(uint64_t seed, const uint32_t* counter, uint32_t* out) {
  kernels().random_block(seed, counter, out);
}
