// What every instruction set does alike, compiled once in each of their files. The including file defines, in an
// anonymous namespace, ROWS, COLUMNS and
//   void multiply(const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b, int32_t* tops, int32_t*
//   sums);
// before it includes this. multiply runs `count` chains of chains[i] pairs each, one after the other, in int32. Between
// two chains it moves all but the lowest TOP_SHIFT bits of each sum to `tops`, so each chain begins near zero; the
// result is 2^TOP_SHIFT * tops + sums. One chain leaves `tops` alone; else it is zero on entry. Everything here
// is `static`: nothing compiled for AVX-512 may be merged into other files.
#include <cmath>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using lowp::BLOCK;
using lowp::BOUNDS;
using lowp::CHUNK;
using lowp::Left;
using lowp::STEP;
using lowp::Tally;
using lowp::TOP_SHIFT;

constexpr int TILE = ROWS * COLUMNS;
constexpr int64_t BLOCK_PAIRS = BLOCK / 2;
constexpr int64_t CHUNK_PAIRS = CHUNK / 2;

// Cauchy-Schwarz: every partial sum of a*b over a set of k is at most ||a|| ||b|| over that set. The norms are rounded
// up, so a product below this limit proves that int32 cannot overflow, in whatever order the sum is taken.
constexpr float SAFE = 2147482624.0f;  // the largest float below 2^31 but for a margin of 1024

// not std::max: what is `inline` may be merged across files, and so across instruction sets
static inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
static inline double larger(double a, double b) { return a < b ? b : a; }
static inline int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }

// ---------------------------------------------------------------------------------------------------------- packing

static inline int32_t pair_of(int16_t even, int16_t odd) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(even)) |
                              static_cast<uint32_t>(static_cast<uint16_t>(odd)) << 16);
}

#if defined(__AVX2__)
static inline void transpose(__m256i r[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int h = 0; h < 2; h++) {
    u[4 * h] = _mm256_unpacklo_epi64(t[4 * h], t[4 * h + 2]);
    u[4 * h + 1] = _mm256_unpackhi_epi64(t[4 * h], t[4 * h + 2]);
    u[4 * h + 2] = _mm256_unpacklo_epi64(t[4 * h + 1], t[4 * h + 3]);
    u[4 * h + 3] = _mm256_unpackhi_epi64(t[4 * h + 1], t[4 * h + 3]);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

static inline void store_lanes(int32_t* to, __m256i value, int lanes) {
  if (lanes == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
    return;
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(value));
  if (lanes == 6) _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 4), _mm256_extracti128_si256(value, 1));
}
#endif

template <int WIDTH>
static void pack_lines(const int16_t* const* lines, int64_t length, int32_t* panel) {
  int64_t done = 0;
#if defined(__AVX2__)
  for (int first = 0; first < WIDTH; first += 8) {
    const int lanes = WIDTH - first < 8 ? WIDTH - first : 8;
    for (done = 0; done + 16 <= length; done += 16) {
      __m256i r[8];
      for (int i = 0; i < 8; i++) {
        const int16_t* line = i < lanes ? lines[first + i] : nullptr;
        r[i] = line ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + done)) : _mm256_setzero_si256();
      }
      transpose(r);
      for (int i = 0; i < 8; i++) store_lanes(panel + (done / 2 + i) * WIDTH + first, r[i], lanes);
    }
  }
#endif
  for (int64_t k = done; k < length; k += 2) {
    for (int w = 0; w < WIDTH; w++) {
      const int16_t* line = lines[w];
      panel[k / 2 * WIDTH + w] = line ? pair_of(line[k], k + 1 < length ? line[k + 1] : int16_t{0}) : 0;
    }
  }
}

#if defined(__AVX2__)
// WIDTH elements of two neighbouring k, interleaved
template <int WIDTH>
static inline void interleave_pair(const int16_t* even, const int16_t* odd, int32_t* to) {
  int done = 0;
  for (; done + 8 <= WIDTH; done += 8) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even + done));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd + done));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done), _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done + 4), _mm_unpackhi_epi16(a, b));
  }
  if (done + 4 <= WIDTH) {
    const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(even + done));
    const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(odd + done));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done), _mm_unpacklo_epi16(a, b));
    done += 4;
  }
  for (; done < WIDTH; done++) to[done] = pair_of(even[done], odd[done]);
}
#endif

template <int WIDTH>
static void pack_rows(const int16_t* source, const int64_t* offsets, int64_t length, int64_t count, int32_t* panel) {
  int64_t k = 0;
#if defined(__AVX2__)
  if (count >= WIDTH) {
    for (; k + 1 < length; k += 2)
      interleave_pair<WIDTH>(source + offsets[k], source + offsets[k + 1], panel + k / 2 * WIDTH);
  }
#endif
  for (; k < length; k += 2) {
    for (int w = 0; w < WIDTH; w++) {
      const int16_t even = w < count ? source[offsets[k] + w] : int16_t{0};
      const int16_t odd = w < count && k + 1 < length ? source[offsets[k + 1] + w] : int16_t{0};
      panel[k / 2 * WIDTH + w] = pair_of(even, odd);
    }
  }
}

// totals[w] += the sum of squares of column w over some pairs, in units of 256, rounded up: a pair's squares sum to at
// most 2^31, so 128 pairs stay below 2^30 + 128.
template <int WIDTH>
static inline void add_squares(int64_t pairs, const int32_t* panel, uint32_t* totals) {
  int64_t done = 0;
#if defined(__AVX2__)
  constexpr int PERIOD = WIDTH % 8 == 0 ? WIDTH : WIDTH % 4 == 0 ? 2 * WIDTH : 4 * WIDTH;
  constexpr int STEPS = PERIOD / WIDTH;
  if (pairs >= STEPS) {
    __m256i sums[PERIOD / 8];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (; done + STEPS <= pairs; done += STEPS) {
      for (int v = 0; v < PERIOD / 8; v++) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + done * WIDTH + 8 * v));
        sums[v] = _mm256_add_epi32(sums[v], _mm256_srli_epi32(_mm256_madd_epi16(x, x), 8));
      }
    }
    alignas(32) uint32_t lanes[PERIOD];
    for (int v = 0; v < PERIOD / 8; v++) _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8 * v), sums[v]);
    for (int l = 0; l < PERIOD; l++) totals[l % WIDTH] += lanes[l];
    for (int w = 0; w < WIDTH; w++) totals[w] += static_cast<uint32_t>(done);
  }
#endif
  for (; done < pairs; done++) {
    for (int w = 0; w < WIDTH; w++) {
      const int32_t pair = panel[done * WIDTH + w];
      const int32_t even = static_cast<int16_t>(pair & 0xffff), odd = pair >> 16;
      totals[w] += ((static_cast<uint32_t>(even * even) + static_cast<uint32_t>(odd * odd)) >> 8) + 1;
    }
  }
}

static inline float norm_above(uint32_t total) {
  return static_cast<float>(std::sqrt(static_cast<double>(total) * 256.0)) * 1.0000005f;
}

// bounds[0] = max over the panel's columns of the norm over the block; bounds[1 + c] = the same for its chunk c
template <int WIDTH>
static void bound(int64_t pairs, const int32_t* panel, float* bounds) {
  for (int64_t block = 0; block < pairs; block += BLOCK_PAIRS, bounds += BOUNDS) {
    uint32_t totals[WIDTH] = {}, largest = 0;
    for (int c = 0; c < BOUNDS - 1; c++) {
      const int64_t begin = block + c * CHUNK_PAIRS;
      const int64_t end = begin + CHUNK_PAIRS < pairs ? begin + CHUNK_PAIRS : pairs;
      uint32_t chunk[WIDTH] = {}, chunk_largest = 0;
      if (begin < end) add_squares<WIDTH>(end - begin, panel + begin * WIDTH, chunk);
      for (int w = 0; w < WIDTH; w++) {
        totals[w] += chunk[w];
        if (chunk[w] > chunk_largest) chunk_largest = chunk[w];
      }
      bounds[1 + c] = norm_above(chunk_largest);
    }
    for (int w = 0; w < WIDTH; w++) largest = totals[w] > largest ? totals[w] : largest;
    bounds[0] = norm_above(largest);
  }
}

// ------------------------------------------------------------------------------------------------------ accumulation

// 1.5 * 2^52: adding it to |x| < 2^51 leaves x, rounded to nearest even, in the low bits.
constexpr double MAGIC = 6755399441055744.0;

static inline double bits_to_double(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline int64_t double_to_bits(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline double narrow_to_double(int64_t sum) { return bits_to_double(sum + 0x4338000000000000) - MAGIC; }

static inline void multiply_one(int64_t pairs, const int32_t* a, const int32_t* b, int32_t* sums) {
  multiply(&pairs, 1, a, b, nullptr, sums);
}

// int16 seen through memory that is also read as pairs
typedef int16_t __attribute__((may_alias)) Element;

// x = 256 * high + low with low in -128..127 and high in -128..128, rounded rather than cut so that low * b stays small
static void split_pairs(int64_t pairs, const int32_t* from, int32_t* high, int32_t* low) {
  const Element* elements = reinterpret_cast<const Element*>(from);
  Element* highs = reinterpret_cast<Element*>(high);
  Element* lows = reinterpret_cast<Element*>(low);
  for (int64_t i = 0; i < 2 * pairs * ROWS; i++) {
    const int16_t x = elements[i];
    highs[i] = static_cast<int16_t>((x >> 8) + ((x & 128) >> 7));
    lows[i] = static_cast<int16_t>(static_cast<int16_t>(x << 8) >> 8);
  }
}

static __attribute__((noinline)) void add_split(int64_t pairs, const int32_t* high, const int32_t* low,
                                                const int32_t* b, int64_t* accumulators) {
  alignas(64) int32_t high_sums[TILE], low_sums[TILE];
  multiply_one(pairs, high, b, high_sums);
  multiply_one(pairs, low, b, low_sums);
  for (int t = 0; t < TILE; t++)
    accumulators[t] += static_cast<int64_t>(high_sums[t]) * 256 + static_cast<int64_t>(low_sums[t]);
}

// sums += the product over several chains
static __attribute__((noinline)) void add_chains(const int64_t* chains, int64_t count, const int32_t* a,
                                                 const int32_t* b, int64_t* accumulators) {
  alignas(64) int32_t tops[TILE], sums[TILE];
  std::memset(tops, 0, sizeof tops);
  multiply(chains, count, a, b, tops, sums);
  for (int t = 0; t < TILE; t++)
    accumulators[t] += static_cast<int64_t>(tops[t]) * (1 << TOP_SHIFT) + static_cast<int64_t>(sums[t]);
}

// The product of a panel of A and a panel of B over a part of a step, with the bounds of its chunks.
struct Part {
  Part(const Left& left, const int32_t* right, const float* b_bounds, int64_t begin, int64_t count)
      : a(left), b(right), first(begin), pairs(count), chunks(lowp::divide_up(count, CHUNK_PAIRS)) {
    constexpr int64_t PER_BLOCK = BOUNDS - 1;
    float squares = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk += PER_BLOCK) {
      const int64_t block = (first / CHUNK_PAIRS + chunk) / PER_BLOCK * BOUNDS;
      for (int64_t c = 0; c < PER_BLOCK; c++) bounds[chunk + c] = a.bounds[block + 1 + c] * b_bounds[block + 1 + c];
      squares += b_bounds[block] * b_bounds[block];
    }
    // A byte is at most 128, so 128 sqrt(STEP) bounds its norm over a step; 3547.5 is above that.
    bytes_safe = 3547.5f * 3547.5f * squares < SAFE * SAFE;
  }
  int64_t pair(int64_t chunk) const { return smaller(chunk * CHUNK_PAIRS, pairs); }

  const Left& a;
  const int32_t* b;
  const int64_t first, pairs, chunks;  // where in the step it begins, a multiple of BLOCK_PAIRS, and its length
  float bounds[STEP / CHUNK];          // of the chunks' products
  bool bytes_safe;                     // bytes of A times B fit int32 over the whole part
};

// Cuts chunks from `begin` on into as few chains as their norms prove safe, up to the first chunk that is not safe even
// alone, and returns that chunk.
static int64_t cut_chains(const Part& part, int64_t begin, int64_t* chains, int64_t* count) {
  int64_t chunk = begin;
  *count = 0;
  while (chunk < part.chunks && part.bounds[chunk] < SAFE) {
    const int64_t start = chunk;
    float total = part.bounds[chunk];
    for (chunk++; chunk < part.chunks; chunk++) {
      total += part.bounds[chunk];
      if (!(total < SAFE)) break;
    }
    chains[(*count)++] = part.pair(chunk) - part.pair(start);
  }
  return chunk;
}

// Returns the end of the chunks from `begin` on that are not safe and whose bytes can be multiplied in one chain: a
// block is safe for any b.
static int64_t cut_split(const Part& part, int64_t begin) {
  int64_t chunk = begin;
  while (chunk < part.chunks && !(part.bounds[chunk] < SAFE)) chunk++;
  return part.bytes_safe ? chunk : smaller(chunk, begin + BOUNDS - 1);
}

// A part whose norms do not prove one chain safe: chains where they prove some, bytes where not even a chunk is proven.
static __attribute__((noinline)) void add_carefully(const Part& part, int64_t* accumulators) {
  const Left& a = part.a;
  int64_t chains[STEP / CHUNK], count;
  for (int64_t begin = 0, end = 0; begin < part.chunks; begin = end) {
    end = cut_chains(part, begin, chains, &count);
    if (count > 0) {
      const int64_t from = part.first + part.pair(begin);
      add_chains(chains, count, a.pairs + from * ROWS, part.b + from * COLUMNS, accumulators);
      continue;
    }
    end = cut_split(part, begin);
    if (!*a.split_ready) {
      split_pairs(a.step_pairs, a.pairs, a.split, a.split + a.split_offset);
      *a.split_ready = 1;
    }
    const int64_t from = part.first + part.pair(begin), pairs = part.pair(end) - part.pair(begin);
    const int32_t* high = a.split + from * ROWS;
    add_split(pairs, high, high + a.split_offset, part.b + from * COLUMNS, accumulators);
  }
}

// accumulators += float(the exact sum of each block)
static void add_chained(int64_t pairs, const Left& a, const int32_t* b, const float* b_bounds, float* accumulators) {
  for (int64_t block = 0; block * BLOCK_PAIRS < pairs; block++) {
    const int64_t first = block * BLOCK_PAIRS, count = smaller(pairs - first, BLOCK_PAIRS);
    if (a.bounds[block * BOUNDS] * b_bounds[block * BOUNDS] < SAFE) {
      alignas(64) int32_t sums[TILE];
      multiply_one(count, a.pairs + first * ROWS, b + first * COLUMNS, sums);
      for (int t = 0; t < TILE; t++) accumulators[t] += static_cast<float>(sums[t]);
      continue;
    }
    const Part part(a, b, b_bounds, first, count);
    int64_t chains[STEP / CHUNK], chain_count;
    if (cut_chains(part, 0, chains, &chain_count) == part.chunks) {
      alignas(64) int32_t tops[TILE], sums[TILE];
      std::memset(tops, 0, sizeof tops);
      multiply(chains, chain_count, a.pairs + first * ROWS, b + first * COLUMNS, tops, sums);
      // |sum| <= 2^38 is exact in double, so this rounds once, like the conversion of an int32.
      for (int t = 0; t < TILE; t++)
        accumulators[t] +=
            static_cast<float>(static_cast<double>(tops[t]) * (1 << TOP_SHIFT) + static_cast<double>(sums[t]));
      continue;
    }
    alignas(64) int64_t sums[TILE];
    std::memset(sums, 0, sizeof sums);
    add_carefully(part, sums);
    for (int t = 0; t < TILE; t++) accumulators[t] += static_cast<float>(narrow_to_double(sums[t]));
  }
}

// accumulators += the exact sum of the step
static void add_exact(int64_t pairs, const Left& a, const int32_t* b, const float* b_bounds, int64_t* accumulators) {
  float total = 0;
  for (int64_t block = 0; block * BLOCK_PAIRS < pairs; block++)
    total += a.bounds[block * BOUNDS] * b_bounds[block * BOUNDS];
  if (!(total < SAFE)) return add_carefully(Part(a, b, b_bounds, 0, pairs), accumulators);
  alignas(64) int32_t sums[TILE];
  multiply_one(pairs, a.pairs, b, sums);
  for (int t = 0; t < TILE; t++) accumulators[t] += sums[t];
}

// ----------------------------------------------------------------------------------------------------------- writing

#if defined(__AVX2__)
// four sums below 2^51
static inline __m256d load_narrow(const int64_t* sums) {
  const __m256i bits = _mm256_add_epi64(_mm256_load_si256(reinterpret_cast<const __m256i*>(sums)),
                                        _mm256_set1_epi64x(0x4338000000000000));
  return _mm256_sub_pd(_mm256_castsi256_pd(bits), _mm256_set1_pd(MAGIC));
}

static inline __m256d magnitude(__m256d values) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), values); }

static inline double largest_lane(__m256d values) {
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, values);
  return larger(larger(lanes[0], lanes[1]), larger(lanes[2], lanes[3]));
}

// 16 sums at a time; the conversion to int32 rounds to nearest even
static void finish_int16_narrow(const int64_t* sums, double factor, int lowest, int16_t* out, Tally& tally) {
  const __m256d scale = _mm256_set1_pd(factor), least = _mm256_set1_pd(-65536.0), most = _mm256_set1_pd(65536.0);
  const __m256i low = _mm256_set1_epi32(lowest), high = _mm256_set1_epi32(32767);
  __m256i fitting = _mm256_setzero_si256(), largest = fitting;
  __m256d largest_sum = _mm256_setzero_pd();
  for (int t = 0; t < TILE; t += 16) {
    __m128i rounded[4];
    for (int v = 0; v < 4; v++) {
      const __m256d sum = load_narrow(sums + t + 4 * v);
      largest_sum = _mm256_max_pd(largest_sum, magnitude(sum));
      rounded[v] = _mm256_cvtpd_epi32(_mm256_min_pd(_mm256_max_pd(_mm256_mul_pd(sum, scale), least), most));
    }
    __m256i fit[2];
    for (int h = 0; h < 2; h++) {
      const __m256i value = _mm256_set_m128i(rounded[2 * h + 1], rounded[2 * h]);
      fit[h] = _mm256_min_epi32(_mm256_max_epi32(value, low), high);
      fitting = _mm256_sub_epi32(fitting, _mm256_cmpeq_epi32(fit[h], value));
      largest = _mm256_max_epi32(largest, _mm256_abs_epi32(fit[h]));
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(fit[0], fit[1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + t), packed);
  }
  alignas(32) int32_t counts[8], mantissas[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(counts), fitting);
  _mm256_store_si256(reinterpret_cast<__m256i*>(mantissas), largest);
  tally.saturated += TILE;
  for (int l = 0; l < 8; l++) {
    tally.saturated -= counts[l];
    tally.largest_mantissa = larger(tally.largest_mantissa, int64_t{mantissas[l]});
  }
  tally.largest_sum = larger(tally.largest_sum, static_cast<int64_t>(largest_lane(largest_sum)));
}
#endif

static void note_sums(const int64_t* sums, bool narrow, Tally& tally) {
  int64_t largest = tally.largest_sum;
  int done = 0;
#if defined(__AVX2__)
  if (narrow) {
    __m256d most = _mm256_setzero_pd();
    for (; done < TILE; done += 4) most = _mm256_max_pd(most, magnitude(load_narrow(sums + done)));
    largest = larger(largest, static_cast<int64_t>(largest_lane(most)));
  }
#endif
  (void)narrow;
  for (; done < TILE; done++) largest = larger(largest, sums[done] < 0 ? -sums[done] : sums[done]);
  tally.largest_sum = largest;
}

// sum * 2^exponent to nearest even in integers, for sums that double cannot hold; what leaves +-65536 is cut there
static int32_t shift_rounded(int64_t sum, int exponent) {
  const bool negative = sum < 0;
  const uint64_t magnitude = negative ? -static_cast<uint64_t>(sum) : static_cast<uint64_t>(sum);
  uint64_t rounded;
  if (exponent >= 0) {
    rounded = magnitude == 0 ? 0 : exponent > 16 || magnitude > (65536u >> exponent) ? 65536u : magnitude << exponent;
  } else if (exponent < -63) {
    rounded = 0;
  } else {
    const uint64_t half = uint64_t{1} << (-exponent - 1), rest = magnitude & (2 * half - 1);
    rounded = magnitude / (2 * half);
    rounded += rest > half || (rest == half && (rounded & 1));
    rounded = rounded > 65536u ? 65536u : rounded;
  }
  return negative ? -static_cast<int32_t>(rounded) : static_cast<int32_t>(rounded);
}

static void finish_int16(const int64_t* sums, bool narrow, int exponent, int lowest, int16_t* out, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
#if defined(__AVX2__)
  if (narrow) return finish_int16_narrow(sums, scale, lowest, out, tally);
#endif
  alignas(64) int32_t rounded[TILE];
  if (narrow) {
    for (int t = 0; t < TILE; t++) {
      double value = narrow_to_double(sums[t]) * scale;
      value = value < -65536.0 ? -65536.0 : value;
      value = value > 65536.0 ? 65536.0 : value;
      rounded[t] = static_cast<int32_t>(double_to_bits(value + MAGIC));
    }
  } else {
    for (int t = 0; t < TILE; t++) rounded[t] = shift_rounded(sums[t], exponent);
  }
  int32_t saturated = 0, largest = 0;
  for (int t = 0; t < TILE; t++) {
    int32_t value = rounded[t];
    value = value < lowest ? lowest : value;
    value = value > 32767 ? 32767 : value;
    saturated += value != rounded[t];
    const int32_t magnitude = value < 0 ? -value : value;
    largest = magnitude > largest ? magnitude : largest;
    out[t] = static_cast<int16_t>(value);
  }
  tally.saturated += saturated;
  if (largest > tally.largest_mantissa) tally.largest_mantissa = largest;
  note_sums(sums, narrow, tally);
}

static void finish_float(const int64_t* sums, bool narrow, int exponent, float* out, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
  if (narrow) {
    for (int t = 0; t < TILE; t++) out[t] = static_cast<float>(narrow_to_double(sums[t]) * scale);
  } else {
    for (int t = 0; t < TILE; t++) {
      const bool exact = sums[t] >= -(int64_t{1} << 53) && sums[t] <= int64_t{1} << 53;
      out[t] = exact ? static_cast<float>(static_cast<double>(sums[t]) * scale)
                     : static_cast<float>(static_cast<double>(static_cast<float>(sums[t])) * scale);
    }
  }
  note_sums(sums, narrow, tally);
}

static void finish_double(const int64_t* sums, bool narrow, int exponent, double* out, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
  if (narrow) {
    for (int t = 0; t < TILE; t++) out[t] = narrow_to_double(sums[t]) * scale;
  } else {
    for (int t = 0; t < TILE; t++) out[t] = static_cast<double>(sums[t]) * scale;
  }
  note_sums(sums, narrow, tally);
}

static void finish_int64(const int64_t* sums, bool narrow, int64_t* out, Tally& tally) {
  std::memcpy(out, sums, sizeof(int64_t) * TILE);
  note_sums(sums, narrow, tally);
}

// Non-negative floats are ordered like their bits.
static inline int32_t magnitude_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}

static void finish_chained(const float* accumulators, int exponent, float* out, Tally& tally) {
  if (exponent >= -126 && exponent <= 127) {
    const float scale = std::ldexp(1.0f, exponent);
    for (int t = 0; t < TILE; t++) out[t] = accumulators[t] * scale;
  } else {
    const double scale = std::ldexp(1.0, exponent);
    for (int t = 0; t < TILE; t++) out[t] = static_cast<float>(static_cast<double>(accumulators[t]) * scale);
  }
  int32_t bits = 0;
  for (int t = 0; t < TILE; t++) bits = magnitude_bits(out[t]) > bits ? magnitude_bits(out[t]) : bits;
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  tally.largest_value = larger(tally.largest_value, double{largest});
}

// --------------------------------------------------------------------------------------------------------- transposing

static void interleave(const int16_t* from, int64_t from_stride, int64_t channels, int64_t positions, int16_t* to,
                       int64_t to_stride) {
  int64_t channel = 0;
#if defined(__AVX2__)
  for (; channel + 8 <= channels; channel += 8) {
    const int16_t* source = from + channel * from_stride;
    int64_t position = 0;
    for (; position + 8 <= positions; position += 8) {
      __m128i r[8], t[8];
      for (int i = 0; i < 8; i++)
        r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i * from_stride + position));
      for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
      }
      for (int h = 0; h < 2; h++) {
        r[4 * h] = _mm_unpacklo_epi32(t[4 * h], t[4 * h + 2]);
        r[4 * h + 1] = _mm_unpackhi_epi32(t[4 * h], t[4 * h + 2]);
        r[4 * h + 2] = _mm_unpacklo_epi32(t[4 * h + 1], t[4 * h + 3]);
        r[4 * h + 3] = _mm_unpackhi_epi32(t[4 * h + 1], t[4 * h + 3]);
      }
      for (int i = 0; i < 4; i++) {
        int16_t* target = to + (position + 2 * i) * to_stride + channel;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm_unpacklo_epi64(r[i], r[i + 4]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target + to_stride), _mm_unpackhi_epi64(r[i], r[i + 4]));
      }
    }
    for (; position < positions; position++)
      for (int i = 0; i < 8; i++) to[position * to_stride + channel + i] = source[i * from_stride + position];
  }
#endif
  for (; channel < channels; channel++)
    for (int64_t position = 0; position < positions; position++)
      to[position * to_stride + channel] = from[channel * from_stride + position];
}

static constexpr lowp::Micro make_micro(const char* name) {
  return {name,
          ROWS,
          COLUMNS,
          {ROWS, pack_lines<ROWS>, pack_rows<ROWS>, bound<ROWS>},
          {COLUMNS, pack_lines<COLUMNS>, pack_rows<COLUMNS>, bound<COLUMNS>},
          add_chained,
          add_exact,
          finish_chained,
          finish_int16,
          finish_float,
          finish_double,
          finish_int64,
          interleave};
}

}  // namespace
