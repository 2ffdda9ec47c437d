// Packing the operands of a product into panels, with the bounds of their norms; included by gemm_tile.hpp.
#include <cmath>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using lowp::BLOCK;
using lowp::BOUNDS;
using lowp::CHUNK;

constexpr int64_t BLOCK_PAIRS = BLOCK / 2;
constexpr int64_t CHUNK_PAIRS = CHUNK / 2;

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

// 4 x 4 numbers in each half
static inline void transpose_lanes(__m256i r[4]) {
  const __m256i low = _mm256_unpacklo_epi32(r[0], r[1]), high = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i low2 = _mm256_unpacklo_epi32(r[2], r[3]), high2 = _mm256_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm256_unpacklo_epi64(low, low2), r[1] = _mm256_unpackhi_epi64(low, low2);
  r[2] = _mm256_unpacklo_epi64(high, high2), r[3] = _mm256_unpackhi_epi64(high, high2);
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
    if (done + 8 > length) continue;
    const auto eight = [&](int i) {
      const int16_t* line = i < lanes ? lines[first + i] : nullptr;
      return line ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + done)) : _mm_setzero_si128();
    };
    __m256i r[4];
    for (int i = 0; i < 4; i++) r[i] = _mm256_set_m128i(eight(i + 4), eight(i));
    transpose_lanes(r);
    for (int i = 0; i < 4; i++) store_lanes(panel + (done / 2 + i) * WIDTH + first, r[i], lanes);
    done += 8;
  }
#endif
  for (int64_t k = done; k < length; k += 2) {
    for (int w = 0; w < WIDTH; w++) {
      const int16_t* line = lines[w];
      panel[k / 2 * WIDTH + w] = line ? pair_of(line[k], k + 1 < length ? line[k + 1] : int16_t{0}) : 0;
    }
  }
}

// `count` elements of two neighbouring k as pairs.
static inline void pair_up(const int16_t* even, const int16_t* odd, int64_t count, int32_t* to) {
  int64_t done = 0;
#if defined(__AVX2__)
  for (; done + 8 <= count; done += 8) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even + done));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd + done));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done), _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done + 4), _mm_unpackhi_epi16(a, b));
  }
  if (done + 4 <= count) {
    const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(even + done));
    const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(odd + done));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + done), _mm_unpacklo_epi16(a, b));
    done += 4;
  }
#endif
  for (; done < count; done++) to[done] = pair_of(even[done], odd[done]);
}

#if defined(__AVX2__)
// The same of a whole row of a panel.
template <int WIDTH>
static inline void pair_up_row(const int16_t* even, const int16_t* odd, int32_t* to) {
  constexpr int WHOLE = WIDTH / 16 * 16;
  for (int done = 0; done < WHOLE; done += 16) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + done));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + done));
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + done), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + done + 8), _mm256_permute2x128_si256(low, high, 0x31));
  }
  pair_up(even + WHOLE, odd + WHOLE, WIDTH - WHOLE, to + WHOLE);
}
#endif

template <int WIDTH>
static void pack_rows(const int16_t* source, const int64_t* offsets, int64_t length, int64_t count, int32_t* panel) {
  int64_t k = 0;
#if defined(__AVX2__)
  if (count >= WIDTH) {
    for (; k + 1 < length; k += 2)
      pair_up_row<WIDTH>(source + offsets[k], source + offsets[k + 1], panel + k / 2 * WIDTH);
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

template <int WIDTH>
static void pack_some_rows(const int16_t* source, const int64_t* offsets, int64_t length, int64_t count,
                           int32_t* panel) {
  static const int16_t none[64] = {};
  for (int64_t k = 0; k < length; k += 2, panel += WIDTH) {
    const int16_t *even = source + offsets[k], *odd = k + 1 < length ? source + offsets[k + 1] : none;
    pair_up(even, odd, count, panel);
  }
}

// The sum of squares of each column over some pairs, in units of 256, rounded up: a pair's squares sum to at most 2^31, so
// 128 pairs stay below 2^30 + 128. `add` returns the largest sum over pairs of up to a chunk, and adds the sums to those of
// the block.
#if defined(__AVX2__)
template <int WIDTH>
class Squares {
 public:
  Squares() {
    for (auto& total : totals_) total = zero();
  }

  uint32_t add(int64_t pairs, const int32_t* panel) {
    Lanes sums[VECTORS];
    for (auto& sum : sums) sum = all(static_cast<int>(pairs));
    if (pairs == CHUNK_PAIRS) {
#pragma GCC unroll 8
      for (int k = 0; k < CHUNK_PAIRS; k++) add_row(panel + k * WIDTH, sums);
    } else {
      for (int64_t k = 0; k < pairs; k++) add_row(panel + k * WIDTH, sums);
    }
    for (int v = 0; v < VECTORS; v++) totals_[v] = plus(totals_[v], sums[v]);
    return largest_of(sums);
  }

  uint32_t largest() const { return largest_of(totals_); }

 private:
#if defined(__AVX512BW__)
  typedef __m512i Lanes;
  static constexpr int COUNT = 16;
  static Lanes zero() { return _mm512_setzero_si512(); }
  static Lanes all(int x) { return _mm512_set1_epi32(x); }
  static Lanes plus(Lanes a, Lanes b) { return _mm512_add_epi32(a, b); }
  static Lanes maximum(Lanes a, Lanes b) { return _mm512_max_epu32(a, b); }
  static Lanes square(Lanes x) { return _mm512_srli_epi32(_mm512_madd_epi16(x, x), 8); }
  template <int PRESENT>
  static Lanes load(const int32_t* from) {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << PRESENT) - 1), from);
  }
  static uint32_t largest_lane(Lanes x) { return _mm512_reduce_max_epu32(x); }
#else
  typedef __m256i Lanes;
  static constexpr int COUNT = 8;
  static Lanes zero() { return _mm256_setzero_si256(); }
  static Lanes all(int x) { return _mm256_set1_epi32(x); }
  static Lanes plus(Lanes a, Lanes b) { return _mm256_add_epi32(a, b); }
  static Lanes maximum(Lanes a, Lanes b) { return _mm256_max_epu32(a, b); }
  static Lanes square(Lanes x) { return _mm256_srli_epi32(_mm256_madd_epi16(x, x), 8); }
  template <int PRESENT>
  static Lanes load(const int32_t* from) {
    if (PRESENT == COUNT) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_maskload_epi32(from, _mm256_cmpgt_epi32(all(PRESENT), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  }
  static uint32_t largest_lane(Lanes x) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
  }
#endif
  static constexpr int VECTORS = (WIDTH + COUNT - 1) / COUNT;

  // lanes beyond the columns have zeros, whose sums are no larger than those of any column
  static void add_row(const int32_t* row, Lanes* sums) {
    for (int v = 0; v + 1 < VECTORS; v++) sums[v] = plus(sums[v], square(load<COUNT>(row + v * COUNT)));
    constexpr int LAST = VECTORS - 1;
    sums[LAST] = plus(sums[LAST], square(load<WIDTH - LAST * COUNT>(row + LAST * COUNT)));
  }

  static uint32_t largest_of(const Lanes* sums) {
    Lanes most = sums[0];
    for (int v = 1; v < VECTORS; v++) most = maximum(most, sums[v]);
    return largest_lane(most);
  }

  Lanes totals_[VECTORS];
};
#else
template <int WIDTH>
class Squares {
 public:
  uint32_t add(int64_t pairs, const int32_t* panel) {
    uint32_t sums[WIDTH] = {};
    for (int64_t k = 0; k < pairs; k++) {
      for (int w = 0; w < WIDTH; w++) {
        const int32_t pair = panel[k * WIDTH + w];
        const int32_t even = static_cast<int16_t>(pair & 0xffff), odd = pair >> 16;
        sums[w] += ((static_cast<uint32_t>(even * even) + static_cast<uint32_t>(odd * odd)) >> 8) + 1;
      }
    }
    for (int w = 0; w < WIDTH; w++) totals_[w] += sums[w];
    return largest_of(sums);
  }

  uint32_t largest() const { return largest_of(totals_); }

 private:
  static uint32_t largest_of(const uint32_t* sums) {
    uint32_t most = 0;
    for (int w = 0; w < WIDTH; w++) most = sums[w] > most ? sums[w] : most;
    return most;
  }

  uint32_t totals_[WIDTH] = {};
};
#endif

// bounds[0] = max over the panel's columns of the norm over the block; bounds[1 + c] = the same for its chunk c
template <int WIDTH>
static void bound(int64_t pairs, const int32_t* panel, float* bounds) {
  for (int64_t block = 0; block < pairs; block += BLOCK_PAIRS, bounds += BOUNDS) {
    const int64_t count = pairs - block < BLOCK_PAIRS ? pairs - block : BLOCK_PAIRS;
    Squares<WIDTH> squares;
    int32_t largest[BOUNDS] = {};  // below 2^31
    for (int64_t k = 0, c = 1; k < count; k += CHUNK_PAIRS, c++) {
      const int64_t present = count - k < CHUNK_PAIRS ? count - k : CHUNK_PAIRS;
      largest[c] = static_cast<int32_t>(squares.add(present, panel + (block + k) * WIDTH));
    }
    largest[0] = static_cast<int32_t>(squares.largest());
    for (int i = 0; i < BOUNDS; i++)
      bounds[i] = static_cast<float>(std::sqrt(static_cast<double>(largest[i]) * 256.0)) * 1.0000005f;
  }
}

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

}  // namespace
