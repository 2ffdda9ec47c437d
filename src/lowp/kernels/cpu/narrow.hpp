// fp32 rounded to fp16 and bf16, to nearest even; `quantize`, which serves any format, takes twice as long. Included once
// per instruction set.
#pragma once

#include "carrier.hpp"

namespace lowp {
namespace LOWP_ISA {

static inline uint32_t bf16_bits(uint32_t bits) { return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }

static inline uint32_t fp16_bits(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // the last bit of 0.5 is fp16's smallest number: the sum is rounded as a subnormal of fp16 is
  const uint32_t subnormal = bits_of(number(magnitude < 0x38800000 ? magnitude : 0) + 0.5f) - 0x3f000000;
  uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477ff000 ? 0x7c00 : result;  // from half an ulp above the largest number on
  result = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : result;  // a NaN, as F16C writes it
  return result | (bits >> 16 & 0x8000);
}

// Writes numbers by `round`. Returns false if there is a NaN.
template <class Round>
static bool narrow_by(const float* in, uint16_t* out, int64_t count, Round round) {
  int32_t largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(in[i]);
    const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
    out[i] = static_cast<uint16_t>(round(bits));
  }
  return largest <= static_cast<int32_t>(Constants<F32>::kInf);
}

static bool narrow_to_fp16(const float* in, uint16_t* out, int64_t count) {
  int64_t i = 0;
  bool ordered = true;
#if defined(__F16C__)
  __m256 nan = _mm256_setzero_ps();
  for (; i + 8 <= count; i += 8) {
    const __m256 x = _mm256_loadu_ps(in + i);
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  ordered = _mm256_movemask_ps(nan) == 0;
#endif
  return narrow_by(in + i, out + i, count - i, fp16_bits) && ordered;
}

// Within ExactArithmetic, as `narrow`.
__attribute__((noinline)) static bool narrow_exactly(const float* in, int type, uint16_t* out, int64_t count) {
  return type == kFp16 ? narrow_to_fp16(in, out, count) : narrow_by(in, out, count, bf16_bits);
}

// Writes numbers of `type`, kFp16 or kBf16. Returns false if there is a NaN, which
// becomes the same bits on every processor, in bf16 not always a NaN.
[[maybe_unused]] static bool narrow(const float* in, int type, uint16_t* out, int64_t count) {
  const ExactArithmetic exact;
  return narrow_exactly(in, type, out, count);
}

}  // namespace LOWP_ISA
}  // namespace lowp
