// Steps of programs in int8: rows of codes under a scale each, and products of codes, whose sums are integers.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "bytes.hpp"
#include "calls.hpp"
#include "levels.hpp"
#include "product.hpp"

// bytes.cpp, gemm.cpp
LOWP_EXPORT void lowp_bytes_pack(const int8_t* weights, int64_t n, int64_t k, int64_t line, int64_t step, int highest,
                                 int8_t* panels, uint8_t* ways, int32_t* sums, int threads);
LOWP_EXPORT void lowp_bytes_multiply(int level, const uint8_t* a, int64_t m, int64_t depth, const int8_t* panels,
                                     const uint8_t* ways, int64_t n, float row_scale, int zero,
                                     const float* column_scales, const int32_t* column_sums, const float* row_scales,
                                     const float* bias, float* out, int threads);
LOWP_EXPORT int lowp_integer_matmul(const char* forced, const int16_t* a, const int16_t* b, void* c, const int64_t* sizes,
                                    const int64_t* strides, int kind, int exponent, int lowest, const float* bias,
                                    int bias_exponent, int threads, int64_t* seen, double* largest);

namespace lowp {
namespace {

constexpr int64_t kTogether = 16;       // rows that are gathered at a time: 64 bytes of a line of memory
constexpr int64_t kGrain = 32 * 1024;   // numbers of a part for one thread
constexpr int kSums = 2, kZero = 128;   // float32 of gemm.hpp; the byte that is zero

int64_t up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Rows first .. first + count of a matrix, multiplied by the factors of its columns, one after the other.
void gather_rows(const lowp_codes& step, const float* x, const float* factor, int64_t first, int64_t count, float* to) {
  x += first * step.line;
  if (step.step == 1) {
    for (int64_t i = 0; i < count; i++)
      for (int64_t k = 0; k < step.columns; k++)
        to[i * step.columns + k] = factor == nullptr ? x[i * step.line + k] : x[i * step.line + k] * factor[k];
    return;
  }
  for (int64_t k = 0; k < step.columns; k++) {
    const float by = factor == nullptr ? 1.0f : factor[k];
    for (int64_t i = 0; i < count; i++) to[i * step.columns + k] = x[i * step.line + k * step.step] * by;
  }
}

// A vector that a thread keeps, with room for this many numbers.
template <class T>
T* kept(std::vector<T>& memory, int64_t count) {
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(static_cast<size_t>(count));
  return memory.data();
}

// In products of int16, which are faster where the processor has none of bytes.
void multiply_int16(const lowp_bytes& step, const int8_t* left, const int8_t* right, float* out, int threads) {
  static thread_local std::vector<int16_t> wide_left, wide_right;
  const int64_t a_count = step.rows * step.depth, b_count = step.columns * step.depth;
  int16_t *a = kept(wide_left, a_count), *b = kept(wide_right, b_count);
  std::copy(left, left + a_count, a);
  std::copy(right, right + b_count, b);
  const char* name = nullptr;
#if defined(__x86_64__)
  name = &kernels() == &kPortableKernels ? "portable" : "avx2";
#endif
  const int64_t sizes[] = {1, 1, step.rows, step.columns, step.depth};
  const int64_t strides[] = {0, 0, step.depth, 1, 0, 0, step.line, step.step, 0, 0, step.columns};
  int64_t seen[3];
  double largest;
  if (lowp_integer_matmul(name, a, b, out, sizes, strides, kSums, 0, 0, nullptr, 0, threads, seen, &largest) != 0)
    throw std::bad_alloc();
}

#if defined(__x86_64__)
// By unsigned bytes, each of which is 128 above its code.
void multiply_bytes(const lowp_bytes& step, const int8_t* left, const int8_t* right, const float* left_scales,
                    const float* right_scales, const float* bias, float* out, int threads) {
  static thread_local std::vector<int8_t> panels;
  static thread_local std::vector<uint8_t> shifted;
  static thread_local std::vector<int32_t> sums;
  static thread_local std::vector<float> columns;
  const int64_t width = up(step.columns, kPanel), depth = up(step.depth, kEight);
  int8_t* packed = kept(panels, width * depth);
  int32_t* of_columns = kept(sums, width);
  lowp_bytes_pack(right, step.columns, step.depth, step.line, step.step, 0, packed, nullptr, of_columns, threads);
  uint8_t* bytes = kept(shifted, step.rows * depth);
  parallel_for(step.rows, std::max<int64_t>(1, kGrain / depth), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      for (int64_t k = 0; k < step.depth; k++)
        bytes[i * depth + k] = static_cast<uint8_t>(left[i * step.depth + k] ^ -128);
      std::fill(bytes + i * depth + step.depth, bytes + (i + 1) * depth, static_cast<uint8_t>(kZero));
    }
  });
  float *by = kept(columns, 2 * width), *added = by + width;  // the kernels read whole panels
  for (int64_t j = 0; j < width; j++) {
    by[j] = right_scales == nullptr || j >= step.columns ? 1.0f : right_scales[j];
    added[j] = bias == nullptr || j >= step.columns ? 0.0f : bias[j];
  }
  const uint8_t ways = 0;  // not read: the bytes are multiplied in one way
  lowp_bytes_multiply(kAvx512, bytes, step.rows, depth, packed, &ways, step.columns, 1.0f, kZero, by, of_columns, left_scales,
                      bias == nullptr ? nullptr : added, out, threads);
}
#endif

}  // namespace

Ended encode(const lowp_codes& step, const float* x, const float* factor, int8_t* codes, float* scales, uint64_t seed,
             int threads) {
  const Kernels& kernel = kernels();
  const bool lies = factor == nullptr && step.step == 1 && step.line == step.columns;
  const int64_t grain = up(std::max<int64_t>(1, kGrain / step.columns), kTogether);
  std::atomic<int> ended{kWhole};
  parallel_for(step.rows, grain, enough_threads(step.rows * step.columns, threads), [&](int64_t begin, int64_t end) noexcept {
    static thread_local std::vector<float> gathered;
    try {
      for (int64_t first = begin; first < end && ended == kWhole; first += kTogether) {
        const int64_t count = std::min(kTogether, end - first), at = first * step.columns;
        float* numbers = lies ? nullptr : kept(gathered, count * step.columns);
        if (!lies) gather_rows(step, x, factor, first, count, numbers);
        const float* rows = lies ? x + at : numbers;
        const Task task{nullptr, rows, codes + at, kFp32, 0, seed, false, at};
        const Groups groups{step.sharing, step.columns, step.columns, 1, nullptr, nullptr, scales + first, sizeof(float), false};
        if (std::signbit(kernel.find_largest(task, 0, count * step.columns))) ended = kInfinite;
        kernel.encode_groups(task, groups, 0, count * step.columns);
      }
    } catch (const std::bad_alloc&) {
      ended = kNoMemory;
    }
  });
  return static_cast<Ended>(ended.load());
}

Ended multiply(const lowp_bytes& step, const int8_t* left, const int8_t* right, const float* left_scales,
               const float* right_scales, const float* bias, float* out, int threads) {
  try {
#if defined(__x86_64__)
    if (&kernels() == &kAvx512Kernels) {
      multiply_bytes(step, left, right, left_scales, right_scales, bias, out, threads);
      return kWhole;
    }
#endif
    multiply_int16(step, left, right, out, threads);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  parallel_for(step.rows, std::max<int64_t>(1, kGrain / step.columns), threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float* to = out + i * step.columns;
      for (int64_t j = 0; j < step.columns; j++) {
        const float by_column = right_scales == nullptr ? to[j] : to[j] * right_scales[j];
        const float by_row = by_column * left_scales[i];
        to[j] = bias == nullptr ? by_row : by_row + bias[j];
      }
    }
  });
  return kWhole;
}

}  // namespace lowp
