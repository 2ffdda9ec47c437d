// Types common to callers of the C functions and the kernels of every instruction set; no code.
#pragma once

#include <cstdint>

// Built by lowp/kernels/cpu/abi.py from a Cast; the field order is the ABI.
struct lowp_cast {
  int32_t kind;           // Kind
  int32_t bits;           // width of a code
  int32_t mantissa_bits;  // floating point only, like the next seven
  int32_t bias;
  int32_t min_exponent;
  int32_t has_nan;
  int32_t minus_zero;  // -0 has its own code; otherwise, in a signed format, that code is NaN
  int32_t is_signed;
  int32_t subnormals;
  int32_t has_zero;
  int32_t rounding;     // Rounding
  int32_t overflow;     // Overflow
  int32_t random_bits;  // number of random bits of stochastic rounding; 0: unbiased
  int32_t unused;       // padding to a multiple of 8 bytes
  int64_t infinity;     // the code of +infinity, -1 if there is none
  int64_t nan;          // the code of the positive NaN, -1 if there is none
  double maximum;       // largest value
  double minimum;       // most negative value; the smallest in an unsigned format
};

// How the numbers of a tensor share scales; built by abi.py from a Cast.
struct lowp_sharing {
  lowp_cast element, scale, outer;  // `outer`: of one more scale for the whole tensor; `bits` is 0 without one
  lowp_cast other;                  // e2m1: whole numbers instead in groups where they have a smaller error; their scale is negative
  int32_t power;                    // scales are powers of two; otherwise ratios of the largest number to `highest`
  int32_t top;                      // the exponent of a scale is that of the largest number minus `top`, limited
  int32_t lowest, last;             // its limits
  int32_t of_zeros;                 // the exponent of a group of zeros
  int32_t marks;                    // the scale of a group with an infinity or a NaN is NaN
  int32_t stored_from;              // a scale is kept as its exponent minus this, as an fp32 number, or as a code
  int32_t tries_four;               // e2m1: whether the largest number becomes 4 where that has a smaller error than 6
  int32_t corrects;                 // e2m1: whether a scale is multiplied by <x, x> / <x, q>, and rounded stochastically
  double headroom;                  // the largest number counts as this many times as large
  double highest, outer_highest;    // what the largest number is divided to, and that times the largest scale
  double smallest, outer_smallest;  // the smallest normal numbers of both scales
  int64_t carry;                    // added to the bits of the largest number before its exponent is read
};

// How an optimizer keeps one moment of a parameter; built by abi.py.
struct lowp_moment {
  const lowp_cast* cast;        // to a 16-bit `type`, or null
  const lowp_sharing* sharing;  // of codes under scales by block, or null; without both: fp32
  int64_t type;                 // Carrier
  int64_t group;                // neighbours that share a scale: a power of two, at most kBlock
  int64_t scale_bytes;
  int64_t root;                 // the square root is kept, and one above zero never becomes zero
};

// An optimizer's step; built by abi.py. The meaning of `numbers`: see optimizer.hpp.
struct lowp_rule {
  int64_t kind;           // RuleKind
  int64_t rest_bytes;     // of the remainder beside a bf16 weight; 0 without
  int64_t type;           // Carrier of the weights
  int64_t gradient_type;  // Carrier
  int64_t flags;          // RuleFlag
  const lowp_cast* cast;  // by which an fp32 weight is rounded, or null
  lowp_moment moments[2];
  float numbers[8];
};

namespace lowp {

enum RuleKind : int64_t { kAdamW = 0, kSgd = 1, kLion = 2 };
enum RuleFlag : int64_t { kNear = 1, kNesterov = 2, kMoves = 4, kDecays = 8 };
enum Kind : int32_t { kFloat = 0, kInteger = 1, kBinary = 2 };
enum Rounding : int32_t {
  kNearestEven = 0,
  kNearestAway = 1,
  kTowardZero = 2,
  kUp = 3,
  kDown = 4,
  kStochastic = 5,
  kToOdd = 6,
  kStochasticB = 7,  // the discarded part rounded to the random bits, half up
  kStochasticC = 8,  // half to even
};
enum Overflow : int32_t { kInfinity = 0, kNan = 1, kSaturate = 2 };
enum Carrier : int32_t { kFp32 = 0, kFp64 = 1, kFp16 = 2, kBf16 = 3 };

constexpr bool rounds_share(int rounding) { return rounding >= kStochasticB; }
constexpr bool draws(int rounding) { return rounding == kStochastic || rounds_share(rounding); }
constexpr bool rounds_inward(int rounding, bool negative) {  // also beyond the largest value
  return rounding == kTowardZero || rounding == kToOdd || rounding == (negative ? kUp : kDown);
}

// Whether a cast is that of a 16-bit type itself, as torch converts to it.
constexpr bool is_type(const lowp_cast& cast, int type) {
  if (cast.kind != kFloat || cast.bits != 16 || cast.rounding != kNearestEven || cast.overflow != kInfinity) return false;
  const int mantissa_bits = type == kFp16 ? 10 : type == kBf16 ? 7 : -1;
  return cast.mantissa_bits == mantissa_bits && cast.bias == (type == kFp16 ? 15 : 127) && cast.subnormals && cast.is_signed &&
         cast.infinity >= 0;
}

inline constexpr int64_t kBlock = 1024;       // elements that a kernel processes at a time: they stay in the L1 cache
inline constexpr int64_t kSumBlock = 4096;    // elements of one partial sum of squares
inline constexpr int64_t kSerial = 64 * 1024;  // fewer elements run on one thread

// The elements of a part of a tensor whose codes or values are read and written.
struct Task {
  const lowp_cast* cast;
  const void* in;
  void* out;
  int32_t in_type;   // Carrier; of `decode` the bytes of a code
  int32_t out_type;  // Carrier; of `encode` the bytes of a code
  uint64_t seed;
  bool stream;        // bypass the cache
  int64_t index = 0;  // of the first element in the whole tensor, which determines its random words
  bool keeps = false;  // `quantize` leaves infinities and NaN
};

// `group` neighbours of each row of `row` elements share a scale (the last group of a row may be shorter). Neighbours are
// `inner` elements apart: with more than one, rows lie beside each other as columns, `across` of which share scales, too.
struct Groups {
  const lowp_sharing* sharing;
  int64_t row, group;
  double outer;               // the scale of the whole tensor
  const double* scale;        // of every group; null: they are found, from begin to end, which are borders of groups
  const int32_t* zero_point;  // of every group, or null
  void* stored;               // the scales as they are kept, or null
  int32_t stored_bytes;       // of one
  bool packed;                // codes fill no whole bytes
  int64_t inner = 1, across = 1;
  double most = __builtin_inf();  // no magnitude is larger; infinity where that is not known, or not all is finite

  // Whether numbers draw as those of the tensor in which the rows that lie beside each other lie together: four neighbours
  // of a row have the words of one counter.
  bool draws_across() const { return inner > 1 && across == 1 && draws(sharing->element.rounding); }
  bool has_whole_counters() const { return row % 4 == 0 && (group % 4 == 0 || group >= row); }
};

inline constexpr int64_t kMostTried = 256;  // numbers of a group that `tries_four`, `corrects` or has an `other` element
inline constexpr int64_t kBeside = 256;     // columns whose groups are cast at a time: 32 numbers each stay in the L1 cache

// How many columns are cast at a time: whole groups.
constexpr int64_t beside(const Groups& groups) { return kBeside / groups.across * groups.across; }

// Blocks of `size` numbers, `inner` apart, of lines of `length` that are rotated (lowp/kernels/numbers/hadamard.py); what a
// line has beyond its last whole block stays. From any type to fp32.
struct Rotation {
  const void* in;
  float* out;
  const float* signs;
  int64_t type, size, length, inner;
};

inline constexpr int64_t kRotated = 8192;  // numbers that are rotated at a time

// What the cast of groups met: a value that the type of the result lacks, and, where scales are found, an infinity or a NaN.
enum Met : int { kLost = 1, kNotFinite = 2 };

struct Statistics {
  int64_t histogram[256];
  int64_t zeros, nans, infinities;
  double maximum;
};

inline constexpr int kSpectrumShift = 18;                       // leaves the exponent and five bits of the fraction
inline constexpr int kSpectrumBins = 1 << (31 - kSpectrumShift);
inline constexpr int kSignificant = 25;                         // numbers of bits that a number may need, and zero
inline constexpr int kUpdateRows = 96;                          // exponents of weights, and of updates
inline constexpr int kLowestWeight = -70, kLowestUpdate = -80;  // smaller ones are counted with these
inline constexpr int kUpdateCells = kUpdateRows * kUpdateRows * 3;

// The profiler's counts of a tensor: of the finite nonzero numbers, and of all numbers. The layout is part of the ABI.
struct SpectrumSeen {
  int64_t bins[kSpectrumBins];
  int64_t significant[kSignificant];
  int64_t powers[256];  // of two, by exponent field, without fp32's subnormal numbers
  int64_t zeros, nans, infinities;
  int64_t checksum;  // the sum of the bits as signed integers
  double maximum, sum_squares;
};

// A weight before a step, the update added to it, and its gradient or null.
struct Update {
  const float *weight, *update, *gradient;
};

// Counts by exponents of the weight and of its update: weights that grow, shrink, and shrink from a power of two.
struct UpdatesSeen {
  int64_t joint[kUpdateCells];
  int64_t none;  // no update, although there was a gradient
};

struct Mantissas {
  int64_t maximum;     // largest |mantissa| after saturation
  int64_t saturated;   // finite elements that were saturated
  int64_t non_finite;  // infinities (saturated) and NaN (zero)
  bool any;            // whether a number was nonzero before rounding
};

// The powers of two that bound fp32 numbers, by their biased exponents.
struct Grid {
  uint32_t maximum = 0;   // the bits of the largest magnitude; above those of infinity: NaN
  int32_t lowest = 1000;  // the exponent of the lowest set bit; 1000 for zeros
};

// A weight after an optimizer's step in fp32, and its earlier mantissas.
struct Step {
  float* weight;
  int16_t* old;  // overwritten with the new mantissas
  int32_t old_exponent, update_exponent, exponent;
  int32_t lowest;  // the smallest mantissa
};

struct Stepped {
  Mantissas update, weight;
};

// The tensors of one parameter that a step reads and writes: a row of the list given to lowp_step_list.
struct Stepping {
  void *weight, *rest, *moments[2], *scales[2];
  const void* gradient;
  float rates[4];  // see optimizer.hpp
  float scale;     // of the gradient
  uint64_t seed;   // of the block of numbers that share it
  int64_t index;   // of number `begin` among those
};

struct Lines;  // product.hpp

// The kernels of one instruction set, each for elements begin .. end; except for sums, begin is a multiple of kBlock.
struct Kernels {
  void (*quantize)(const Task&, int64_t begin, int64_t end);
  int64_t (*encode)(const Task&, int64_t begin, int64_t end);
  void (*decode)(const Task&, int64_t begin, int64_t end);
  // What was met; the number of NaNs without a code; whether a 16-bit tensor cannot hold a value under a power of two.
  int (*quantize_groups)(const Task&, const Groups&, int64_t begin, int64_t end);
  int64_t (*encode_groups)(const Task&, const Groups&, int64_t begin, int64_t end);
  bool (*decode_groups)(const Task&, const Groups&, int64_t begin, int64_t end);
  // The largest magnitude of the finite numbers; with a minus sign if there are others.
  double (*find_largest)(const Task&, int64_t begin, int64_t end);
  void (*choose_scales)(const Groups&, int64_t group, const double* largest, int64_t count, double* scale);
  double (*outer_scale)(const lowp_sharing&, double largest);
  void (*to_int16)(const Task&, int exponent, float* values, Mantissas*, int64_t begin, int64_t end);
  void (*from_int16)(const int16_t* in, int exponent, float* out, int64_t begin, int64_t end);
  // out[c] = the sum of in[.][c][.] of an [outer][channels][inner] tensor, for channels begin .. end
  void (*sum_int16)(const int16_t* in, int64_t outer, int64_t channels, int64_t inner, int64_t* out, int64_t begin,
                    int64_t end);
  void (*grid)(const float* in, bool lowest, Grid*, int64_t begin, int64_t end);
  bool (*exact_int16)(const float* in, int exponent, int16_t* out, int64_t* largest, int64_t begin, int64_t end);
  bool (*same_int16)(const float* in, const int16_t* mantissas, int exponent, float lower, uint32_t* largest,
                     int64_t begin, int64_t end);
  void (*step_int16)(const Step&, Stepped*, int64_t begin, int64_t end);
  void (*words_int16)(float* x, int exponent, int low_bits, int lowest, Mantissas*, int64_t begin, int64_t end);
  void (*roots_int16)(float* x, int exponent, const lowp_cast&, Mantissas*, int64_t begin, int64_t end);
  void (*pack_nonzero)(const float* in, uint8_t* bits, int64_t begin, int64_t end);
  void (*pass_bits)(const float* in, const uint8_t* bits, float* out, int64_t begin, int64_t end);
  void (*pass_positive)(const float* in, const int16_t* mantissas, float* out, int64_t begin, int64_t end);
  bool (*relu_int16)(const float* in, const int16_t* mantissas, int exponent, int16_t* to, float* values, int64_t begin,
                     int64_t end);
  void (*statistics)(const Task&, Statistics*, double* partial_sums, int64_t begin, int64_t end);
  void (*spectrum)(const Task&, float scale, SpectrumSeen*, double* partial_sums, int64_t begin, int64_t end);
  void (*updates)(const Update&, UpdatesSeen*, double* energy, int64_t begin, int64_t end);
  int32_t (*largest)(const float* in, int64_t count);
  void (*random_words)(uint64_t seed, uint64_t counter, int64_t counters, uint32_t* out);
  void (*random_block)(uint64_t seed, const uint32_t* counter, uint32_t* out);
  bool (*narrow)(const float* in, int type, uint16_t* out, int64_t count);
  void (*read_lines)(const Lines&, float* to, int64_t stride);
  bool (*rotate)(const Rotation&, int64_t begin, int64_t end);  // parts of lines, see rotate.hpp; whether all is finite
  void (*step)(const lowp_rule&, const Stepping&, int64_t begin, int64_t end);  // at most kBlock numbers, of whole groups
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace lowp
