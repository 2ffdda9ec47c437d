// multiply and multiply_block (gemm_tile.hpp) for instruction sets that multiply a vector of pairs of int16. A tile is two
// vectors of columns wide, and its 2 * ROWS sums stay in registers; for tiles with fewer rows, two thirds or one third of
// them. The including file defines ROWS and LANES, the int32 of a vector, in an anonymous namespace before it includes this
// file, and the functions declared here after it.

namespace {

constexpr int COLUMNS = 2 * LANES;

typedef uint32_t Ints __attribute__((vector_size(4 * LANES)));  // unsigned: sums are taken modulo 2^32
typedef int32_t SignedInts __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef double HalfDoubles __attribute__((vector_size(4 * LANES)));  // half as many lanes

// sums + the sum of the two products of the pairs of int16 in each lane of a and b
inline Ints add_pairs(Ints sums, Ints a, Ints b);
// Half of the lanes, the lower (0) or the upper (1), as signed numbers in fp64.
template <int half>
inline HalfDoubles widened(Ints lanes);
// a * b + c, rounded once
inline HalfDoubles multiply_add(HalfDoubles a, HalfDoubles b, HalfDoubles c);
// Both halves, rounded to fp32.
inline Floats narrowed(HalfDoubles lower, HalfDoubles upper);

inline Ints load(const int32_t* from) {
  Ints lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline void store(int32_t* to, Ints lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// The same lane everywhere.
inline Ints broadcast(int32_t lane) { return Ints{} + static_cast<uint32_t>(lane); }

template <int HEIGHT>
inline void clear(Ints (&c)[HEIGHT][2]) {
#pragma GCC unroll ROWS
  for (int i = 0; i < HEIGHT; i++) c[i][0] = c[i][1] = Ints{};
}

template <int HEIGHT>
inline void store_tile(int32_t* sums, const Ints (&c)[HEIGHT][2]) {
#pragma GCC unroll ROWS
  for (int i = 0; i < HEIGHT; i++) {
    store(sums + i * COLUMNS, c[i][0]);
    store(sums + i * COLUMNS + LANES, c[i][1]);
  }
}

// c = add(c, lanes of a, lanes of b) over `count` steps of depth.
template <Ints (*add)(Ints, Ints, Ints), int HEIGHT>
inline __attribute__((always_inline)) void add_depth(Ints (&c)[HEIGHT][2], int64_t count, const int32_t* a,
                                                     const int32_t* b) {
  for (int64_t k = 0; k < count; k++, a += ROWS, b += COLUMNS) {
    const Ints left = load(b), right = load(b + LANES);
#pragma GCC unroll ROWS
    for (int i = 0; i < HEIGHT; i++) {
      const Ints lane = broadcast(a[i]);
      c[i][0] = add(c[i][0], lane, left);
      c[i][1] = add(c[i][1], lane, right);
    }
  }
}

// All chains; sums count as 0 unless `kept`.
template <int HEIGHT>
inline __attribute__((always_inline)) void sum_chains(Ints (&c)[HEIGHT][2], const int64_t* chains, int64_t count,
                                                      const int32_t* a, const int32_t* b, int32_t* tops) {
  Ints kept = Ints{};  // the first chain has no tops
  for (int64_t chain = 0; chain < count; a += chains[chain] * ROWS, b += chains[chain] * COLUMNS, chain++) {
    if (chain > 0) {
#pragma GCC unroll ROWS
      for (int i = 0; i < HEIGHT; i++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          int32_t* top = tops + i * COLUMNS + LANES * h;
          store(top, (load(top) & kept) + (Ints)((SignedInts)c[i][h] >> lowp::TOP_SHIFT));
          c[i][h] &= (1 << lowp::TOP_SHIFT) - 1;
        }
      }
      kept = ~Ints{};
    }
    add_depth<add_pairs>(c, chains[chain], a, b);
  }
}

// Not inlined, since next to other vector code the sums would be spilled.
template <int HEIGHT>
__attribute__((noinline, noclone)) void multiply_rows(const int64_t* chains, int64_t count, const int32_t* __restrict a,
                                                      const int32_t* __restrict b, int32_t* __restrict tops,
                                                      int32_t* __restrict sums) {
  Ints c[HEIGHT][2];
  clear(c);
  sum_chains(c, chains, count, a, b, tops);
  store_tile(sums, c);
}

inline void multiply(int rows, const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b, int32_t* tops,
                     int32_t* sums) {
  if (rows > 2 * ROWS / 3) return multiply_rows<ROWS>(chains, count, a, b, tops, sums);
  if (rows > ROWS / 3) return multiply_rows<2 * ROWS / 3>(chains, count, a, b, tops, sums);
  multiply_rows<ROWS / 3>(chains, count, a, b, tops, sums);
}

// sums + 2^TOP_SHIFT * tops as fp32: exact in fp64, and rounded once
inline Floats joined(Ints sums, Ints tops) {
  const HalfDoubles shift = HalfDoubles{} + (1 << lowp::TOP_SHIFT);
  return narrowed(multiply_add(widened<0>(tops), shift, widened<0>(sums)),
                  multiply_add(widened<1>(tops), shift, widened<1>(sums)));
}

inline void add_to(float* sums, Ints kept, Floats sum) {
  Ints before;
  std::memcpy(&before, sums, sizeof before);
  const Floats after = (Floats)(before & kept) + sum;
  std::memcpy(sums, &after, sizeof after);
}

template <int HEIGHT>
__attribute__((noinline, noclone)) void multiply_block_rows(const int64_t* chains, int64_t count,
                                                            const int32_t* __restrict a, const int32_t* __restrict b,
                                                            int32_t* __restrict tops, bool begin,
                                                            float* __restrict sums) {
  Ints c[HEIGHT][2];
  clear(c);
  sum_chains(c, chains, count, a, b, tops);
  const Ints kept = begin ? Ints{} : ~Ints{};
  if (count == 1) {
#pragma GCC unroll 2 * ROWS
    for (int v = 0; v < 2 * HEIGHT; v++)
      add_to(sums + LANES * v, kept, __builtin_convertvector((SignedInts)c[v / 2][v % 2], Floats));
  } else {
#pragma GCC unroll 2 * ROWS
    for (int v = 0; v < 2 * HEIGHT; v++)
      add_to(sums + LANES * v, kept, joined(c[v / 2][v % 2], load(tops + LANES * v)));
  }
}

inline void multiply_block(int rows, const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b,
                           int32_t* tops, bool begin, float* sums) {
  if (rows > 2 * ROWS / 3) return multiply_block_rows<ROWS>(chains, count, a, b, tops, begin, sums);
  if (rows > ROWS / 3) return multiply_block_rows<2 * ROWS / 3>(chains, count, a, b, tops, begin, sums);
  multiply_block_rows<ROWS / 3>(chains, count, a, b, tops, begin, sums);
}

}  // namespace
