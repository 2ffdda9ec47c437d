// Pairs of int16 from two lines, and panels copied from such pairs; included by gemm_tile.hpp.
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using lowp::Run;

static void pair_lines(const int16_t* even, const int16_t* odd, int64_t count, int32_t* to) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 16 <= count; i += 16) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + i));
    const __m256i b = odd ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + i)) : _mm256_setzero_si256();
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i + 8), _mm256_permute2x128_si256(low, high, 0x31));
  }
#endif
  for (; i < count; i++) to[i] = pair_of(even[i], odd ? odd[i] : int16_t{0});
}

// `lanes` int32 and, for wider vectors, at most OVERRUN more
static inline void copy_lanes(const int32_t* from, int64_t lanes, int32_t* to) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < lanes; i += 16) _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
  for (int64_t i = 0; i < lanes; i += 8)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
  for (int64_t i = 0; i < lanes; i++) to[i] = from[i];
#endif
}

// Elements written beyond the end of a run are overwritten by the next run or row.
template <int WIDTH>
static void copy_runs(const int32_t* pairs, const int64_t* offsets, int64_t count, const Run* runs, int64_t run_count,
                      int32_t* panel) {
  if (run_count == 1 && runs[0].length == WIDTH) {
    for (int64_t k = 0; k < count; k++) copy_lanes(pairs + offsets[k] + runs[0].place, WIDTH, panel + k * WIDTH);
    return;
  }
  for (int64_t k = 0; k < count; k++)
    for (int64_t r = 0; r < run_count; r++)
      copy_lanes(pairs + offsets[k] + runs[r].place, runs[r].length, panel + k * WIDTH + runs[r].column);
  const int64_t filled = runs[run_count - 1].column + runs[run_count - 1].length;
  if (filled < WIDTH)
    for (int64_t k = 0; k < count; k++)
      std::memset(panel + k * WIDTH + filled, 0, static_cast<size_t>(WIDTH - filled) * sizeof *panel);
}

}  // namespace
