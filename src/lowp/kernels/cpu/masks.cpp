// The C functions of masks, called by lowp/kernels/int16/masks.py.
#include <atomic>

#include "calls.hpp"

using namespace lowp;

// Bit i % 8 of bits[i / 8] is set if x[i] is not zero; unused bits of the last byte are 0.
LOWP_EXPORT void lowp_pack_nonzero(const float* x, uint8_t* bits, int64_t count, int threads) {
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.pack_nonzero(x, bits, begin, end); });
}

LOWP_EXPORT void lowp_pass_bits(const float* x, const uint8_t* bits, float* out, int64_t count, int threads) {
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads),
               [&](int64_t begin, int64_t end) { kernel.pass_bits(x, bits, out, begin, end); });
}

// Passes x where the chosen are positive; its own mantissas, too, if it has any (null: none).
LOWP_EXPORT void lowp_pass_positive(const float* x, const int16_t* chosen, float* out, const int16_t* mantissas,
                                    int16_t* passed, int64_t count, int threads) {
  const Kernels& kernel = kernels();
  parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    kernel.pass_positive(x, chosen, out, begin, end);
    if (!mantissas) return;
    for (int64_t i = begin; i < end; ++i) passed[i] = chosen[i] > 0 ? mantissas[i] : int16_t{0};
  });
}

// Returns 0; -1 if the mantissas are not those of x under this exponent, or if that is not near: the output is then invalid.
LOWP_EXPORT int lowp_relu_int16(const float* x, const int16_t* mantissas, const int32_t* exponent, int16_t* to,
                                float* values, int64_t count, int threads) {
  if (!is_near(*exponent)) return -1;
  const Kernels& kernel = kernels();
  std::atomic<bool> wrong{false};
  parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    if (wrong.load(std::memory_order_relaxed)) return;
    if (!kernel.relu_int16(x, mantissas, *exponent, to, values, begin, end)) wrong = true;
  });
  return wrong ? -1 : 0;
}
