// The exact sum of a tile over a step, in int32 as far as the norms of its operands prove it sufficient; included by
// gemm_tile.hpp.

namespace {

using lowp::SAFE;
using lowp::Side;
using lowp::STEP;
using lowp::TOP_SHIFT;

// sums += the product over several chains
static __attribute__((noinline)) void add_chains(int rows, const int64_t* chains, int64_t count, const int32_t* a,
                                                 const int32_t* b, int64_t* accumulators) {
  alignas(64) int32_t tops[TILE], sums[TILE];
  multiply(rows, chains, count, a, b, tops, sums);
  if (count == 1) {
    for (int t = 0; t < rows * COLUMNS; t++) accumulators[t] += sums[t];
    return;
  }
  for (int t = 0; t < rows * COLUMNS; t++)
    accumulators[t] += static_cast<int64_t>(tops[t]) * (1 << TOP_SHIFT) + static_cast<int64_t>(sums[t]);
}

// The product of a panel of A and a panel of B over a part of a step, with the bounds of its chunks.
struct Part {
  Part(const Side& left, const Side& right, int64_t begin, int64_t count)
      : a(left), b(right), first(begin), pairs(count), chunks(lowp::divide_up(count, CHUNK_PAIRS)) {
    constexpr int64_t PER_BLOCK = BOUNDS - 1;
    for (int64_t chunk = 0; chunk < chunks; chunk += PER_BLOCK) {
      const int64_t block = (first / CHUNK_PAIRS + chunk) / PER_BLOCK * BOUNDS;
      for (int64_t c = 0; c < PER_BLOCK; c++) bounds[chunk + c] = a.bounds[block + 1 + c] * b.bounds[block + 1 + c];
    }
  }
  int64_t pair(int64_t chunk) const { return smaller(chunk * CHUNK_PAIRS, pairs); }
  int64_t unproven() const {
    int64_t count = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) count += !(bounds[chunk] < SAFE);
    return count;
  }

  const Side& a;
  const Side& b;
  const int64_t first, pairs, chunks;  // its start in the step, a multiple of BLOCK_PAIRS, and its length
  float bounds[STEP / CHUNK];          // of the chunks' products
};

// Splits chunks from `begin` on into the fewest chains that their norms prove safe, up to the first chunk that is not safe
// by itself, and returns that chunk.
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

// The end of the longest span from `chunk` on, within its block and up to `end`, whose digits approximate its sums
// sufficiently.
static inline int64_t near_end(const Side& a, const Side& b, int64_t chunk, int64_t end) {
  const int64_t block = chunk / (2 * HALF_CHUNKS), bound = block * BOUNDS;
  const float a_error = a.digits.errors[bound], b_error = b.digits.errors[bound];
  const float error = a_error * b.bounds[bound] + (a.bounds[bound] + a_error) * b_error;
  const int64_t length = error < NEAR ? 2 * HALF_CHUNKS : HALF_CHUNKS;
  return smaller((chunk / length + 1) * length, end);
}

// accumulators += the sums over chunks [begin, end) of the step, for any elements
static __attribute__((noinline)) void add_digits(const Side& a, const Side& b, int64_t begin, int64_t end,
                                                 int64_t* accumulators) {
  for (int64_t chunk = begin, next; chunk < end; chunk = next) {
    next = near_end(a, b, chunk, end);
    const Span span{chunk * CHUNK_PAIRS, smaller(next * CHUNK_PAIRS, a.count)};
    add_near(span, a.pairs, a.digits, b.pairs, b.digits, accumulators);
  }
}

// A part whose norms do not prove one chain safe: several chains if they are proven safe, digits for chunks that are not,
// and digits for all if there are many of these.
static __attribute__((noinline)) void add_carefully(const Part& part, int64_t* accumulators) {
  int64_t chains[STEP / CHUNK], count;
  const int64_t first = part.first / CHUNK_PAIRS;
  if (4 * part.unproven() > part.chunks) return add_digits(part.a, part.b, first, first + part.chunks, accumulators);
  for (int64_t begin = 0, end = 0; begin < part.chunks; begin = end) {
    end = cut_chains(part, begin, chains, &count);
    if (count > 0) {
      const int64_t from = part.first + part.pair(begin);
      add_chains(part.a.rows, chains, count, part.a.pairs + from * ROWS, part.b.pairs + from * COLUMNS, accumulators);
      continue;
    }
    while (end < part.chunks && !(part.bounds[end] < SAFE)) end++;
    add_digits(part.a, part.b, first + begin, first + end, accumulators);
  }
}

// accumulators += float(the exact sum of each block); with `begin` the accumulators count as zeros
static void add_chained(const Side& a, const Side& b, bool begin, float* accumulators) {
  alignas(64) int32_t tops[TILE];
  int64_t first = 0;
  do {
    const int64_t block = first / BLOCK_PAIRS, count = smaller(a.count - first, BLOCK_PAIRS);
    const int32_t *left = a.pairs + first * ROWS, *right = b.pairs + first * COLUMNS;
    if (count == 0 || a.bounds[block * BOUNDS] * b.bounds[block * BOUNDS] < SAFE) {
      multiply_block(a.rows, &count, 1, left, right, tops, begin, accumulators);
    } else {
      const Part part(a, b, first, count);
      int64_t chains[STEP / CHUNK], chain_count;
      if (cut_chains(part, 0, chains, &chain_count) == part.chunks) {
        multiply_block(a.rows, chains, chain_count, left, right, tops, begin, accumulators);
      } else {
        alignas(64) int64_t sums[TILE];
        std::memset(sums, 0, sizeof sums);
        add_carefully(part, sums);
        for (int t = 0; t < a.rows * COLUMNS; t++)
          accumulators[t] = (begin ? 0.0f : accumulators[t]) + static_cast<float>(narrow_to_double(sums[t]));
      }
    }
    begin = false;
    first += BLOCK_PAIRS;
  } while (first < a.count);
}

// A bound of all sums of a step: below SAFE, one chain holds them.
static inline float bound_of(const Side& a, const Side& b) {
  float total = 0;
  for (int64_t block = 0; block * BLOCK_PAIRS < a.count; block++)
    total += a.bounds[block * BOUNDS] * b.bounds[block * BOUNDS];
  return total;
}

// accumulators += the exact sum of the step; with `begin` the accumulators count as zeros
static void add_exact(const Side& a, const Side& b, bool begin, int64_t* accumulators) {
  if (!(bound_of(a, b) < SAFE)) {
    if (begin) std::memset(accumulators, 0, TILE * sizeof *accumulators);
    return add_carefully(Part(a, b, 0, a.count), accumulators);
  }
  alignas(64) int32_t sums[TILE];
  multiply(a.rows, &a.count, 1, a.pairs, b.pairs, nullptr, sums);
  for (int t = 0; t < a.rows * COLUMNS; t++) accumulators[t] = (begin ? 0 : accumulators[t]) + sums[t];
}

// The exact sums of a depth of one step as mantissas.
static void exact_int16(const Side& a, const Side& b, int exponent, const Addends& addends, int lowest,
                        const Place<int16_t>& to, Tally& tally) {
  alignas(64) int32_t tops[TILE], sums[TILE];
  if (bound_of(a, b) < SAFE) {
    multiply(a.rows, &a.count, 1, a.pairs, b.pairs, nullptr, sums);
    return finish_int16<const int32_t*>(sums, true, exponent, addends, lowest, to, tally);
  }
  const Part part(a, b, 0, a.count);
  int64_t chains[STEP / CHUNK], count;
  if (cut_chains(part, 0, chains, &count) == part.chunks) {
    multiply(a.rows, chains, count, a.pairs, b.pairs, tops, sums);
    if (count == 1) return finish_int16<const int32_t*>(sums, true, exponent, addends, lowest, to, tally);
    return finish_int16(ChainSums{tops, sums}, true, exponent, addends, lowest, to, tally);
  }
  alignas(64) int64_t wide[TILE];
  std::memset(wide, 0, sizeof wide);
  add_carefully(part, wide);
  finish_int16<const int64_t*>(wide, true, exponent, addends, lowest, to, tally);
}

}  // namespace
