// The common code of all instruction sets, compiled once in each of their files. The including file defines, in an
// anonymous namespace, ROWS, COLUMNS and, before it includes this,
//   void multiply(int rows, const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b, int32_t* tops,
//                 int32_t* sums);
//   void multiply_block(int rows, const int64_t* chains, int64_t count, const int32_t* a, const int32_t* b,
//                       int32_t* tops, bool begin, float* sums);
//   void approximate(int64_t groups, const int32_t* a, const int32_t* b, int32_t* sums);
// multiply runs `count` chains of chains[i] pairs each, one after the other, in int32, modulo 2^32. Between two chains
// it moves all except the lowest TOP_SHIFT bits of each sum to `tops`, so that each chain begins near zero; the result is
// 2^TOP_SHIFT * tops + sums. A single chain does not modify `tops`. There is at least one chain, and `tops` and `sums` are
// aligned. At least the first `rows` rows of the tile are computed; others may be skipped. multiply_block rounds that
// result to fp32 and adds it to `sums`, or with `begin` stores it. approximate returns the sums of products of digits
// (gemm_digits.hpp) over groups of four elements. All functions are `static`, so that code compiled for AVX-512 is not
// merged into other files.
#include <cstring>

namespace {

constexpr int TILE = ROWS * COLUMNS;

// not std::max: `inline` functions may be merged across files, and so across instruction sets
static inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
static inline double larger(double a, double b) { return a < b ? b : a; }
static inline int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }

}  // namespace

#include "gemm_pack.hpp"
#include "gemm_copy.hpp"
#include "gemm_write.hpp"
#include "gemm_digits.hpp"
#include "gemm_sum.hpp"
#include "gemm_direct.hpp"

namespace {

static constexpr lowp::Micro make_micro(const char* name) {
  return {name,
          ROWS,
          COLUMNS,
          {ROWS, pack_lines<ROWS>, pack_rows<ROWS>, pack_some_rows<ROWS>, copy_runs<ROWS>, bound<ROWS>, read_digits<ROWS, false>},
          {COLUMNS, pack_lines<COLUMNS>, pack_rows<COLUMNS>, pack_some_rows<COLUMNS>, copy_runs<COLUMNS>, bound<COLUMNS>, read_digits<COLUMNS, true>},
          add_chained,
          add_exact,
          exact_int16,
          finish_chained,
          finish_int16<const int64_t*>,
          finish_float,
          finish_double,
          finish_int64,
          pair_lines,
          interleave,
          widen,
          correlate,
          dots,
          finish_chained_line,
          finish_int16_line};
}

}  // namespace
