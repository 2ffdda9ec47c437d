// Tiles of sums into rows of results `stride` apart, rounded once; included by gemm_tile.hpp.
#include <cmath>
#include <cstdlib>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "bits.hpp"

namespace {

using lowp::Addends;
using lowp::Place;
using lowp::Tally;

// 1.5 * 2^52: adding it to |x| < 2^51 leaves x, rounded to nearest even, in the low bits.
constexpr double MAGIC = 6755399441055744.0;

// a sum below 2^51
static inline double narrow_to_double(int64_t sum) { return lowp::bit_cast<double>(sum + 0x4338000000000000) - MAGIC; }

static inline double narrow_to_double(int32_t sum) { return sum; }

// Sums of several chains: 2^TOP_SHIFT * tops + rests.
struct ChainSums {
  const int32_t *tops, *rests;
  ChainSums operator+(int64_t t) const { return {tops + t, rests + t}; }
  int64_t operator[](int64_t t) const { return int64_t{tops[t]} * (1 << lowp::TOP_SHIFT) + rests[t]; }
};

// Expands numbers per row or per column to a tile; false if there are none.
static bool lay_out(const Addends& addends, int rows, double* added) {
  if (!addends.rows && !addends.columns) return false;
  for (int i = 0; i < rows; i++) {
    const double number = addends.rows ? addends.rows[i] : 0.0;
    for (int j = 0; j < COLUMNS; j++)
      added[i * COLUMNS + j] = j >= addends.count ? 0.0 : addends.columns ? addends.columns[j] : number;
  }
  return true;
}

// A magnitude in units of the sums, rounded up: nonzero unless the magnitude is zero.
static inline int64_t whole_units(double value, double factor) {
  const double units = std::ceil(value / factor);
  return units < 0x1p62 ? static_cast<int64_t>(units) : int64_t{1} << 62;
}

// Records the largest magnitude of a tile: of a value in units of the result, or of a sum.
template <bool ADDS>
static inline void note_largest(double largest, double factor, Tally& tally) {
  tally.largest_sum = larger(tally.largest_sum, ADDS ? whole_units(largest, factor) : static_cast<int64_t>(largest));
}

#if defined(__AVX2__)
// four sums below 2^51
static inline __m256d load_narrow(const int64_t* sums) {
  const __m256i bits = _mm256_add_epi64(_mm256_load_si256(reinterpret_cast<const __m256i*>(sums)),
                                        _mm256_set1_epi64x(0x4338000000000000));
  return _mm256_sub_pd(_mm256_castsi256_pd(bits), _mm256_set1_pd(MAGIC));
}

static inline __m256d load_narrow(const int32_t* sums) {
  return _mm256_cvtepi32_pd(_mm_load_si128(reinterpret_cast<const __m128i*>(sums)));
}

static inline __m256d load_narrow(const ChainSums& sums) {
  return _mm256_fmadd_pd(load_narrow(sums.tops), _mm256_set1_pd(1 << lowp::TOP_SHIFT), load_narrow(sums.rests));
}

static inline __m256d magnitude(__m256d values) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), values); }

static inline double largest_lane(__m256d values) {
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, values);
  return larger(larger(lanes[0], lanes[1]), larger(lanes[2], lanes[3]));
}

// The largest magnitude of 16 int16
static inline int64_t largest_lane(__m256i magnitudes) {
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
  return 0xffff - _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
}

// A tile without saturation, 16 sums at a time; the conversion to int32 rounds to nearest even. If a sum saturates, returns
// false, and the output must be replaced.
template <bool ADDS, class Sums>
static bool finish_int16_fitting(Sums sums, double factor, const double* added, const Place<int16_t>& to,
                                 Tally& tally) {
  const __m256d scale = _mm256_set1_pd(factor);
  __m256i largest = _mm256_setzero_si256();
  __m256d largest_values = _mm256_setzero_pd();
  for (int t = 0; t < to.rows * COLUMNS; t += 16) {
    __m128i rounded[4];
    for (int v = 0; v < 4; v++) {
      const __m256d sum = load_narrow(sums + t + 4 * v), scaled = _mm256_mul_pd(sum, scale);
      const __m256d value = ADDS ? _mm256_add_pd(scaled, _mm256_load_pd(added + t + 4 * v)) : scaled;
      largest_values = _mm256_max_pd(largest_values, magnitude(ADDS ? value : sum));
      rounded[v] = _mm256_cvtpd_epi32(value);
    }
    const __m256i both =
        _mm256_packs_epi32(_mm256_set_m128i(rounded[1], rounded[0]), _mm256_set_m128i(rounded[3], rounded[2]));
    largest = _mm256_max_epu16(largest, _mm256_abs_epi16(both));
    int16_t* out = to.out + t / COLUMNS * to.stride + t % COLUMNS;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(both, 0xd8));
  }
  const double largest_value = largest_lane(largest_values);
  if (!(largest_value * (ADDS ? 1.0 : factor) < 32767.0)) return false;
  tally.largest_mantissa = larger(tally.largest_mantissa, largest_lane(largest));
  note_largest<ADDS>(largest_value, factor, tally);
  return true;
}

// any other tile
template <bool ADDS, class Sums>
static void finish_int16_narrow(Sums sums, double factor, const double* added, int lowest,
                                const Place<int16_t>& to, Tally& tally) {
  const __m256d scale = _mm256_set1_pd(factor), least = _mm256_set1_pd(-65536.0), most = _mm256_set1_pd(65536.0);
  const __m256i low = _mm256_set1_epi32(lowest), high = _mm256_set1_epi32(32767);
  __m256i fitting = _mm256_setzero_si256(), largest = fitting;
  __m256d largest_values = _mm256_setzero_pd();
  for (int t = 0; t < to.rows * COLUMNS; t += 16) {
    __m128i rounded[4];
    for (int v = 0; v < 4; v++) {
      const __m256d sum = load_narrow(sums + t + 4 * v), scaled = _mm256_mul_pd(sum, scale);
      const __m256d value = ADDS ? _mm256_add_pd(scaled, _mm256_load_pd(added + t + 4 * v)) : scaled;
      largest_values = _mm256_max_pd(largest_values, magnitude(ADDS ? value : sum));
      rounded[v] = _mm256_cvtpd_epi32(_mm256_min_pd(_mm256_max_pd(value, least), most));
    }
    __m256i fit[2];
    for (int h = 0; h < 2; h++) {
      const __m256i value = _mm256_set_m128i(rounded[2 * h + 1], rounded[2 * h]);
      fit[h] = _mm256_min_epi32(_mm256_max_epi32(value, low), high);
      fitting = _mm256_sub_epi32(fitting, _mm256_cmpeq_epi32(fit[h], value));
      largest = _mm256_max_epi32(largest, _mm256_abs_epi32(fit[h]));
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(fit[0], fit[1]), 0xd8);
    int16_t* out = to.out + t / COLUMNS * to.stride + t % COLUMNS;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), packed);
  }
  alignas(32) int32_t counts[8], mantissas[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(counts), fitting);
  _mm256_store_si256(reinterpret_cast<__m256i*>(mantissas), largest);
  tally.saturated += to.rows * COLUMNS;
  for (int l = 0; l < 8; l++) {
    tally.saturated -= counts[l];
    tally.largest_mantissa = larger(tally.largest_mantissa, int64_t{mantissas[l]});
  }
  const double largest_value = largest_lane(largest_values);
  note_largest<ADDS>(largest_value, factor, tally);
}

template <bool ADDS, class Sums>
static void finish_int16_vectors(Sums sums, double factor, const double* added, int lowest,
                                 const Place<int16_t>& to, Tally& tally) {
  if (!finish_int16_fitting<ADDS>(sums, factor, added, to, tally))
    finish_int16_narrow<ADDS>(sums, factor, added, lowest, to, tally);
}
#endif

template <class Sums>
static void note_sums(Sums sums, int count, bool narrow, Tally& tally) {
  int64_t largest = tally.largest_sum;
  int done = 0;
#if defined(__AVX2__)
  if (narrow) {
    __m256d most = _mm256_setzero_pd();
    for (; done < count; done += 4) most = _mm256_max_pd(most, magnitude(load_narrow(sums + done)));
    largest = larger(largest, static_cast<int64_t>(largest_lane(most)));
  }
#endif
  (void)narrow;
  for (; done < count; done++) largest = larger(largest, std::abs(int64_t{sums[done]}));
  tally.largest_sum = largest;
}

// sum * 2^exponent to nearest even in integers, for sums that double cannot represent; clamped to +-65536
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

// A rounded value of fp64 below 2^51 as an integer, clamped to +-65536.
static inline int32_t to_int32(double value) {
  value = value < -65536.0 ? -65536.0 : value;
  value = value > 65536.0 ? 65536.0 : value;
  return static_cast<int32_t>(lowp::bit_cast<int64_t>(value + MAGIC));
}

// `narrow`: all sums are below 2^51
template <class Sums>
static void finish_int16(Sums sums, bool narrow, int exponent, const Addends& addends, int lowest,
                         const Place<int16_t>& to, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
  const int count = to.rows * COLUMNS;
  alignas(64) double added[TILE];
  const bool adds = lay_out(addends, to.rows, added);
#if defined(__AVX2__)
  if (narrow && adds) return finish_int16_vectors<true>(sums, scale, added, lowest, to, tally);
  if (narrow) return finish_int16_vectors<false>(sums, scale, added, lowest, to, tally);
#endif
  alignas(64) int32_t rounded[TILE];
  if (adds) {
    double largest = 0;
    for (int t = 0; t < count; t++) {
      const double value = (narrow ? narrow_to_double(sums[t]) : static_cast<double>(sums[t])) * scale + added[t];
      largest = larger(largest, value < 0 ? -value : value);
      rounded[t] = to_int32(value);
    }
    note_largest<true>(largest, scale, tally);
  } else if (narrow) {
    for (int t = 0; t < count; t++) rounded[t] = to_int32(narrow_to_double(sums[t]) * scale);
  } else {
    for (int t = 0; t < count; t++) rounded[t] = shift_rounded(sums[t], exponent);
  }
  int32_t saturated = 0, largest = 0;
  for (int t = 0; t < count; t++) {
    int32_t value = rounded[t];
    value = value < lowest ? lowest : value;
    value = value > 32767 ? 32767 : value;
    saturated += value != rounded[t];
    const int32_t magnitude = value < 0 ? -value : value;
    largest = magnitude > largest ? magnitude : largest;
    to.out[t / COLUMNS * to.stride + t % COLUMNS] = static_cast<int16_t>(value);
  }
  tally.saturated += saturated;
  if (largest > tally.largest_mantissa) tally.largest_mantissa = largest;
  if (!adds) note_sums(sums, count, narrow, tally);
}

// out = convert(sum) for each sum of a tile
template <class Sum, class Out, class Convert>
static inline void write_rows(const Sum* sums, const Place<Out>& to, Convert convert) {
  for (int i = 0; i < to.rows; i++)
    for (int j = 0; j < COLUMNS; j++) to.out[i * to.stride + j] = convert(sums[i * COLUMNS + j]);
}

static void finish_float(const int64_t* sums, bool narrow, int exponent, const Place<float>& to, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
  if (narrow) {
    write_rows(sums, to, [=](int64_t sum) { return static_cast<float>(narrow_to_double(sum) * scale); });
  } else {
    write_rows(sums, to, [=](int64_t sum) {
      const bool exact = sum >= -(int64_t{1} << 53) && sum <= int64_t{1} << 53;
      return exact ? static_cast<float>(static_cast<double>(sum) * scale)
                   : static_cast<float>(static_cast<double>(static_cast<float>(sum)) * scale);
    });
  }
  note_sums(sums, to.rows * COLUMNS, narrow, tally);
}

static void finish_double(const int64_t* sums, bool narrow, int exponent, const Place<double>& to, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
  if (narrow)
    write_rows(sums, to, [=](int64_t sum) { return narrow_to_double(sum) * scale; });
  else
    write_rows(sums, to, [=](int64_t sum) { return static_cast<double>(sum) * scale; });
  note_sums(sums, to.rows * COLUMNS, narrow, tally);
}

static void finish_int64(const int64_t* sums, bool narrow, const Place<int64_t>& to, Tally& tally) {
  write_rows(sums, to, [](int64_t sum) { return sum; });
  note_sums(sums, to.rows * COLUMNS, narrow, tally);
}

typedef float FloatLanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));
constexpr int FLOAT_LANES = 8;

// Writes convert(sums), and numbers added to them; by reference, as not every ABI here passes such vectors.
template <bool ADDS, class Convert>
static inline void finish_chained_as(const float* sums, const double* added, const Place<float>& to, Tally& tally,
                                     Convert convert) {
  IntLanes largest{};  // the bits of magnitudes: non-negative floats are ordered like them
  for (int t = 0; t < to.rows * COLUMNS; t += FLOAT_LANES) {
    FloatLanes value;
    std::memcpy(&value, sums + t, sizeof value);
    convert(value);
    if (ADDS)
      for (int l = 0; l < FLOAT_LANES; l++) value[l] += static_cast<float>(added[t + l]);
    std::memcpy(to.out + t / COLUMNS * to.stride + t % COLUMNS, &value, sizeof value);
    const IntLanes magnitude = (IntLanes)value & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t bits = 0;
  for (int l = 0; l < FLOAT_LANES; l++) bits = largest[l] > bits ? largest[l] : bits;
  tally.largest_value = larger(tally.largest_value, double{lowp::bit_cast<float>(bits)});
}

template <class Convert>
static inline void finish_chained_with(const float* sums, const Addends& addends, const Place<float>& to, Tally& tally,
                                       Convert convert) {
  alignas(64) double added[TILE];
  if (lay_out(addends, to.rows, added)) return finish_chained_as<true>(sums, added, to, tally, convert);
  finish_chained_as<false>(sums, added, to, tally, convert);
}

static void finish_chained(const float* sums, int exponent, const Addends& addends, const Place<float>& to,
                           Tally& tally) {
  if (exponent >= -126 && exponent <= 127) {
    const float scale = std::ldexp(1.0f, exponent);
    finish_chained_with(sums, addends, to, tally, [=](FloatLanes& values) { values *= scale; });
  } else {
    const double scale = std::ldexp(1.0, exponent);
    finish_chained_with(sums, addends, to, tally, [=](FloatLanes& values) {
      for (int l = 0; l < FLOAT_LANES; l++) values[l] = static_cast<float>(static_cast<double>(values[l]) * scale);
    });
  }
}

}  // namespace
