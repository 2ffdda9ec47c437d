// The two types in which values are rounded, as bits and as numbers. Included once per instruction set (kernels.inc).
#pragma once

#include <cstdint>
#include <cstring>

#include "bits.hpp"
#include "cast.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

// Loads come before stores in every iteration, so `out` may be exactly `in`.
#if defined(__clang__)
#define LOWP_VECTOR_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOWP_VECTOR_LOOP _Pragma("GCC ivdep")
#endif

namespace lowp {
namespace LOWP_ISA {

struct F32 {
  using Bits = uint32_t;
  using Int = int32_t;
  using Number = float;
  static constexpr int kMantissa = 23, kBias = 127, kWidth = 32;
  static constexpr int kMinExponent = -126, kRandomBits = 24;
};

struct F64 {
  using Bits = uint64_t;
  using Int = int64_t;
  using Number = double;
  static constexpr int kMantissa = 52, kBias = 1023, kWidth = 64;
  static constexpr int kMinExponent = -1022, kRandomBits = 32;
};

static inline float number(uint32_t bits) { return bit_cast<float>(bits); }
static inline double number(uint64_t bits) { return bit_cast<double>(bits); }
static inline uint32_t bits_of(float value) { return bit_cast<uint32_t>(value); }
static inline uint64_t bits_of(double value) { return bit_cast<uint64_t>(value); }

template <class C>
struct Constants {
  using Bits = typename C::Bits;
  static constexpr Bits kOne = 1;
  static constexpr Bits kSign = kOne << (C::kWidth - 1);
  static constexpr Bits kMagnitude = kSign - 1;
  static constexpr Bits kInf = static_cast<Bits>(2 * C::kBias + 1) << C::kMantissa;
  static constexpr Bits kQuietNan = kInf | (kOne << (C::kMantissa - 1));
};

// 2**exponent if it is a normal number of the carrier; 0 below, infinity above.
template <class C>
static inline typename C::Number power_of_two(int exponent) {
  const int field = exponent + C::kBias;
  if (field <= 0) return 0;
  if (field > 2 * C::kBias) return number(Constants<C>::kInf);
  return number(static_cast<typename C::Bits>(field) << C::kMantissa);
}

// Subnormals are not flushed, whatever torch.set_flush_denormal set for the thread, and results are rounded to nearest even
// or (where a kernel takes the floor of positive numbers) toward zero.
class ExactArithmetic {
 public:
#if defined(__x86_64__)
  explicit ExactArithmetic(bool toward_zero = false) : before_(_mm_getcsr()) {
    _mm_setcsr(toward_zero ? 0x7f80 : 0x1f80);
    asm volatile("" ::: "memory");
  }
  ~ExactArithmetic() {
    asm volatile("" ::: "memory");
    _mm_setcsr(before_);
  }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  explicit ExactArithmetic(bool toward_zero = false) {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{toward_zero ? 3u << 22 : 0u}) : "memory");
  }
  ~ExactArithmetic() { asm volatile("msr fpcr, %0" ::"r"(before_) : "memory"); }

 private:
  uint64_t before_;
#else
  explicit ExactArithmetic(bool toward_zero = false) {
    fegetenv(&before_);
    fesetenv(FE_DFL_ENV);
    if (toward_zero) fesetround(FE_TOWARDZERO);
  }
  ~ExactArithmetic() { fesetenv(&before_); }

 private:
  fenv_t before_;
#endif

 public:
  ExactArithmetic(const ExactArithmetic&) = delete;
  ExactArithmetic& operator=(const ExactArithmetic&) = delete;
};

// fp16 to fp32. Integer arithmetic and one exact subtraction, so that it vectorises on any instruction set.
static inline uint32_t fp32_from_fp16(uint32_t half) {
  const uint32_t magnitude = (half & 0x7fff) << 13;
  const uint32_t exponent = magnitude & 0x0f800000;
  const uint32_t normal = magnitude + 0x38000000;
  const uint32_t special = magnitude + 0x70000000;                         // infinity and NaN: the top exponent
  const uint32_t subnormal = bits_of(number(magnitude + 0x38800000) - 0x1p-14f);
  uint32_t result = exponent == 0 ? subnormal : normal;
  result = exponent == 0x0f800000 ? special : result;
  return result | (half & 0x8000) << 16;
}

}  // namespace LOWP_ISA
}  // namespace lowp
