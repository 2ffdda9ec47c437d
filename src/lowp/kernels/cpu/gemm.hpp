// The integer matrix product: the interface of the driver, the convolution and the micro-kernels.
//
// Terms: A "panel" is `width` rows of A or columns of B over a range of the depth K, packed as [K / 2][width]
// pairs of int16 in one int32 (low half = even element), padded with zeros. A "tile" is the rows x columns
// block of the result that one micro-kernel holds in registers. The depth is split at fixed places on every machine:
// every BLOCK elements the sum is exact and (chained) rounded to fp32, every CHUNK elements there is a bound.
#pragma once
#include <cstdint>
#include <vector>

#include "export.hpp"

namespace lowp {

constexpr int64_t BLOCK = 256;  // DFP-16: at most 256 accumulation steps before the sum goes to fp32
constexpr int64_t CHUNK = 16;   // the shortest chain that is cheaper than the leading digits
constexpr int64_t STEP = 768;   // the largest depth of a step: a panel of B (24 KiB) stays in the first-level cache
// 48 chains per step, each moving at most 2^31 / 2^6, stay below 2^31; the rest of a sum, below 2^6, is within the margin
// of the bounds
constexpr int TOP_SHIFT = 6;
constexpr int BOUNDS = 1 + BLOCK / CHUNK;  // per block: the bound of the block, then of each chunk

// By Cauchy-Schwarz every partial sum of a*b over a set of k is at most ||a|| ||b|| over that set. The norms are rounded
// up, so that a product below this limit proves that int32 cannot overflow in any order of additions.
constexpr float SAFE = 2147482624.0f;  // the largest float below 2^31 minus a margin of 1024
constexpr float LARGEST_NORM = 185400.0f;  // larger than the norm of any chunk

static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t blocks(int64_t depth) { return divide_up(depth, BLOCK); }

// Statistics of written results. Merging does not depend on the order, and so not on the number of threads.
struct Tally {
  int64_t saturated = 0;         // elements that did not fit int16
  int64_t largest_mantissa = 0;  // max |int16 written|, after saturation
  int64_t largest_sum = 0;       // max |exact sum|, before rounding and saturation
  double largest_value = 0;      // max |value written|, chained
  void merge(const Tally& other);
  // seen = saturated, largest_mantissa, largest_sum; largest = largest_value
  void report(int64_t* seen, double* largest) const;
};

// The leading digits of one panel over one step (gemm_digits.hpp), present only if they may be needed.
struct Digits {
  int32_t* sums;    // [STEP / CHUNK + 1][width] sums of the digits before each chunk
  int32_t* groups;  // [step / 4][width] four digits each
  float* errors;    // bounds of the rest without the digits, like those of the panel
  static constexpr int64_t ERRORS = STEP / BLOCK * BOUNDS;
  // The number of int32 of sums and groups together, and these placed in `memory`.
  static int64_t size(int width, int64_t step) { return (STEP / CHUNK + 1 + step / 4) * width; }
  static Digits in(int32_t* memory, float* errors, int width) {
    return {memory, memory + (STEP / CHUNK + 1) * width, errors};
  }
};

// One panel over one step, for a tile.
struct Side {
  const int32_t* pairs;
  const float* bounds;
  int64_t count;  // pairs, at most STEP / 2
  Digits digits;
  int rows;  // of A: the number of rows in the panel; the others are zero
};

// Columns [column, column + length) of a panel, adjacent in memory from `place` on.
struct Run {
  int64_t column, place, length;
};

// The number of int32 that `copies` may read beyond its input, and write beyond the panel.
constexpr int64_t OVERRUN = 16;

// The numbers that `correlate` and `dots` may read beyond their operands, which are then finite, and write beyond `out`.
constexpr int64_t BEYOND = 8;

// Packs one side. `lines[w]` may be null (zeros); an odd length is padded with a zero.
struct Packer {
  int width;
  void (*lines)(const int16_t* const* lines, int64_t length, int32_t* panel);  // line w runs along K
  void (*rows)(const int16_t* source, const int64_t* offsets, int64_t length, int64_t count,
               int32_t* panel);  // along w
  // the same for `count` of the columns; the others are not modified
  void (*some_rows)(const int16_t* source, const int64_t* offsets, int64_t length, int64_t count, int32_t* panel);
  // panel[i][column of a run] = pairs[offsets[i] + place ...] for `count` rows, zeros for columns without a run; the runs
  // are adjacent
  void (*copies)(const int32_t* pairs, const int64_t* offsets, int64_t count, const Run* runs, int64_t run_count,
                 int32_t* panel);
  void (*bound)(int64_t pairs, const int32_t* panel, float* bounds);
  void (*digits)(int64_t pairs, const int32_t* panel, const Digits& to);
};

// The destination of a tile of results, with rows `stride` apart, and the number of its rows to write.
template <class Out>
struct Place {
  Out* out;
  int64_t stride;
  int rows;
};

// Numbers added to the results of a tile, one per row or per column (null: none), in its first `count` columns: in fp64 and
// in units of the result before rounding to mantissas; in fp32 for chained results.
struct Addends {
  const double* rows;
  const double* columns;
  int64_t count;
};

struct Micro {
  const char* name;
  int rows, columns;
  Packer left, right;
  // accumulators += the tile's sums over a step that begins at a multiple of BLOCK; `begin`: accumulators count as zeros
  void (*add_chained)(const Side& a, const Side& b, bool begin, float* accumulators);
  void (*add_exact)(const Side& a, const Side& b, bool begin, int64_t* accumulators);
  // add_exact and finish_int16 of a depth of a single step
  void (*exact_int16)(const Side& a, const Side& b, int exponent, const Addends& addends, int lowest,
                      const Place<int16_t>& to, Tally& tally);
  // a tile of sums -> results
  void (*finish_chained)(const float* sums, int exponent, const Addends& addends, const Place<float>& to, Tally& tally);
  void (*finish_int16)(const int64_t* sums, bool narrow, int exponent, const Addends& addends, int lowest,
                       const Place<int16_t>& to, Tally& tally);
  void (*finish_float)(const int64_t* sums, bool narrow, int exponent, const Place<float>& to, Tally& tally);
  void (*finish_double)(const int64_t* sums, bool narrow, int exponent, const Place<double>& to, Tally& tally);
  void (*finish_int64)(const int64_t* sums, bool narrow, const Place<int64_t>& to, Tally& tally);
  // two lines of numbers (the second null: zeros) as pairs
  void (*pair)(const int16_t* even, const int16_t* odd, int64_t count, int32_t* to);
  // [channels][positions] -> [positions][channels], positions `to_stride` apart
  void (*interleave)(const int16_t* from, int64_t from_stride, int64_t channels, int64_t positions, int16_t* to,
                     int64_t to_stride);
  // gemm_direct.hpp, in fp64: to[i] = from[i * stride]; out[j] = sum over i < count of weights[i] * from[places[i] + j];
  // sums[i] += sum of a[j] * b[places[i] + j]; and lines of such sums -> results
  void (*widen)(const int16_t* from, int64_t stride, int64_t count, double* to);
  void (*correlate)(const double* from, const int64_t* places, const double* weights, int64_t count, int64_t length,
                    double* out);
  void (*dots)(const double* a, const double* b, const int64_t* places, int64_t count, int64_t length, double* sums);
  void (*finish_chained_line)(const double* sums, int64_t count, int exponent, const double* addend, float* out,
                              Tally& tally);
  void (*finish_int16_line)(const double* sums, int64_t count, int exponent, const double* addend, int lowest,
                            int16_t* out, Tally& tally);
};

// null where this build or this processor lacks the instructions
const Micro* micro_portable();
const Micro* micro_avx2();
const Micro* micro_avx512();
const Micro* micro_neon();

// The best kernel of this machine, or the one forced by name ("" or null: best); null if this machine cannot run it.
const Micro* choose_micro(const char* name);

// One side of a product: elements (index, k), index below `count`.
class Operand {
 public:
  explicit Operand(int64_t count) : count(count) {}
  virtual ~Operand() = default;
  // Packs elements [first, first + width) x [k0, k1), k0 a multiple of BLOCK, k1 - k0 at most STEP.
  virtual void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const = 0;
  // At least the norm of every chunk; asked only if it matters, since it may read the whole operand.
  virtual float chunk_norm(int threads) const;
  const int64_t count;
};

enum class Kind : int { chained = 0, int16 = 1, float32 = 2, float64 = 3, int64 = 4 };

// The destination of the result. Element (i, j) is at data[i * row_stride + offset(j)].
class Target {
 public:
  virtual ~Target() = default;
  virtual void offsets(int64_t first, int64_t count,
                       int64_t* out) const;  // -1: not written; default: first, first + 1 ...
  void* data = nullptr;
  int64_t row_stride = 0;
};

struct Format {
  Kind kind;
  int exponent;  // values are sum * 2^exponent, rounded for int16 mantissas
  int lowest;    // -32768, or -32767 for symmetric saturation
};

struct Product {
  const Operand* left;
  const Operand* right;
  int64_t depth;
  const Target* target;
  const double* row_addends;  // null: none; in whole panels
  const double* column_addends;
};

// Numbers added to the results (null: none), one per row or per column, times 2^exponent.
struct Bias {
  const float* numbers;
  int64_t count;
  int exponent;
  float number(int64_t i) const;
  bool is_finite() const;
  // `count` of them from `first` on, in whole panels of a micro-kernel; null if there are none
  std::vector<double> panels(int64_t first, int64_t count, int width) const;
};

// All products have the same kind of result. `right_ahead`: pack all of B before the products, not when it is used.
void run(const Micro& micro, const std::vector<Product>& products, const Format& format, bool right_ahead, int threads,
         Tally& tally);

}  // namespace lowp
