// The matrix product with sums in fp32: C[m, n] = A[m, k] B[k, n] + bias, whose operands are rounded while they are packed
// and whose result is rounded while it is written.
//
// Every element of the result is ((block 0 + block 1) + block 2) ... + bias, where a block is the chain
// fma(a[k], b[k], ...) over kDepth elements in order of k, from +0. Lanes of a vector are different elements of the result,
// so that neither the width of vectors, the shape of tiles nor the number of threads changes a bit. A NaN is written as
// the positive quiet NaN of its type.
#pragma once

#include <cstdint>

#include "cast.hpp"

// An operand: element (i, k) of a matrix at data[i * line + k * step], in elements; `batch` from matrix to matrix.
struct lowp_operand {
  const lowp_cast* cast;  // by which it is rounded; null: it is multiplied as it is
  int64_t batch[2], line, step;
  int64_t type;   // Carrier, except fp64
  int64_t keeps;  // whether infinities and NaN are multiplied as they are, whatever the cast makes of them
};

// A product, built by lowp/kernels/products/programs.py; the order of fields is the ABI.
struct lowp_plan {
  int64_t batch[2], rows, columns, depth;  // `batch`: the numbers of matrices, along two dimensions
  lowp_operand left, right;                // lines of `right` are columns of the result
  const lowp_cast* cast;                   // of the result; null: to nearest even, in its type
  int64_t out_batch[2], out_line;
  int64_t type;  // Carrier of the result, except fp64
};

// A cast of a whole contiguous tensor, the values of which products multiply and a backward pass keeps. Infinities and NaN
// stay, or with `sharing` end the program.
struct lowp_rounding {
  const lowp_cast* cast;        // of each number alone, or
  const lowp_sharing* sharing;  // under shared scales, to fp32; `row`, `group`, `inner` and `across` as in Groups
  int64_t type, out_type;       // Carriers, except fp64
  int64_t count, row, group, inner, across;
};

// Blocks of `size` numbers, `inner` apart, of lines of `length`, rotated into a tensor of fp32; or, without lines, the signs
// of a rotation. What is not finite afterwards ends the program.
struct lowp_rotation {
  int64_t type, size, count, length, inner;
};

// Rows of a matrix in int8 under a scale each, in fp32. Element (i, k) of the matrix is at data[i * line + k * step]; it may
// be multiplied by a factor of its column first. The random words are those of the contiguous matrix.
struct lowp_codes {
  const lowp_sharing* sharing;
  int64_t rows, columns, line, step;
};

// A product of codes [rows, depth] and [columns, depth], summed in integers: fp32(sum) * the scale of the column * the scale
// of the row + bias, each rounded once. Element (j, k) of the second is at data[j * line + k * step], one of which is 1.
struct lowp_bytes {
  int64_t rows, columns, depth, line, step;
};

enum StepKind : int64_t { kRounding = 0, kProduct = 1, kCodes = 2, kBytes = 3, kSigns = 4, kRotation = 5 };

// A step of a program: a product, or what is done to its operands before.
struct lowp_step {
  int64_t kind;
  int64_t places[6];  // of its tensors among the addresses; -1: none; below: of byte -2 - place of the program's own memory
  int64_t seeds[3];   // of stochastic casts, their places among the seeds
  lowp_plan product;
  lowp_rounding rounding;
  lowp_codes codes;
  lowp_bytes bytes;
  lowp_rotation rotation;
};

// `own`: bytes of memory for what only later steps read.
struct lowp_steps {
  const lowp_step* steps;
  int64_t count, own;
};

namespace lowp {

constexpr int64_t kDepth = 192;  // a part of the definition; a panel of B of this depth, 24 KiB, stays in the L1 cache

// Lines of numbers to be read as fp32; `index`: of the first number in its tensor, which determines its random words.
struct Lines {
  const void* data;
  int32_t type;
  const lowp_cast* cast;
  uint64_t seed;
  int64_t first, line;  // the first number, and the distance of lines
  int64_t lines, length;
  int64_t index, index_line;
  bool keeps;  // infinities and NaN
};

enum Ended : int { kWhole = 0, kInfinite = 1, kNoMemory = 2 };  // how a step ended

// Steps of codes (product_bytes.cpp).
Ended encode(const lowp_codes&, const float* x, const float* factor, int8_t* codes, float* scales, uint64_t seed, int threads);
Ended multiply(const lowp_bytes&, const int8_t* left, const int8_t* right, const float* left_scales, const float* right_scales,
               const float* bias, float* out, int threads);

// One call: a plan with its addresses.
struct Product {
  const lowp_plan& plan;
  const void *left, *right;
  const float* bias;  // one number a column, or null
  void* out;
  uint64_t left_seed, right_seed, seed;
  void (*read)(const Lines&, float*, int64_t stride);
};

// Rows and columns of one matrix of the result, which one thread computes.
struct Unit {
  int64_t batch[2];
  int64_t row, rows, column, columns;
};

// The product for one instruction set. `memory` has room for `floats(unit, depth)` numbers.
struct Multiplier {
  int rows, columns;  // of a tile
  void (*run)(const Product&, const Unit&, float* memory);
  int64_t (*floats)(const Unit&, int64_t depth);
};

extern const Multiplier kPortableMultiplier;
#if defined(__x86_64__)
extern const Multiplier kAvx2Multiplier;
extern const Multiplier kAvx512Multiplier;
#endif

}  // namespace lowp
