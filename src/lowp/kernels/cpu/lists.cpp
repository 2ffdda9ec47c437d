// The C functions of one operation on many int16 tensors, called by lowp/kernels/int16/lists.py: for small parameters a call
// takes longer than its work. Each row of numbers has the addresses, sizes and exponents of one tensor.
#include <cstdint>

#include "calls.hpp"

LOWP_EXPORT int64_t lowp_same_int16(const float* x, const int16_t* mantissas, int64_t rows, int64_t columns,
                                    int64_t stride, int exponent, int rounded, int lowest, int threads);
LOWP_EXPORT int64_t lowp_exact_int16(const float* x, int exponent, int16_t* out, int64_t count, int threads);
LOWP_EXPORT void lowp_write_int16(const lowp_cast* cast, int type, const void* x, int exponent, void* out,
                                  float* values, int64_t count, uint64_t seed, int threads, int64_t* counts);

namespace lowp {
namespace {

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

int number(int64_t value) { return static_cast<int>(value); }

}  // namespace
}  // namespace lowp

using namespace lowp;

// given: x, mantissas, rows, columns, stride, exponent. found: 0 if the mantissas are exactly those of x, otherwise -1.
LOWP_EXPORT void lowp_same_int16_list(const int64_t* given, int64_t count, int threads, int64_t* found) {
  for (int64_t i = 0; i < count; ++i, given += 6)
    found[i] = lowp_same_int16(at<float>(given[0]), at<int16_t>(given[1]), given[2], given[3], given[4],
                               number(given[5]), 0, 0, threads);
}

// given: x, the destination of its mantissas, elements, exponent. found: the largest |mantissa|, -1 if x is not exact.
LOWP_EXPORT void lowp_exact_int16_list(const int64_t* given, int64_t count, int threads, int64_t* found) {
  for (int64_t i = 0; i < count; ++i, given += 4)
    found[i] = lowp_exact_int16(at<float>(given[0]), number(given[3]), at<int16_t>(given[1]), given[2], threads);
}

// given: weight, its mantissas, elements, and their exponent, the update's and the new one. counts: 8 per weight.
LOWP_EXPORT void lowp_step_int16_list(const int64_t* given, int64_t count, int lowest, int threads, int64_t* counts) {
  for (int64_t i = 0; i < count; ++i, given += 6) {
    const int exponents[] = {number(given[3]), number(given[4]), number(given[5])};
    write_step(at<float>(given[0]), at<int16_t>(given[1]), exponents, lowest, given[2], threads, counts + 8 * i);
  }
}

// given: x, fp32, overwritten with its values, elements, exponent. counts: 4 per tensor.
LOWP_EXPORT void lowp_write_int16_list(const lowp_cast* cast, const int64_t* given, int64_t count, int threads,
                                       int64_t* counts) {
  for (int64_t i = 0; i < count; ++i, given += 3)
    lowp_write_int16(cast, kFp32, at<float>(given[0]), number(given[2]), nullptr, at<float>(given[0]), given[1], 0,
                     threads, counts + 4 * i);
}
