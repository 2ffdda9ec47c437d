// Conversion of blocks between the type of a tensor and the carrier. Included once per instruction set.
#pragma once

#include "lanes.hpp"
#include "narrow.hpp"

namespace lowp {
namespace LOWP_ISA {

static inline int64_t carrier_bytes(int type) { return type == kFp64 ? 8 : type == kFp32 ? 4 : 2; }

static inline const char* at(const void* base, int64_t index, int64_t bytes) {
  return static_cast<const char*>(base) + index * bytes;
}
static inline char* at(void* base, int64_t index, int64_t bytes) { return static_cast<char*>(base) + index * bytes; }

// A tensor may begin at any byte, such as a view of a file; the kernels read and write aligned numbers.
static inline bool is_aligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline uint32_t widen_once(uint32_t bits, F32*) { return bits; }
static inline uint64_t widen_once(uint32_t bits, F64*) { return bits_of(static_cast<double>(number(bits))); }

template <class C>
static const typename C::Bits* load_unaligned(const void* in, int type, int64_t begin, int64_t count,
                                              typename C::Bits* buffer);

// `count` numbers as carrier bits: in place if they are stored as such, otherwise in `buffer`. At most kSumBlock.
template <class C>
__attribute__((noinline)) static const typename C::Bits* load(const void* in, int type, int64_t begin, int64_t count,
                                                              typename C::Bits* buffer) {
  using Bits = typename C::Bits;
  if (!is_aligned(in, carrier_bytes(type))) return load_unaligned<C>(in, type, begin, count, buffer);
  if (carrier_bytes(type) == sizeof(Bits)) return reinterpret_cast<const Bits*>(at(in, begin, sizeof(Bits)));
  C* const carrier = nullptr;
  if (type == kFp64) {  // read as fp32 only if the reader needs the rounded value, which statistics do not
    const double* x = static_cast<const double*>(in) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) buffer[i] = bits_of(static_cast<typename C::Number>(x[i]));
  } else if (type == kFp32) {
    const uint32_t* x = static_cast<const uint32_t*>(in) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) buffer[i] = widen_once(x[i], carrier);
  } else if (type == kFp16) {
    const uint16_t* x = static_cast<const uint16_t*>(in) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) buffer[i] = widen_once(fp32_from_fp16(x[i]), carrier);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(in) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) buffer[i] = widen_once(static_cast<uint32_t>(x[i]) << 16, carrier);
  }
  return buffer;
}

template <class C>
__attribute__((noinline)) static const typename C::Bits* load_unaligned(const void* in, int type, int64_t begin,
                                                                        int64_t count, typename C::Bits* buffer) {
  alignas(64) char copy[kSumBlock * 8];
  const int64_t bytes = carrier_bytes(type);
  std::memcpy(copy, at(in, begin, bytes), static_cast<size_t>(count * bytes));
  const typename C::Bits* found = load<C>(copy, type, 0, count, buffer);
  if (found != buffer) std::memcpy(buffer, found, static_cast<size_t>(count) * sizeof(found[0]));
  return buffer;
}

static inline uint32_t narrow_once(uint32_t bits) { return bits; }
static inline uint32_t narrow_once(uint64_t bits) { return bits_of(static_cast<float>(number(bits))); }

// Bypasses the cache, from which a large result would evict data still in use. `out` is 16-byte aligned.
static inline void store_streaming(void* out, const void* in, int64_t bytes) {
  char* to = static_cast<char*>(out);
  const char* from = static_cast<const char*>(in);
  int64_t done = 0;
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0)
    for (; done + 64 <= bytes; done += 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done), _mm512_loadu_si512(from + done));
#elif defined(__AVX2__)
  if (reinterpret_cast<uintptr_t>(to) % 32 == 0)
    for (; done + 32 <= bytes; done += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + done)));
#elif defined(__x86_64__)
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
    for (; done + 16 <= bytes; done += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done)));
#endif
  std::memcpy(to + done, from + done, static_cast<size_t>(bytes - done));
}

static inline void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Writes `count` carrier numbers, all of which the type of the tensor represents. At most kSumBlock.
template <class C>
__attribute__((noinline)) static void store(const typename C::Bits* values, void* out, int type, int64_t begin,
                                            int64_t count, bool stream) {
  using Bits = typename C::Bits;
  if (carrier_bytes(type) != sizeof(Bits) && !is_aligned(out, carrier_bytes(type))) {
    alignas(64) char copy[kSumBlock * 8];
    const int64_t bytes = carrier_bytes(type);
    store<C>(values, copy, type, 0, count, false);
    std::memcpy(at(out, begin, bytes), copy, static_cast<size_t>(count * bytes));
  } else if (carrier_bytes(type) == sizeof(Bits)) {
    char* to = at(out, begin, sizeof(Bits));
    const int64_t bytes = count * static_cast<int64_t>(sizeof(Bits));
    if (stream) return store_streaming(to, values, bytes);
    std::memcpy(to, values, static_cast<size_t>(bytes));
  } else if (type == kFp64) {
    double* y = static_cast<double*>(out) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<double>(number(values[i]));
  } else if (type == kFp32) {
    uint32_t* y = static_cast<uint32_t*>(out) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) y[i] = narrow_once(values[i]);
  } else if (type == kFp16) {
    uint16_t* y = static_cast<uint16_t*>(out) + begin;
    if constexpr (C::kWidth == 32)
      if (narrow_to_fp16(reinterpret_cast<const float*>(values), y, count)) return;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) {  // with NaN, which get the bits of one
      const uint32_t bits = narrow_once(values[i]), payload = mask<F32>((bits & 0x7fffffff) > Constants<F32>::kInf) & 0x1ff;
      y[i] = static_cast<uint16_t>(fp16_bits(bits) & ~payload);
    }
  } else {
    uint16_t* y = static_cast<uint16_t*>(out) + begin;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) y[i] = static_cast<uint16_t>(narrow_once(values[i]) >> 16);
  }
}

}  // namespace LOWP_ISA
}  // namespace lowp
