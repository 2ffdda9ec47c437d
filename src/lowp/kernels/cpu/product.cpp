// Programs of casts and of matrix products with sums in fp32: the division of a result into units, and the C function.
#include "product.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "calls.hpp"
#include "levels.hpp"
#include "memory.hpp"

namespace lowp {
namespace {

constexpr int64_t kUnitSide = 512;          // rows and columns of a unit at most
constexpr int64_t kSerialProducts = 1 << 16;  // fewer multiplications run on one thread

// Memory for packed panels, which a thread keeps: fresh memory costs more than the packing. Huge pages, where there are
// any: the panels of a unit take more pages of 4 KiB than a core caches addresses of.
class Memory {
 public:
  ~Memory() { free_aligned(data_); }
  float* get(int64_t floats) {
    constexpr size_t kPage = size_t{2} << 20;
    const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
    if (bytes <= size_) return data_;
    free_aligned(data_);
    data_ = nullptr;
    size_ = 0;
    const size_t whole = bytes <= kPage / 8 ? (bytes + 4095) & ~size_t{4095} : (bytes + kPage - 1) / kPage * kPage;
    data_ = static_cast<float*>(allocate_aligned(whole < kPage ? 4096 : kPage, whole));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (whole >= kPage) madvise(data_, whole, MADV_HUGEPAGE);
#endif
    size_ = whole;
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

const Multiplier& multiplier() {
#if defined(__x86_64__)
  if (&kernels() == &kAvx512Kernels) return kAvx512Multiplier;
  if (&kernels() == &kAvx2Kernels) return kAvx2Multiplier;
#endif
  return kPortableMultiplier;
}

int64_t parts_of(int64_t count, int64_t most) { return (count + most - 1) / most; }

// The whole panels of part `index` of `parts`.
int64_t begin_of(int64_t count, int64_t width, int64_t parts, int64_t index) {
  return std::min(count, parts_of(count, width) * index / parts * width);
}

// Into how many parts the rows and the columns of a matrix are cut: into units that fit the cache, and as many as keep all
// threads busy. The larger side is cut, since each part of one side packs all of the other.
struct Cuts {
  int64_t rows, columns;
};

Cuts grid_of(const lowp_plan& plan, const Multiplier& by, int threads) {
  Cuts grid{parts_of(plan.rows, kUnitSide), parts_of(plan.columns, kUnitSide)};
  const int64_t matrices = plan.batch[0] * plan.batch[1];
  while (matrices * grid.rows * grid.columns % threads != 0 && matrices * grid.rows * grid.columns < 8 * threads) {
    const bool has_rows = plan.rows > grid.rows * by.rows, has_columns = plan.columns > grid.columns * by.columns;
    if (!has_rows && !has_columns) break;
    const bool cuts_rows = !has_columns || (has_rows && plan.rows / grid.rows >= plan.columns / grid.columns);
    ++(cuts_rows ? grid.rows : grid.columns);
  }
  return grid;
}

Unit unit_of(const lowp_plan& plan, const Multiplier& by, const Cuts& grid, int64_t index) {
  const int64_t row = index % grid.rows, column = index / grid.rows % grid.columns;
  const int64_t matrix = index / grid.rows / grid.columns;
  const int64_t r0 = begin_of(plan.rows, by.rows, grid.rows, row), r1 = begin_of(plan.rows, by.rows, grid.rows, row + 1);
  const int64_t c0 = begin_of(plan.columns, by.columns, grid.columns, column);
  const int64_t c1 = begin_of(plan.columns, by.columns, grid.columns, column + 1);
  return {{matrix / plan.batch[1], matrix % plan.batch[1]}, r0, r1 - r0, c0, c1 - c0};
}

Ended run(const Product& product, int threads) {
  const lowp_plan& plan = product.plan;
  const int64_t matrices = plan.batch[0] * plan.batch[1], size = matrices * plan.rows * plan.columns;
  if (size == 0) return kWhole;
  const Multiplier& by = multiplier();
  if (size * plan.depth < kSerialProducts) threads = 1;
  const Cuts grid = grid_of(plan, by, std::max(1, threads));
  const int64_t units = matrices * grid.rows * grid.columns;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&](int64_t, int64_t) noexcept {
    static thread_local Memory memory;
    try {
      for (int64_t i = next++; i < units; i = next++) {
        const Unit unit = unit_of(plan, by, grid, i);
        if (unit.rows > 0 && unit.columns > 0) by.run(product, unit, memory.get(by.floats(unit, plan.depth)));
      }
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  parallel_for(std::min<int64_t>(threads, units), 1, threads, work);
  return failed ? kNoMemory : kWhole;
}

// Ends at an infinity or a NaN among numbers that share scales.
Ended round(const lowp_rounding& step, const void* x, void* out, uint64_t seed, int threads) {
  if (step.sharing != nullptr)
    return lowp_quantize_groups(step.sharing, kFp32, x, out, step.count, step.row, step.group, step.inner, nullptr, nullptr,
                                seed, 0, threads) == 0
               ? kWhole
               : kInfinite;
  lowp_quantize(step.cast, static_cast<int>(step.type), x, static_cast<int>(step.out_type), out, step.count, seed, 0, 1, threads);
  return kWhole;
}

}  // namespace
}  // namespace lowp

// Runs `count` steps, see product.hpp, one after the other. `memory`, six addresses a step: of a product its left and right
// operand, its bias (fp32, or null) and its result; of a cast what it reads, and fourth what it writes; of codes the matrix,
// the factors of its columns or null, and fourth and fifth codes and scales; of a product of codes left, right, bias, result,
// and the scales of both, the latter or null. `seeds`, three a step, are those of stochastic casts: of left, right and
// result, or of the one cast. Returns 0; 1 if the program ended at an infinity or a NaN; 2 if memory ran out.
LOWP_EXPORT int lowp_program(const lowp_step* steps, int count, const int64_t* memory, const uint64_t* seeds, int threads) {
  using namespace lowp;
  Ended ended = kWhole;
  for (int i = 0; i < count && ended == kWhole; ++i, memory += 6, seeds += 3) {
    const auto at = [&](int place) { return reinterpret_cast<void*>(memory[place]); };
    const auto numbers = [&](int place) { return static_cast<float*>(at(place)); };
    const auto codes = [&](int place) { return static_cast<int8_t*>(at(place)); };
    switch (steps[i].kind) {
      case kRounding:
        ended = round(steps[i].rounding, at(0), at(3), seeds[0], threads);
        break;
      case kProduct:
        ended = run({steps[i].product, at(0), at(1), numbers(2), at(3), seeds[0], seeds[1], seeds[2], kernels().read_lines}, threads);
        break;
      case kCodes:
        ended = encode(steps[i].codes, numbers(0), numbers(1), codes(3), numbers(4), seeds[0], threads);
        break;
      case kBytes:
        ended = multiply(steps[i].bytes, codes(0), codes(1), numbers(4), numbers(5), numbers(2), numbers(3), threads);
        break;
    }
  }
  return ended;
}
