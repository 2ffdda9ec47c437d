// A table of shared exponents: columns of memory with one number an entry, which lowp/exponents/table.py owns.
#pragma once
#include <cstdint>

// Layouts as in lowp/kernels/cpu/abi.py; lowp/scaling/autoflex.py defines the members and the computation.
struct lowp_autoflex {
  double beta, gamma;
  int32_t bits, window, min_exponent, max_exponent, headroom, warm_headroom, start_headroom, adapt;
};

struct lowp_table {
  lowp_autoflex rule;
  int64_t crowds;     // whether numbers that would not fit under half the unit are counted
  int32_t* exponent;  // of the next write
  bool* started;
  int32_t* before;  // the exponent of the previous write
  int64_t* seen;    // what was seen since the last step, kWords an entry
  const bool* is_result;
  bool* faulty;     // whether anything that was written in the step is not finite
  double* history;  // `window` maxima an entry, and what follows of Autoflex; null of other scalings
  int32_t* known;
  int64_t *writes, *saturated, *moved, *nonfinite;
  double *raises_needed, *raises_in_time, *headroom_sum, *measured;
};

namespace lowp {

// What was seen of an entry, as Triton's kernels record it: in one row of int64, of which the first word holds an int32.
enum Word : int64_t { kLargest = 0, kOverflowed = 1, kCrowded = 2, kElements = 5, kFlags = 6, kExponent = 7, kWords = 8 };
enum Flag : int64_t { kSawNonFinite = 1, kSawNan = 1 << 8, kSawVanished = 1 << 16 };

// Adds what was seen of one write: counts are those of lowp_write_int16, and its mantissas were `shift` places lower than
// the entry's. What was noted before in this step is joined.
void note(const lowp_table& table, int64_t entry, const int64_t* counts, int shift, int64_t elements, bool has_nan,
          int64_t crowded);

}  // namespace lowp
