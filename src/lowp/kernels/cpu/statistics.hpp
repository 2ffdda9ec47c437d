// Statistics of a tensor, and of a cast of it, in one pass. Included once per instruction set.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// Eight parallel sums on every instruction set, so that the total is the same to the last bit.
using Sums = double __attribute__((vector_size(64)));
using Numbers32 = float __attribute__((vector_size(32)));
using Integers32 = int32_t __attribute__((vector_size(32)));
using Integers64 = int64_t __attribute__((vector_size(64)));

// `FINITE`: no number is infinite or NaN, which add nothing.
template <bool FINITE>
static inline void add_squares(const uint32_t* bits, Sums& sums) {
  Integers32 x;
  std::memcpy(&x, bits, sizeof x);
  if (!FINITE) x &= (x & 0x7fffffff) < 0x7f800000;
  Numbers32 numbers;
  std::memcpy(&numbers, &x, sizeof numbers);
  const Sums wide = __builtin_convertvector(numbers, Sums);
  sums += wide * wide;
}

template <bool FINITE>
static inline void add_squares(const uint64_t* bits, Sums& sums) {
  Integers64 x;
  std::memcpy(&x, bits, sizeof x);
  if (!FINITE) x &= (x & 0x7fffffffffffffff) < 0x7ff0000000000000;
  Sums numbers;
  std::memcpy(&numbers, &x, sizeof numbers);
  sums += numbers * numbers;
}

template <bool FINITE, class Bits>
__attribute__((noinline)) static double sum_of_squares(const Bits* bits, int64_t count) {
  Sums even = {}, odd = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (size_t line = 0; line < 16 * sizeof(Bits); line += 64)  // the next block, meanwhile
      __builtin_prefetch(reinterpret_cast<const char*>(bits + i + kSumBlock) + line, 0, 2);
    add_squares<FINITE>(bits + i, even);
    add_squares<FINITE>(bits + i + 8, odd);
  }
  if (i < count) {
    Bits rest[16] = {};
    std::memcpy(rest, bits + i, sizeof(Bits) * static_cast<size_t>(count - i));
    add_squares<FINITE>(rest, even);
    add_squares<FINITE>(rest + 8, odd);
  }
  const Sums all = even + odd;
  return ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
}

// The biased exponent of fp32, 0 for zeros and subnormals. fp64: finite numbers clamped to 0 .. 254.
static inline unsigned bin_of(uint32_t bits) { return bits >> 23 & 255; }
static inline unsigned bin_of(uint64_t bits) {
  const int field = static_cast<int>(bits >> 52 & 2047);
  if (field == 2047) return 255;
  const int clamped = field - (1023 - 127);
  return static_cast<unsigned>(clamped < 0 ? 0 : clamped > 254 ? 254 : clamped);
}

// What a block holds: the largest finite magnitude, and how many numbers of a kind.
template <class Bits>
struct Kinds {
  Bits largest;
  int64_t zeros, nans, infinities;

  bool are_finite() const { return nans + infinities == 0; }
  template <class Seen>
  void add_to(Seen* seen) const {
    seen->zeros += zeros, seen->nans += nans, seen->infinities += infinities;
    const double maximum = static_cast<double>(number(largest));
    seen->maximum = maximum > seen->maximum ? maximum : seen->maximum;
  }
};

template <class C>
__attribute__((noinline)) static Kinds<typename C::Bits> kinds_of(const typename C::Bits* bits, int64_t count) {
  using Int = typename C::Int;
  constexpr Int kInf = static_cast<Int>(Constants<C>::kInf);
  Int zeros = 0, nans = 0, infinities = 0, largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const Int a = static_cast<Int>(bits[i] & Constants<C>::kMagnitude);
    zeros += a == 0;
    largest = a > largest ? a : largest;
  }
  if (largest >= kInf) {
    largest = 0;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) {
      const Int a = static_cast<Int>(bits[i] & Constants<C>::kMagnitude);
      nans += a > kInf;
      infinities += a == kInf;
      const Int finite = a < kInf ? a : 0;
      largest = finite > largest ? finite : largest;
    }
  }
  return {static_cast<typename C::Bits>(largest), zeros, nans, infinities};
}

// Counts by exponent. Most blocks hold few: each of these is compared with all numbers, which takes fewer steps than an increment
// for each number. In other blocks there are four tables, so that an increment does not wait for that of a neighbour.
struct Histogram {
  static constexpr int kCompared = 32;  // bins below that of a block's largest number, beside those of zeros and of infinities
#if defined(__AVX512F__)
  static constexpr int64_t kBytes = 64;  // of a vector
#elif defined(__AVX2__)
  static constexpr int64_t kBytes = 32;
#else
  static constexpr int64_t kBytes = 16;
#endif
  using Bytes = uint8_t __attribute__((vector_size(kBytes)));

  uint32_t table[4][256];
  int64_t held = 0;

  Histogram() { std::memset(table, 0, sizeof table); }

  // At most kSumBlock numbers, of which `largest` is the largest finite magnitude.
  template <class Bits>
  void add(const Bits* bits, int64_t count, Bits largest) {
    alignas(kBytes) uint8_t bins[kSumBlock];
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) bins[i] = static_cast<uint8_t>(bin_of(bits[i]));
    held += count;
    if (compare(bins, count, static_cast<int>(bin_of(largest)))) return;
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      for (int lane = 0; lane < 4; ++lane) ++table[lane][bins[i + lane]];
    for (; i < count; ++i) ++table[0][bins[i]];
  }

  void move_to(int64_t* histogram) {
    for (int bin = 0; bin < 256; ++bin)
      histogram[bin] += int64_t{table[0][bin]} + table[1][bin] + table[2][bin] + table[3][bin];
    std::memset(table, 0, sizeof table);
    held = 0;
  }

 private:
  // Returns false, with nothing counted, for a block of more bins, or that is no whole number of vectors.
  __attribute__((noinline)) bool compare(const uint8_t* bins, int64_t count, int top) {
    if (kBytes < 32 || count % kBytes != 0) return false;  // short vectors are no faster than the tables
    const int lowest = top < kCompared ? 1 : top - kCompared + 1;
    uint32_t found[kCompared];
    const uint32_t zeros = equal(bins, count, 0);
    int64_t left = count - zeros;
    int bin = top;
    for (; left > 0 && bin >= lowest; --bin) left -= found[top - bin] = equal(bins, count, bin);
    const uint32_t infinite = left > 0 ? equal(bins, count, 255) : 0;
    if (left != infinite) return false;
    table[0][0] += zeros, table[0][255] += infinite;
    for (int above = top; above > bin; --above) table[0][above] += found[top - above];
    return true;
  }

  // How many bytes are equal to one.
  static inline uint32_t equal(const uint8_t* bins, int64_t count, int one) {
    constexpr int64_t kPart = 255 * kBytes;  // more could overflow a byte of the sums
    const Bytes wanted = Bytes{} + static_cast<uint8_t>(one);
    uint32_t all = 0;
    for (int64_t part = 0; part < count; part += kPart) {
      Bytes sums = {};
#pragma GCC unroll 8
      for (int64_t i = part; i < smaller(part + kPart, count); i += kBytes) {
        Bytes some;
        std::memcpy(&some, bins + i, sizeof some);
        sums -= reinterpret_cast<Bytes>(some == wanted);
      }
      uint8_t each[kBytes];
      std::memcpy(each, &sums, sizeof each);
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < kBytes; ++i) all += each[i];
    }
    return all;
  }
};

template <class C>
static void see(const typename C::Bits* bits, int64_t first, int64_t count, Histogram& histogram, Statistics* seen,
                double* partial_sums) {
  const auto kinds = kinds_of<C>(bits, count);
  kinds.add_to(seen);
  histogram.add(bits, count, kinds.largest);
  if (histogram.held > int64_t{1} << 30) histogram.move_to(seen->histogram);
  partial_sums[first / kSumBlock] = kinds.are_finite() ? sum_of_squares<true>(bits, count) : sum_of_squares<false>(bits, count);
}

template <class C>
static void statistics_in(const Task& task, Statistics* seen, double* partial_sums, int64_t begin, int64_t end) {
  alignas(64) typename C::Bits buffer[kSumBlock];
  Histogram histogram;
  for (int64_t first = begin; first < end; first += kSumBlock) {
    const int64_t count = end - first < kSumBlock ? end - first : kSumBlock;
    const typename C::Bits* bits = load<C>(task.in, task.in_type, first, count, buffer);
    see<C>(bits, first, count, histogram, seen, partial_sums);
  }
  histogram.move_to(seen->histogram);
}

static void statistics(const Task& task, Statistics* seen, double* partial_sums, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  if (task.in_type == kFp64) return statistics_in<F64>(task, seen, partial_sums, begin, end);
  statistics_in<F32>(task, seen, partial_sums, begin, end);
}

}  // namespace LOWP_ISA
}  // namespace lowp
