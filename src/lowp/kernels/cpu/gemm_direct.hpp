// Sums of products of integers in fp64, exact below 2^53, for convolutions whose groups are too small to pack; included
// by gemm_tile.hpp. Vectors are written out: a compiler neither reorders these additions nor keeps arrays of sums in
// registers. Vectors are passed by reference, as not every ABI here passes them.

namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 8;
#elif defined(__AVX2__)
constexpr int WIDE = 4;
#else
constexpr int WIDE = 2;
#endif
typedef double Doubles __attribute__((vector_size(8 * WIDE)));
typedef int64_t Longs __attribute__((vector_size(8 * WIDE)));
typedef int32_t Words __attribute__((vector_size(4 * WIDE)));
typedef int16_t Shorts __attribute__((vector_size(2 * WIDE)));
typedef float Singles __attribute__((vector_size(4 * WIDE)));
static_assert(WIDE <= lowp::BEYOND, "a vector reaches further than memory");

static inline void read(Doubles& value, const double* from) { std::memcpy(&value, from, sizeof value); }

// sum += a * b, all exact
static inline void add_product(Doubles& sum, const Doubles& a, const Doubles& b) {
#if defined(__AVX512F__)
  sum = (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)sum);
#elif defined(__AVX2__)
  sum = (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)sum);
#else
  sum += a * b;
#endif
}

static inline void widen_vector(const int16_t* from, double* to) {
  Shorts value;
  std::memcpy(&value, from, sizeof value);
  const Doubles wide = __builtin_convertvector(__builtin_convertvector(value, Words), Doubles);
  std::memcpy(to, &wide, sizeof wide);
}

// to[i] = from[i * stride]
static void widen(const int16_t* from, int64_t stride, int64_t count, double* to) {
  int64_t i = 0;
  if (stride == 1 && count >= WIDE) {
    for (; i + WIDE <= count; i += WIDE) widen_vector(from + i, to + i);
    if (i < count) widen_vector(from + count - WIDE, to + count - WIDE);
    return;
  }
  if (stride == 2)
    for (; i < count; i++) to[i] = from[2 * i];
  for (; i < count; i++) to[i] = from[i * stride];
}

// out[0 .. WIDE * VECTORS) of correlate
template <int VECTORS>
static inline void correlate_lanes(const double* from, const int64_t* places, const double* weights, int64_t count,
                                   double* out) {
  Doubles sums[VECTORS];
  for (int v = 0; v < VECTORS; v++) sums[v] = Doubles{};
  for (int64_t i = 0; i < count; i++) {
    const double* row = from + places[i];
    const Doubles weight = Doubles{} + weights[i];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
      Doubles value;
      read(value, row + WIDE * v);
      add_product(sums[v], weight, value);
    }
  }
  std::memcpy(out, sums, sizeof sums);
}

// out[j] = sum over i < count of weights[i] * from[places[i] + j], j < length; reads and writes up to a vector beyond
static void correlate(const double* from, const int64_t* places, const double* weights, int64_t count, int64_t length,
                      double* out) {
  int64_t j = 0;
  for (; j + 8 * WIDE <= length; j += 8 * WIDE) correlate_lanes<8>(from + j, places, weights, count, out + j);
  for (; j + 3 * WIDE < length; j += 4 * WIDE) correlate_lanes<4>(from + j, places, weights, count, out + j);
  for (; j + WIDE < length; j += 2 * WIDE) correlate_lanes<2>(from + j, places, weights, count, out + j);
  for (; j < length; j += WIDE) correlate_lanes<1>(from + j, places, weights, count, out + j);
}

// sums[i] += sum of a[j] * b[places[i] + j], i < TAPS, j < length; reads up to a vector of b beyond
template <int TAPS>
static inline void add_dots(const double* a, const double* b, const int64_t* places, int64_t length, double* sums) {
  constexpr int TOGETHER = 4;  // vectors, so that additions do not wait for each other
  Doubles found[TAPS][TOGETHER];
  for (int i = 0; i < TAPS; i++)
    for (int v = 0; v < TOGETHER; v++) found[i][v] = Doubles{};
  Doubles left, right;
  int64_t j = 0;
  for (; j + TOGETHER * WIDE <= length; j += TOGETHER * WIDE)
#pragma GCC unroll 4
    for (int v = 0; v < TOGETHER; v++) {
      read(left, a + j + WIDE * v);
#pragma GCC unroll 3
      for (int i = 0; i < TAPS; i++) {
        read(right, b + places[i] + j + WIDE * v);
        add_product(found[i][v], left, right);
      }
    }
  for (; j < length; j += WIDE) {
    left = Doubles{};
    std::memcpy(&left, a + j, static_cast<size_t>(smaller(WIDE, length - j)) * sizeof *a);
    for (int i = 0; i < TAPS; i++) {
      read(right, b + places[i] + j);
      add_product(found[i][0], left, right);
    }
  }
  for (int i = 0; i < TAPS; i++) {
    const Doubles lanes = (found[i][0] + found[i][1]) + (found[i][2] + found[i][3]);
    for (int l = 0; l < WIDE; l++) sums[i] += lanes[l];
  }
}

// The same for `count` places; what is read beyond is finite.
static void dots(const double* a, const double* b, const int64_t* places, int64_t count, int64_t length, double* sums) {
  int64_t i = 0;
  for (; i + 3 <= count; i += 3) add_dots<3>(a, b, places + i, length, sums + i);
  for (; i < count; i++) add_dots<1>(a, b, places + i, length, sums + i);
}

// Numbers below 2^31 to nearest even.
static inline void round(Words& to, const Doubles& value) {
#if defined(__AVX512F__)
  to = (Words)_mm512_cvtpd_epi32((__m512d)value);
#elif defined(__AVX2__)
  to = (Words)_mm256_cvtpd_epi32((__m256d)value);
#else
  to = __builtin_convertvector((Longs)(value + MAGIC), Words);
#endif
}

// Calls visit(first, count) for each vector of `count` numbers, the last of which may be a part.
template <class Visit>
static inline void each_vector(int64_t count, Visit&& visit) {
  int64_t i = 0;
  for (; i + WIDE <= count; i += WIDE) visit(i, int64_t{WIDE});
  if (i < count) visit(i, count - i);
}

// Results of sums below 2^53, to which `addend` is added unless null, as finish_chained makes them.
static void finish_chained_line(const double* sums, int64_t count, int exponent, const double* addend, float* out,
                                Tally& tally) {
  const bool is_fp32 = exponent >= -126 && exponent <= 127;  // whether fp32 has 2^exponent
  const double scale = std::ldexp(1.0, exponent);
  const Singles by = Singles{} + static_cast<float>(scale);
  const Singles added = Singles{} + static_cast<float>(addend ? *addend : 0.0);
  Words largest{};  // the bits of magnitudes: non-negative floats are ordered like them
  each_vector(count, [&](int64_t i, int64_t here) __attribute__((always_inline)) {
    Doubles sum{};
    std::memcpy(&sum, sums + i, static_cast<size_t>(here) * sizeof *sums);
    Singles value = __builtin_convertvector(sum, Singles);
    if (is_fp32)
      value *= by;
    else
      value = __builtin_convertvector(__builtin_convertvector(value, Doubles) * scale, Singles);
    if (addend) value += added;
    for (int64_t l = here; l < WIDE; l++) value[l] = 0;
    const Words magnitude = (Words)value & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
    std::memcpy(out + i, &value, static_cast<size_t>(here) * sizeof *out);
  });
  int32_t bits = 0;
  for (int l = 0; l < WIDE; l++) bits = largest[l] > bits ? largest[l] : bits;
  tally.largest_value = larger(tally.largest_value, double{lowp::bit_cast<float>(bits)});
}

template <bool ADDS>
static inline void int16_line(const double* sums, int64_t count, double scale, double addend, int lowest, int16_t* out,
                              Tally& tally) {
  const Doubles least = Doubles{} - 65536.0, most = Doubles{} + 65536.0;
  const Words low = Words{} + lowest, high = Words{} + 32767;
  Doubles largest_values{};
  Words wrong{}, largest{};
  each_vector(count, [&](int64_t i, int64_t here) __attribute__((always_inline)) {
    Doubles sum{};
    std::memcpy(&sum, sums + i, static_cast<size_t>(here) * sizeof *sums);
    Doubles value = sum * scale;
    if (ADDS) value += addend;
    for (int64_t l = here; l < WIDE; l++) value[l] = 0;
    const Doubles counted = ADDS ? value : sum, magnitude = counted < 0.0 ? -counted : counted;
    largest_values = magnitude > largest_values ? magnitude : largest_values;
    value = value < least ? least : value;
    value = value > most ? most : value;
    Words rounded;
    round(rounded, value);
    Words fit = rounded < low ? low : rounded;
    fit = fit > high ? high : fit;
    wrong -= fit != rounded;
    const Words size = fit < 0 ? -fit : fit;
    largest = size > largest ? size : largest;
    const Shorts narrow = __builtin_convertvector(fit, Shorts);
    std::memcpy(out + i, &narrow, static_cast<size_t>(here) * sizeof *out);
  });
  double value = 0;
  for (int l = 0; l < WIDE; l++) {
    tally.saturated += wrong[l];
    tally.largest_mantissa = larger(tally.largest_mantissa, int64_t{largest[l]});
    value = larger(value, largest_values[l]);
  }
  note_largest<ADDS>(value, scale, tally);
}

// The same as finish_int16 makes them.
static void finish_int16_line(const double* sums, int64_t count, int exponent, const double* addend, int lowest,
                              int16_t* out, Tally& tally) {
  const double scale = std::ldexp(1.0, exponent);
  if (addend) return int16_line<true>(sums, count, scale, *addend, lowest, out, tally);
  int16_line<false>(sums, count, scale, 0.0, lowest, out, tally);
}

}  // namespace
