// The C functions of int16 mantissas under one power of two, called by lowp/kernels/int16/mantissas.py.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "calls.hpp"

namespace lowp {

static void merge(const Grid& part, Grid* all) {
  if (part.maximum > all->maximum) all->maximum = part.maximum;
  if (part.lowest < all->lowest) all->lowest = part.lowest;
}

static void merge(const Stepped& part, Stepped* all) {
  merge(part.update, &all->update);
  merge(part.weight, &all->weight);
}

}  // namespace lowp

using namespace lowp;

// counts: largest |mantissa|, saturated, non-finite, any that was not zero. `out` receives the mantissas and `values` their
// values, which may overwrite x; either may be null.
LOWP_EXPORT void lowp_write_int16(const lowp_cast* cast, int type, const void* x, const int32_t* exponent, void* out,
                                  float* values, int64_t count, uint64_t seed, int threads, int64_t* counts) {
  const Task task{cast, x, out, type, 0, seed, false};
  const Kernels& kernel = kernels();
  Mantissas all{};
  gather(count, kBlock, threads, &all, [&](Mantissas* part, int64_t begin, int64_t end) {
    kernel.to_int16(task, *exponent, values, part, begin, end);
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

LOWP_EXPORT void lowp_from_int16(const int16_t* mantissas, const int32_t* exponent, float* out, int64_t count,
                                 int threads) {
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.from_int16(mantissas, *exponent, out, begin, end); });
}

namespace lowp {

// The bits of the largest |x|; with `lowest` also the biased exponent of the lowest bit (1000 for zeros), and then the
// largest |x| may be wrong if int16 cannot represent the numbers.
static Grid grid_of(const float* x, int64_t count, bool lowest, int threads) {
  const Kernels& kernel = kernels();
  Grid all;
  gather(count, kBlock, threads, &all, [&](Grid* part, int64_t begin, int64_t end) {
    kernel.grid(x, lowest, part, begin, end);
  });
  return all;
}

// The exponent of a tensor's maximum: that of its leading bit plus `offset`, from `lowest` to `highest`, and 0 for zeros.
static int32_t own_exponent(const Grid& grid, int offset, int lowest, int highest) {
  if (grid.maximum >= kInfiniteBits) return kNoExponent;
  if (grid.maximum == 0) return 0;
  int exponent;
  std::frexp(magnitude(static_cast<uint32_t>(grid.maximum)), &exponent);
  return std::min(std::max(exponent - 1 + offset, lowest), highest);
}

// Whether x, which may begin at any byte, has this number.
static bool has(const float* x, int64_t count, double number) {
  for (int64_t i = 0; i < count; ++i) {
    float one;
    std::memcpy(&one, x + i, sizeof one);
    if (one == number) return true;
  }
  return false;
}

}  // namespace lowp

// Writes x, fp32, as mantissas under its own exponent to `out`, if that is not null. Returns whether x is finite; if not,
// the exponent is kNoExponent, and nothing else is written.
LOWP_EXPORT int lowp_current_int16(const lowp_cast* cast, const float* x, int offset, int lowest, int highest, void* out,
                                   int64_t count, uint64_t seed, int threads, int32_t* exponent) {
  int64_t counts[4];
  *exponent = own_exponent(grid_of(x, count, false, threads), offset, lowest, highest);
  if (*exponent == kNoExponent) return 0;
  if (out) lowp_write_int16(cast, kFp32, x, exponent, out, nullptr, count, seed, threads, counts);
  return 1;
}

// Whether all of x is a mantissa under the exponent of its own maximum, which is told. 2**15 units, under the largest
// exponent, are the mantissa -32768, if all of them are negative.
LOWP_EXPORT int lowp_is_exact_int16(const lowp_cast* cast, const float* x, int offset, int lowest, int highest,
                                    int64_t count, int threads, int32_t* exponent) {
  constexpr int kOfZeros = 1000, kBias = 127;
  const Grid grid = grid_of(x, count, true, threads);
  *exponent = own_exponent(grid, offset, lowest, highest);
  if (*exponent == kNoExponent) return 0;
  if (grid.lowest == kOfZeros) return 1;
  const int bit = static_cast<int>(grid.lowest) - kBias;
  if (*exponent > bit || bit <= -kBias) return 0;
  const double units = std::ldexp(magnitude(static_cast<uint32_t>(grid.maximum)), -*exponent);
  return units <= 32767 || (units <= -cast->minimum && !has(x, count, std::ldexp(units, *exponent)));
}

// Writes x * 2**-exponent and returns the largest |mantissa|; -1 if an x is not an int16 under this exponent, or if that
// is not near.
LOWP_EXPORT int64_t lowp_exact_int16(const float* x, const int32_t* exponent, int16_t* out, int64_t count, int threads) {
  if (!is_near(*exponent)) return -1;
  const Kernels& kernel = kernels();
  std::atomic<int64_t> largest{0};
  std::atomic<bool> wrong{false};
  parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    int64_t part = 0;
    if (wrong.load(std::memory_order_relaxed)) return;
    if (!kernel.exact_int16(x, *exponent, out, &part, begin, end)) wrong = true;
    for (int64_t seen = largest; part > seen && !largest.compare_exchange_weak(seen, part);) {
    }
  });
  return wrong ? -1 : largest.load();
}

// Whether all mantissas are those of x under this exponent: exactly (returns 0), or with `rounded` those of x rounded to
// nearest even and saturated from `lowest` to 32767 (returns the bits of the largest |x|). Returns -1 if not, and -2 under
// an exponent that is not near. Both are rows of `columns` elements, one every `stride` elements.
LOWP_EXPORT int64_t lowp_same_int16(const float* x, const int16_t* mantissas, int64_t rows, int64_t columns,
                                    int64_t stride, const int32_t* exponent, int rounded, int lowest, int threads) {
  if (!is_near(*exponent)) return -2;
  const Kernels& kernel = kernels();
  std::atomic<int64_t> largest{0};
  std::atomic<bool> wrong{false};
  const auto compare = [&](const float* in, const int16_t* kept, int64_t begin, int64_t end) {
    uint32_t part = 0;
    if (wrong.load(std::memory_order_relaxed)) return;
    if (!kernel.same_int16(in, kept, *exponent, static_cast<float>(lowest), rounded ? &part : nullptr, begin, end))
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
void lowp::write_step(float* weight, int16_t* mantissas, const int* exponents, int lowest, int64_t count, int threads,
                      int64_t* counts) {
  const Step step{weight, mantissas, exponents[0], exponents[1], exponents[2], lowest};
  const Kernels& kernel = kernels();
  Stepped all{};
  gather(count, kBlock, threads, &all,
         [&](Stepped* part, int64_t begin, int64_t end) { kernel.step_int16(step, part, begin, end); });
  tell(all.update, counts);
  tell(all.weight, counts + 4);
}

// The same, exactly, of many tensors. given: x, mantissas, rows, columns, stride, exponent. found: 0 if the mantissas are
// exactly those of x, otherwise a negative number.
LOWP_EXPORT void lowp_same_int16_list(const int64_t* given, int64_t count, int threads, int64_t* found) {
  const auto at = [&](int place) { return static_cast<uintptr_t>(given[place]); };
  for (int64_t i = 0; i < count; ++i, given += 6)
    found[i] = lowp_same_int16(reinterpret_cast<float*>(at(0)), reinterpret_cast<int16_t*>(at(1)), given[2], given[3],
                               given[4], reinterpret_cast<int32_t*>(at(5)), 0, 0, threads);
}
