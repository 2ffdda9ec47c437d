// Common parts of the C functions of casts, mantissas and counts: the kernels in use, and the distribution of work. Only
// for sources compiled for the platform's baseline.
#pragma once
#include <mutex>

#include "bits.hpp"
#include "cast.hpp"
#include "export.hpp"
#include "memory.hpp"
#include "parallel.hpp"

namespace lowp {

// The kernels of the instruction set in use (casts.cpp).
const Kernels& kernels();

inline int64_t bytes_of(int type) { return type == kFp64 ? 8 : type == kFp32 ? 4 : 2; }

// Bypassing the cache is faster only if the output is not the input, whose lines are in the cache.
inline bool streams(const void* in, const void* out, int64_t bytes) {
  constexpr int64_t kStreamBytes = int64_t{1} << 23;  // larger results do not stay in a core's share of the cache
  return in != out && bytes >= kStreamBytes;
}

inline int enough_threads(int64_t count, int threads) { return count < kSerial ? 1 : threads; }

inline void merge(const Mantissas& part, Mantissas* all) {
  if (part.maximum > all->maximum) all->maximum = part.maximum;
  all->saturated += part.saturated;
  all->non_finite += part.non_finite;
  all->any |= part.any;
}

// counts: largest |mantissa|, saturated, not finite, whether anything was not zero.
inline void tell(const Mantissas& seen, int64_t* counts) {
  counts[0] = seen.maximum, counts[1] = seen.saturated, counts[2] = seen.non_finite, counts[3] = seen.any;
}

// Runs work(part, begin, end) in parts, and merges the results with the source's own merge(part, all).
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

}  // namespace lowp

// casts.cpp, groups.cpp, mantissas.cpp
LOWP_EXPORT void lowp_quantize(const lowp_cast* cast, int type, const void* x, int out_type, void* out, int64_t count, uint64_t seed,
                               int64_t index, int keeps, int threads);
LOWP_EXPORT int lowp_quantize_groups(const lowp_sharing* sharing, int type, const void* x, int out_type, void* out, int64_t count,
                                     int64_t row, int64_t group, int64_t inner, int64_t across, const double* scale,
                                     const int32_t* zero_point, uint64_t seed, int64_t index, int threads);
LOWP_EXPORT int lowp_quantize_measured(const lowp_sharing* sharing, int type, const void* x, void* out, int64_t count, double scale,
                                       double* largest, uint64_t seed, int64_t index, int threads);
// An exponent of a whole tensor is read, and told, through a pointer: a tensor of one int32.
LOWP_EXPORT void lowp_write_int16(const lowp_cast* cast, int type, const void* x, const int32_t* exponent, void* out,
                                  float* values, int64_t count, uint64_t seed, int threads, int64_t* counts);
LOWP_EXPORT int lowp_current_int16(const lowp_cast* cast, const float* x, int offset, int lowest, int highest, void* out,
                                   int64_t count, uint64_t seed, int threads, int32_t* exponent);
LOWP_EXPORT void lowp_from_int16(const int16_t* mantissas, const int32_t* exponent, float* out, int64_t count,
                                 int threads);
LOWP_EXPORT int lowp_is_exact_int16(const lowp_cast* cast, const float* x, int offset, int lowest, int highest,
                                    int64_t count, int threads, int32_t* exponent);
LOWP_EXPORT int64_t lowp_exact_int16(const float* x, const int32_t* exponent, int16_t* out, int64_t count, int threads);
LOWP_EXPORT int64_t lowp_same_int16(const float* x, const int16_t* mantissas, int64_t rows, int64_t columns,
                                    int64_t stride, const int32_t* exponent, int rounded, int lowest, int threads);
LOWP_EXPORT void lowp_sum_int16(const int16_t* mantissas, int64_t outer, int64_t channels, int64_t inner, int64_t* out,
                                int threads);

namespace lowp {

void write_step(float* weight, int16_t* mantissas, const int* exponents, int lowest, int64_t count, int threads,
                int64_t* counts);

constexpr int64_t kInfiniteBits = 0x7f800000;
constexpr int32_t kNoExponent = 1 << 15;  // of what is not finite, as lowp/kernels/int16/mantissas.py has it

// Whether the units of mantissas under an exponent, and their inverses, are normal numbers of fp32.
inline bool is_near(int32_t exponent) { return -100 <= exponent && exponent <= 100; }

// The fp32 number of 31 bits; a subnormal is converted as an integer, since the thread may flush it to zero.
inline double magnitude(uint32_t bits) {
  constexpr uint32_t kSmallestNormal = 0x00800000;
  return bits < kSmallestNormal ? bits * 0x1p-149 : double{bit_cast<float>(bits)};
}

}  // namespace lowp
