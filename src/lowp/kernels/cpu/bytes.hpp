// Products of 8-bit integers for inference: activations of one unsigned byte, weights of one signed byte, sums in int32.
//
// A panel is 16 columns of the right matrix: for every 8 elements of depth two groups of [16 columns][4 elements]. A
// chunk is 32 elements of depth. When a panel is packed, every chunk gets the widest way that provably does not overflow
// 16 bits, for activations up to `highest` (127 or 255): sums of the products of four elements, of two, or single ones.
// Four products of a byte up to 127, minus 64, and a weight are at most 4 * 64 * 127 = 32,512: for such bytes every weight
// has a centred way, which adds four products and subtracts 64 times the weights, modulo 2^16. No sum saturates, so that
// the ways differ only in speed.
#pragma once
#include <cstdint>

namespace lowp {

constexpr int64_t kPanel = 16;        // columns of a panel
constexpr int64_t kEight = 8;         // depth is padded to a multiple of it
constexpr int64_t kChunk = 32;        // depth of one way
constexpr int64_t kDeep = 1024;      // depth processed at once: a panel of it (16 KiB) stays in the first-level cache
constexpr int64_t kRows = 192;        // rows of activations multiplied with a panel while it is in the cache
constexpr int64_t kPair = 2;          // panels processed at once
enum Way : uint8_t { kFour = 0, kTwo = 1, kOne = 2, kCentred = 3 };

// The conversion of a row of sums of a panel: sum * scale + bias.
struct Finish {
  float scales[kPanel];
  float bias[kPanel];
  bool biased;
};

// The left matrix of a product.
struct Rows {
  const uint8_t* bytes;
  int64_t count, depth;
};

// A panel of the right matrix, the initial values of its sums, and their conversion.
struct Panel {
  const int8_t* weights;
  const uint8_t* ways;
  int32_t starts[kPanel];
  int64_t columns;  // 16, fewer in the last one
  Finish finish;
};

constexpr int kWholeScales = -1, kExponentBytes = 23;  // of `shift`

// Panels of codes of 1, 2 or 4 bits: [16 columns][4 bytes] for every 32 / bits elements of depth, of which code i of byte t
// is element 4 i + t. A code represents the integer levels[code] - offset. Of two tables of levels the sign of a group's byte
// says which one its codes have: with a minus the second, under `other_factor`.
struct CodePanel {
  const uint8_t* memory;
  const uint8_t* levels;  // [tables][16]
  const void* scales;     // [groups][16]: fp32, or bytes, see `shift`
  int shift;              // of bytes: kExponentBytes for 2^(byte - 127), else to the bits of fp16; kWholeScales for fp32
  float factor, other_factor;  // of bytes
  int32_t offset;
  int tables;  // 1, or 2 with codes of 4 bits under bytes that are floats
  int bits;
  int64_t groups, group;  // elements of a group: a multiple of 32 / bits
};

// A row of integers: sum of numbers[plane][depth] * 128^plane. One or two planes hold bytes, three hold 20 bits and a sign.
struct Digits {
  const int8_t* numbers;
  int planes;
  int64_t depth;
  const float* scales;  // [groups]
  const int32_t* sums;  // [groups], of the integers
};

struct ByteKernels {
  // The minimum and maximum of the numbers and 0; NaN if a number is NaN.
  void (*extremes)(const float* x, int64_t count, float* low, float* high);
  // out = clamp(round(x / scale) + zero, 0, highest), to nearest even; NaN becomes 0.
  void (*quantize)(const float* x, int64_t count, float scale, int32_t zero, int32_t highest, uint8_t* out);
  // out[count][stride] = converted sums of up to kRows rows times one or two adjacent panels.
  void (*multiply)(const Rows& a, const Panel* panels, int64_t count, float* out, int64_t stride);
  // Integers under scales, which `split` converts to digits: number = round(x / 2^(e - 18)), where e is the exponent of the
  // largest number of a group. False if a number is infinite or NaN.
  bool (*numbers)(const float* x, int64_t count, int64_t group, int32_t* numbers, float* scales);
  // out[16] = a row times a panel of codes, group by group.
  void (*codes)(const Digits& row, const CodePanel& panel, float* out);
  // The number of different bits of two rows of 64-bit words.
  int64_t (*differing)(const uint64_t* a, const uint64_t* b, int64_t words);
};

extern const ByteKernels kPortableBytes;
#if defined(__x86_64__)
extern const ByteKernels kAvx2Bytes;
extern const ByteKernels kAvx512Bytes;
#endif

}  // namespace lowp
