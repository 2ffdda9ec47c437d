// Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Included once per instruction
// set. Element i of a tensor takes word i % 4 of counter (i / 4, 0) under the key `seed`.
#pragma once

#include "carrier.hpp"

namespace lowp {
namespace LOWP_ISA {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;

static inline void philox(const uint32_t counter[4], uint64_t seed, uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(kMultiplier0) * c0, b = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

static inline void philox_at(uint64_t seed, uint64_t position, uint32_t stream, uint32_t out[4]) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), stream, 0};
  philox(counter, seed, out);
}

#if defined(__x86_64__)
// A 64-bit lane holds a 32-bit word with an undefined upper half: the multiplication reads only the lower half
// and gives all 64 bits of the product, so a round of as many counters as there are lanes costs eight operations.
#if defined(__AVX512F__)
using Words = __m512i;
constexpr int kLanes = 8;
// After the interleaving below, the even lanes are the first counters and the odd lanes the others.
static inline Words words_first(uint64_t at) {
  const long long base = static_cast<long long>(at);
  return _mm512_add_epi64(_mm512_set1_epi64(base), _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0));
}
static inline Words words_set(uint64_t value) { return _mm512_set1_epi64(static_cast<long long>(value)); }
static inline Words words_multiply(Words a, Words b) { return _mm512_mul_epu32(a, b); }
static inline Words words_xor(Words a, Words b, Words c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
static inline Words words_xor(Words a, Words b) { return _mm512_xor_si512(a, b); }
static inline Words words_upper(Words a) { return _mm512_srli_epi64(a, 32); }
static inline Words words_pair(Words low, Words high) {
  return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(high, 32));
}
static inline void words_store(uint32_t* out, Words first, Words second) {
  _mm512_storeu_si512(out, _mm512_unpacklo_epi64(first, second));
  _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi64(first, second));
}
#elif defined(__AVX2__)
using Words = __m256i;
constexpr int kLanes = 4;
static inline Words words_first(uint64_t at) {
  return _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(at)), _mm256_set_epi64x(3, 1, 2, 0));
}
static inline Words words_set(uint64_t value) { return _mm256_set1_epi64x(static_cast<long long>(value)); }
static inline Words words_multiply(Words a, Words b) { return _mm256_mul_epu32(a, b); }
static inline Words words_xor(Words a, Words b, Words c) {
  Words early = _mm256_xor_si256(b, c);  // known before a is; the compiler is kept from pairing them otherwise
  asm("" : "+x"(early));
  return _mm256_xor_si256(a, early);
}
static inline Words words_xor(Words a, Words b) { return _mm256_xor_si256(a, b); }
static inline Words words_upper(Words a) { return _mm256_srli_epi64(a, 32); }
static inline Words words_pair(Words low, Words high) {
  return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA);
}
static inline void words_store(uint32_t* out, Words first, Words second) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi64(first, second));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), _mm256_unpackhi_epi64(first, second));
}
#else
using Words = __m128i;
constexpr int kLanes = 2;
static inline Words words_first(uint64_t at) {
  return _mm_add_epi64(_mm_set1_epi64x(static_cast<long long>(at)), _mm_set_epi64x(1, 0));
}
static inline Words words_set(uint64_t value) { return _mm_set1_epi64x(static_cast<long long>(value)); }
static inline Words words_multiply(Words a, Words b) { return _mm_mul_epu32(a, b); }
static inline Words words_xor(Words a, Words b, Words c) {
  Words early = _mm_xor_si128(b, c);  // known before a is; the compiler is kept from pairing them otherwise
  asm("" : "+x"(early));
  return _mm_xor_si128(a, early);
}
static inline Words words_xor(Words a, Words b) { return _mm_xor_si128(a, b); }
static inline Words words_upper(Words a) { return _mm_srli_epi64(a, 32); }
static inline Words words_pair(Words low, Words high) {
  return _mm_or_si128(_mm_srli_epi64(_mm_slli_epi64(low, 32), 32), _mm_slli_epi64(high, 32));
}
static inline void words_store(uint32_t* out, Words first, Words second) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(first, second));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4), _mm_unpackhi_epi64(first, second));
}
#endif

// Independent chains hide the latency of the multiplications.
constexpr int kChains = 3;

// Values common to all counters that differ only in the lowest word: the keys, and parts of the first two rounds.
struct Schedule {
  Words key0[10], key1[10];
  Words upper, lower;

  Schedule(uint64_t seed, uint64_t counter) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += kWeyl0, k1 += kWeyl1) {
      key0[round] = words_set(k0);
      key1[round] = words_set(k1);
    }
    const uint32_t word = static_cast<uint32_t>(counter >> 32) ^ static_cast<uint32_t>(seed);  // after the first round
    const uint64_t product = static_cast<uint64_t>(kMultiplier0) * word;
    upper = words_set((product >> 32) ^ static_cast<uint32_t>((seed >> 32) + kWeyl1));
    lower = words_set(product);
  }
};

// The four words of CHAINS * kLanes counters.
template <int CHAINS>
static inline void philox_rounds(const Schedule& schedule, const Words* counters, Words* c0, Words* c1, Words* c2, Words* c3) {
  const Words m0 = words_set(kMultiplier0), m1 = words_set(kMultiplier1);
#pragma GCC unroll 8
  for (int chain = 0; chain < CHAINS; ++chain) {
    const Words a = words_multiply(counters[chain], m0);
    const Words b = words_multiply(words_xor(words_upper(a), schedule.key1[0]), m1);
    c0[chain] = words_xor(words_upper(b), schedule.key0[1]);
    c1[chain] = b;
    c2[chain] = words_xor(a, schedule.upper);
    c3[chain] = schedule.lower;
  }
#pragma GCC unroll 8
  for (int round = 2; round < 10; ++round) {
#pragma GCC unroll 8
    for (int chain = 0; chain < CHAINS; ++chain) {
      const Words a = words_multiply(c0[chain], m0), b = words_multiply(c2[chain], m1);
      c0[chain] = words_xor(words_upper(b), c1[chain], schedule.key0[round]);
      c2[chain] = words_xor(words_upper(a), c3[chain], schedule.key1[round]);
      c1[chain] = b;
      c3[chain] = a;
    }
  }
}

// The same of neighbours, four words each, stored one after the other.
template <int CHAINS>
static inline void philox_step(const Schedule& schedule, uint64_t counter, uint32_t* out) {
  Words counters[CHAINS], c0[CHAINS], c1[CHAINS], c2[CHAINS], c3[CHAINS];
#pragma GCC unroll 8
  for (int chain = 0; chain < CHAINS; ++chain) counters[chain] = words_first(counter + static_cast<uint64_t>(chain * kLanes));
  philox_rounds<CHAINS>(schedule, counters, c0, c1, c2, c3);
#pragma GCC unroll 8
  for (int chain = 0; chain < CHAINS; ++chain)
    words_store(out + chain * kLanes * 4, words_pair(c0[chain], c1[chain]), words_pair(c2[chain], c3[chain]));
}

// The words of counters counter .. counter + counters - 1 with equal upper halves; returns the number computed.
// GCC's scheduling before register allocation, off by default on x86, makes this a tenth faster.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((noinline, optimize("schedule-insns", "sched-pressure")))
#else
__attribute__((noinline))
#endif
static int64_t random_words_alike(uint64_t seed, uint64_t counter, int64_t counters, uint32_t* out) {
  const Schedule schedule(seed, counter);
  int64_t done = 0;
  for (; done + kChains * kLanes <= counters; done += kChains * kLanes)
    philox_step<kChains>(schedule, counter + static_cast<uint64_t>(done), out + 4 * done);
  for (; done + kLanes <= counters; done += kLanes)
    philox_step<1>(schedule, counter + static_cast<uint64_t>(done), out + 4 * done);
  return done;
}
#else
static inline int64_t random_words_alike(uint64_t, uint64_t, int64_t, uint32_t*) { return 0; }
#endif

// The words of counters counter .. counter + counters - 1.
static void random_words(uint64_t seed, uint64_t counter, int64_t counters, uint32_t* out) {
  const uint64_t last = counter + static_cast<uint64_t>(counters) - 1;
  int64_t done = 0;
  if (counters > 0 && counter >> 32 == last >> 32) done = random_words_alike(seed, counter, counters, out);
  for (; done < counters; ++done) philox_at(seed, counter + static_cast<uint64_t>(done), 0, out + 4 * done);
}

// The words of `count` counters, `stride` apart: word j of counter i at out[j * count + i].
static void random_words_across(uint64_t seed, uint64_t first, uint64_t stride, int64_t count, uint32_t* out) {
  int64_t done = 0;
#if defined(__x86_64__)
  constexpr int64_t kAtOnce = kChains * kLanes;
  const uint64_t last = first + static_cast<uint64_t>(count - 1) * stride;
  if (first >> 32 == last >> 32) {
    const Schedule schedule(seed, first);
    for (; done + kAtOnce <= count; done += kAtOnce) {
      alignas(64) uint64_t at[kAtOnce], found[4][kAtOnce];
      for (int64_t i = 0; i < kAtOnce; ++i) at[i] = first + static_cast<uint64_t>(done + i) * stride;
      Words counters[kChains], words[4][kChains];
      std::memcpy(counters, at, sizeof(at));
      philox_rounds<kChains>(schedule, counters, words[0], words[1], words[2], words[3]);
      std::memcpy(found, words, sizeof(found));
      for (int64_t word = 0; word < 4; ++word)
        for (int64_t i = 0; i < kAtOnce; ++i) out[word * count + done + i] = static_cast<uint32_t>(found[word][i]);
    }
  }
#endif
  for (; done < count; ++done) {
    uint32_t words[4];
    philox_at(seed, first + static_cast<uint64_t>(done) * stride, 0, words);
    for (int64_t word = 0; word < 4; ++word) out[word * count + done] = words[word];
  }
}

// The words of `count` elements from `index` on; `buffer` has room for four more.
static const uint32_t* words_from(uint64_t seed, int64_t index, int64_t count, uint32_t* buffer) {
  const int64_t skipped = index % 4;
  random_words(seed, static_cast<uint64_t>(index) / 4, (skipped + count + 3) / 4, buffer);
  return buffer + skipped;
}

// The words of one counter of four words.
static void random_block(uint64_t seed, const uint32_t* counter, uint32_t* out) { philox(counter, seed, out); }

}  // namespace LOWP_ISA
}  // namespace lowp
