// Sums that no norm proves to fit int32, exactly; included by gemm_tile.hpp.
//
// int32 arithmetic gives a sum S of products modulo 2^32 for any operands, so an approximation of S to less than 2^31
// determines it. Seven leading bits of each operand are sufficient: with u = floor(x / 512) + 64, a digit in 0..127, x is
// 512 u - 32512 + e, e in -256..255. Over L elements of a and b, with digits u and v,
//   sum of a * b  ~  2^16 * sum of (2u - 127) (2v - 127)  =  2^17 * (2 sum u (v - 64) + sum u - 127 sum v + 16129/2 L)
// with the difference sum (e_a b + (a - e_a) e_b). Its magnitude is at most ||e_a|| ||b|| + (||a|| + ||e_a||) ||e_b||, by
// Cauchy-Schwarz, and at most L * 256 * (32768 + 32512): below 2^31 for half a block of any elements. Sums of two products
// of digits fit 16 bits, so that this takes about half the time of another product of int16.

namespace {

using lowp::Digits;

constexpr int DIGIT_SHIFT = 17;
constexpr int64_t HALF_CHUNKS = (BOUNDS - 1) / 2;

// Below this bound rounding removes the error: 2^31 minus 2^20, a margin for fractions omitted by the integers here.
constexpr float NEAR = 2146435072.0f;

static inline uint32_t digits_of(int32_t pair) {
  const uint32_t raised = static_cast<uint32_t>(pair) ^ 0x80008000u;
  return (raised >> 9 & 0x7fu) | (raised >> 17 & 0x7f00u);
}

// four digits minus 64, as signed bytes
static inline uint32_t centred(uint32_t digits) { return ((digits | 0x80808080u) - 0x40404040u) ^ 0x80808080u; }

// both e of a pair
static inline int32_t rest_of(int32_t pair) {
  const uint32_t rest = (static_cast<uint32_t>(pair) & 0x01ff01ffu) | 0x80008000u;
  return static_cast<int32_t>((rest - 0x01000100u) ^ 0x80008000u);
}

// Combines two rows of digits to a row of groups and adds them to `totals`, two sums of 16 bits each.
template <int WIDTH, bool CENTRED>
static inline void join_rows(const uint32_t* rows, uint32_t* groups, uint32_t* totals) {
  for (int w = 0; w < WIDTH; w++) {
    const uint32_t digits = rows[w] | rows[WIDTH + w] << 16;
    totals[w] += (digits & 0x00ff00ffu) + (digits >> 8 & 0x00ff00ffu);
    groups[w] = CENTRED ? centred(digits) : digits;
  }
}

// Reads the digits of a panel, CENTRED (b) or not (a), their sums before each chunk, and the bounds of the e; an odd
// last pair is filled with zeros.
template <int WIDTH, bool CENTRED>
static void read_digits(int64_t pairs, const int32_t* panel, const Digits& to) {
  alignas(64) int32_t rests[BLOCK_PAIRS * WIDTH];
  alignas(64) uint32_t digits[BLOCK_PAIRS * WIDTH];
  uint32_t* groups = reinterpret_cast<uint32_t*>(to.groups);
  int32_t* sums = to.sums;
  for (int w = 0; w < WIDTH; w++) sums[w] = 0;
  for (int64_t block = 0; block < pairs; block += BLOCK_PAIRS, panel += BLOCK_PAIRS * WIDTH) {
    const int64_t count = smaller(pairs - block, BLOCK_PAIRS), even = (count + 1) / 2 * 2;
    for (int64_t t = 0; t < count * WIDTH; t++) {
      digits[t] = digits_of(panel[t]);
      rests[t] = rest_of(panel[t]);
    }
    for (int64_t t = count * WIDTH; t < even * WIDTH; t++) {
      digits[t] = digits_of(0);
      rests[t] = rest_of(0);
    }
    for (int64_t chunk = 0; chunk < even; chunk += CHUNK_PAIRS, sums += WIDTH) {
      uint32_t totals[WIDTH] = {};  // two sums of 16 bits
      for (int64_t k = chunk; k < smaller(chunk + CHUNK_PAIRS, even); k += 2, groups += WIDTH)
        join_rows<WIDTH, CENTRED>(digits + k * WIDTH, groups, totals);
      for (int w = 0; w < WIDTH; w++)
        sums[WIDTH + w] = sums[w] + static_cast<int32_t>((totals[w] & 0xffffu) + (totals[w] >> 16));
    }
    bound<WIDTH>(even, rests, to.errors + block / BLOCK_PAIRS * BOUNDS);
  }
}

// Pairs [begin, end) of a step, both multiples of CHUNK_PAIRS unless the step ends there.
struct Span {
  int64_t begin, end;
  int64_t groups() const { return (end - begin + 1) / 2; }
};

#if defined(__AVX2__)
// eight elements of add_near, which is in plain C++ below
static inline void add_wrapped(const int32_t* low, const int32_t* high, int32_t row, const int32_t* column,
                               int64_t* accumulators) {
  const auto load = [](const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); };
  const __m256i l = load(low), h = load(high);
  const __m256i sides = _mm256_add_epi32(load(column), _mm256_set1_epi32(row));
  const __m256i about = _mm256_add_epi32(_mm256_add_epi32(h, h), sides);
  const __m256i wraps =
      _mm256_srai_epi32(_mm256_sub_epi32(about, _mm256_srai_epi32(l, DIGIT_SHIFT)), 32 - DIGIT_SHIFT);
  const __m256i top = _mm256_add_epi32(wraps, _mm256_srai_epi32(l, 31));
  const __m256i even = _mm256_unpacklo_epi32(l, top), odd = _mm256_unpackhi_epi32(l, top);
  __m256i* to = reinterpret_cast<__m256i*>(accumulators);
  _mm256_store_si256(to, _mm256_add_epi64(load(to), _mm256_permute2x128_si256(even, odd, 0x20)));
  _mm256_store_si256(to + 1, _mm256_add_epi64(load(to + 1), _mm256_permute2x128_si256(even, odd, 0x31)));
}
#endif

// accumulators += the sums over a span with sufficiently small errors
static inline void add_near(const Span& span, const int32_t* a, const Digits& a_digits, const int32_t* b,
                            const Digits& b_digits, int64_t* accumulators) {
  alignas(64) int32_t low[TILE], high[TILE], row[ROWS], column[COLUMNS];
  const int64_t pairs = span.end - span.begin;
  multiply(ROWS, &pairs, 1, a + span.begin * ROWS, b + span.begin * COLUMNS, nullptr, low);
  approximate(span.groups(), a_digits.groups + span.begin / 2 * ROWS, b_digits.groups + span.begin / 2 * COLUMNS, high);
  const int64_t from = span.begin / CHUNK_PAIRS, to = lowp::divide_up(span.end, CHUNK_PAIRS);
  const int32_t* a_sums = a_digits.sums;
  const int32_t* b_sums = b_digits.sums;
  const int32_t constant = static_cast<int32_t>(16129 * 2 * span.groups()) + (1 << (31 - DIGIT_SHIFT));
  for (int i = 0; i < ROWS; i++) row[i] = a_sums[to * ROWS + i] - a_sums[from * ROWS + i];
  for (int j = 0; j < COLUMNS; j++)
    column[j] = constant - 127 * (b_sums[to * COLUMNS + j] - b_sums[from * COLUMNS + j]);
#if defined(__AVX2__)
  for (int t = 0; t < TILE; t += 8)
    add_wrapped(low + t, high + t, row[t / COLUMNS], column + t % COLUMNS, accumulators + t);
#else
  for (int t = 0; t < TILE; t++) {
    const int32_t about = 2 * high[t] + row[t / COLUMNS] + column[t % COLUMNS];
    const int32_t wraps = (about - (low[t] >> DIGIT_SHIFT)) >> (32 - DIGIT_SHIFT);
    accumulators[t] += static_cast<int64_t>(wraps) * (int64_t{1} << 32) + static_cast<int64_t>(low[t]);
  }
#endif
}

}  // namespace
