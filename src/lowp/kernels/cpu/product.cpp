// Programs of casts and of matrix products with sums in fp32: the division of a result into units, and the C function.
#include "product.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
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
constexpr int64_t kKept = int64_t{64} << 20;  // bytes of a program's own memory that a thread keeps at most

// Memory for packed panels, which a thread keeps: fresh memory costs more than the packing. Huge pages, where there are
// any: the panels of a unit take more pages of 4 KiB than a core caches addresses of.
class Memory {
 public:
  ~Memory() { free(); }
  void free() {
    free_aligned(data_);
    data_ = nullptr;
    size_ = 0;
  }
  float* get(int64_t floats) {
    constexpr size_t kPage = size_t{2} << 20;
    const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
    if (bytes <= size_) return data_;
    free();
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

// Ends at an infinity or a NaN among numbers that share scales. `entry`: none, or the scale of all numbers, from earlier steps,
// and after it the largest magnitude of this step, infinite where one was, and whether anything was met.
Ended round(const lowp_rounding& step, const void* x, double* entry, void* out, uint64_t seed, int threads) {
  if (entry != nullptr) {
    double largest = 0;
    const bool finite = lowp_quantize_measured(step.sharing, static_cast<int>(step.type), x, out, step.count, entry[0], &largest,
                                               seed, 0, threads) != 0;
    entry[1] = std::max(entry[1], finite ? largest : std::numeric_limits<double>::infinity());
    entry[2] = 1;
    return finite ? kWhole : kInfinite;
  }
  if (step.sharing != nullptr)
    return lowp_quantize_groups(step.sharing, static_cast<int>(step.type), x, kFp32, out, step.count, step.row, step.group,
                                step.inner, step.across, nullptr, nullptr, seed, 0, threads) == 0
               ? kWhole
               : kInfinite;
  lowp_quantize(step.cast, static_cast<int>(step.type), x, static_cast<int>(step.out_type), out, step.count, seed, 0, 1, threads);
  return kWhole;
}

// -1 where the lowest bit of a number's random word is set, else 1.
void draw_signs(int64_t size, uint64_t seed, float* signs) {
  uint32_t words[256 + 4];
  kernels().random_words(seed, 0, (size + 3) / 4, words);
  for (int64_t i = 0; i < size; ++i) signs[i] = words[i] & 1 ? -1.0f : 1.0f;
}

Ended rotate(const lowp_rotation& step, const void* x, const float* signs, float* out, int threads) {
  const Kernels& kernel = kernels();
  const Rotation rotation{x, out, signs, step.type, step.size, step.length, step.inner};
  const int64_t parts = step.inner > 1 ? parts_of(step.inner, kRotated / step.size) * parts_of(step.length, step.size)
                                       : parts_of(step.length, kRotated);
  std::atomic<bool> finite{true};
  parallel_for(step.count / (step.length * step.inner) * parts, 1, enough_threads(step.count, threads),
               [&](int64_t begin, int64_t end) {
                 if (!kernel.rotate(rotation, begin, end)) finite = false;
               });
  return finite ? kWhole : kInfinite;
}

}  // namespace
}  // namespace lowp

// Runs steps, see product.hpp, one after the other. The places of a step are: of a product its left and right operand, its
// bias (fp32, or none) and its result; of a cast what it reads, the entry of its scale or none, and fourth what it writes; of codes the matrix, the factors
// of its columns or none, and fourth and fifth codes and scales; of a product of codes left, right, bias, result, and the
// scales of both, the latter or none; of signs fourth what is written; of a rotation what is read, signs, and fourth what is
// written. Its seeds are those of left, right and result, or of the one cast. Returns 0; 1 if the
// program ended at an infinity or a NaN; 2 if memory ran out.
LOWP_EXPORT int lowp_program(const lowp_steps* program, const int64_t* addresses, const uint64_t* seeds, int threads) {
  using namespace lowp;
  static thread_local Memory memory;
  Ended ended = kWhole;
  try {
    char* const own = program->own == 0 ? nullptr : reinterpret_cast<char*>(memory.get((program->own + 3) / 4));
    for (int64_t i = 0; i < program->count && ended == kWhole; ++i) {
      const lowp_step& step = program->steps[i];
      const auto at = [&](int which) -> void* {
        const int64_t place = step.places[which];
        return place >= 0 ? reinterpret_cast<void*>(addresses[place]) : place == -1 ? nullptr : own + (-2 - place);
      };
      const auto seed = [&](int which) { return step.seeds[which] < 0 ? 0 : seeds[step.seeds[which]]; };
      const auto numbers = [&](int which) { return static_cast<float*>(at(which)); };
      const auto codes = [&](int which) { return static_cast<int8_t*>(at(which)); };
      switch (step.kind) {
        case kRounding:
          ended = round(step.rounding, at(0), static_cast<double*>(at(1)), at(3), seed(0), threads);
          break;
        case kProduct:
          ended = run({step.product, at(0), at(1), numbers(2), at(3), seed(0), seed(1), seed(2), kernels().read_lines}, threads);
          break;
        case kCodes:
          ended = encode(step.codes, numbers(0), numbers(1), codes(3), numbers(4), seed(0), threads);
          break;
        case kBytes:
          ended = multiply(step.bytes, codes(0), codes(1), numbers(4), numbers(5), numbers(2), numbers(3), threads);
          break;
        case kSigns:
          draw_signs(step.rotation.size, seed(0), numbers(3));
          break;
        case kRotation:
          ended = rotate(step.rotation, at(0), numbers(1), numbers(3), threads);
          break;
      }
    }
  } catch (const std::bad_alloc&) {
    ended = kNoMemory;
  }
  if (program->own > kKept) memory.free();
  return ended;
}
