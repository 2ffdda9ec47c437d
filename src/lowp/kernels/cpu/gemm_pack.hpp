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

#if defined(__AVX2__)
// Adds the four rows of six numbers a0..a5 b0..b5 c0..c5 d0..d5 in three registers.
static inline void fold_rows_of_six(const __m256i* rows, uint32_t* totals) {
  const auto low = [](__m256i x) { return _mm256_castsi256_si128(x); };
  const auto high = [](__m256i x) { return _mm256_extracti128_si256(x, 1); };
  const __m128i ac03 = _mm_add_epi32(low(rows[0]), high(rows[1]));
  const __m128i ac45_bd01 = _mm_add_epi32(high(rows[0]), low(rows[2]));
  const __m128i bd25 = _mm_add_epi32(low(rows[1]), high(rows[2]));
  const __m128i bd03 = _mm_unpacklo_epi64(_mm_unpackhi_epi64(ac45_bd01, ac45_bd01), bd25);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(totals), _mm_add_epi32(ac03, bd03));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(totals + 4),
                   _mm_add_epi32(ac45_bd01, _mm_unpackhi_epi64(bd25, bd25)));
}
#endif

// totals[w] += the sum of squares of column w over some pairs, in units of 256, rounded up: a pair's squares sum to at
// most 2^31, so 128 pairs stay below 2^30 + 128.
template <int WIDTH>
static inline void add_squares(int64_t pairs, const int32_t* panel, uint32_t* totals) {
  int64_t done = 0;
#if defined(__AVX512BW__)
  if constexpr (WIDTH % 16 == 0) {
    for (int v = 0; v < WIDTH; v += 16) {
      __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(totals + v), _mm512_set1_epi32(static_cast<int>(pairs)));
      for (int64_t k = 0; k < pairs; k++) {
        const __m512i x = _mm512_loadu_si512(panel + k * WIDTH + v);
        sum = _mm512_add_epi32(sum, _mm512_srli_epi32(_mm512_madd_epi16(x, x), 8));
      }
      _mm512_storeu_si512(totals + v, sum);
    }
    return;
  }
#endif
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
    if constexpr (WIDTH == 6) {
      fold_rows_of_six(sums, lanes);
      for (int w = 0; w < WIDTH; w++) totals[w] += lanes[w];
    } else {
      for (int v = 0; v < PERIOD / 8; v++) _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8 * v), sums[v]);
      for (int l = 0; l < PERIOD; l++) totals[l % WIDTH] += lanes[l];
    }
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
