// Rotations of blocks of numbers by a signed Hadamard matrix. Included once per instruction set.
//
// The numbers of a block are multiplied by their signs; log2(size) rounds replace pairs 1, 2, 4 ... places apart by their sum
// and their difference; and the results are multiplied by 1 / sqrt(size). Each is rounded to fp32 once.
#pragma once

#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

static void multiply_by(float* numbers, int64_t count, float factor) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) numbers[i] *= factor;
}

// The rounds between `rows` rows of `count` numbers.
static void pair_rows(float* tile, int64_t rows, int64_t count) {
  for (int64_t step = 1; step < rows; step *= 2)
    for (int64_t k = 0; k < rows; k += 2 * step)
      for (int64_t of = k; of < k + step; ++of) {
        float *const first = tile + of * count, *const second = first + step * count;
        LOWP_VECTOR_LOOP
        for (int64_t i = 0; i < count; ++i) {
          const float a = first[i], b = second[i];
          first[i] = a + b, second[i] = a - b;
        }
      }
}

// One round of pairs STEP places apart along a line.
template <int STEP>
static void pair_neighbours(float* line, int64_t count) {
  for (int64_t i = 0; i < count; i += 2 * STEP) {
    float sums[STEP], differences[STEP];
    for (int j = 0; j < STEP; ++j) sums[j] = line[i + j] + line[i + STEP + j], differences[j] = line[i + j] - line[i + STEP + j];
    for (int j = 0; j < STEP; ++j) line[i + j] = sums[j], line[i + STEP + j] = differences[j];
  }
}

static inline float last_factor(int64_t size) { return static_cast<float>(1 / __builtin_sqrt(static_cast<double>(size))); }

static bool are_finite(const float* numbers, int64_t count) {
  uint32_t largest = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(numbers[i]) & Constants<F32>::kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < Constants<F32>::kInf;
}

// The numbers from `at` on in `to`, as fp32.
static void read_numbers(const Rotation& from, int64_t at, int64_t count, float* to) {
  for (int64_t done = 0; done < count; done += kBlock) {
    uint32_t* const place = reinterpret_cast<uint32_t*>(to + done);
    const int64_t part = smaller(kBlock, count - done);
    const uint32_t* const in = load<F32>(from.in, static_cast<int>(from.type), at + done, part, place);
    if (in != place) std::memcpy(place, in, static_cast<size_t>(part) * sizeof(float));
  }
}

// Columns: a part is a block of at most kRotated / size columns, or what is left of them below their last whole block.
static bool rotate_columns(const Rotation& rotation, int64_t part, float* tile) {
  const int64_t size = rotation.size, inner = rotation.inner, most = kRotated / size, across = (inner + most - 1) / most;
  const int64_t down = (rotation.length + size - 1) / size, column = part % across * most, above = part / across % down * size;
  const int64_t count = smaller(most, inner - column), rows = smaller(size, rotation.length - above);
  const int64_t corner = (part / across / down * rotation.length + above) * inner + column;
  for (int64_t k = 0; k < rows; ++k) read_numbers(rotation, corner + k * inner, count, tile + k * count);
  if (rows == size) {
    for (int64_t k = 0; k < size; ++k) multiply_by(tile + k * count, count, rotation.signs[k]);
    pair_rows(tile, size, count);
    multiply_by(tile, size * count, last_factor(size));
  }
  for (int64_t k = 0; k < rows; ++k)
    std::memcpy(rotation.out + corner + k * inner, tile + k * count, static_cast<size_t>(count) * sizeof(float));
  return rows < size || are_finite(tile, size * count);
}

// A part of a line of at most kRotated numbers.
static bool rotate_line(const Rotation& rotation, int64_t part, float* tile) {
  constexpr int kNear = 16;
  const int64_t size = rotation.size, parts = (rotation.length + kRotated - 1) / kRotated, begin = part % parts * kRotated;
  const int64_t first = part / parts * rotation.length + begin, count = smaller(kRotated, rotation.length - begin);
  const int64_t whole = count / size * size;
  float* const out = rotation.out + first;
  read_numbers(rotation, first, count, out);
  for (int64_t block = 0; block < whole; block += size) {
    LOWP_VECTOR_LOOP
    for (int64_t k = 0; k < size; ++k) tile[block + k] = out[block + k] * rotation.signs[k];
  }
  if (size > 1) pair_neighbours<1>(tile, whole);
  if (size > 2) pair_neighbours<2>(tile, whole);
  if (size > 4) pair_neighbours<4>(tile, whole);
  if (size > 8) pair_neighbours<8>(tile, whole);
  for (int64_t block = 0; size > kNear && block < whole; block += size) pair_rows(tile + block, size / kNear, kNear);
  multiply_by(tile, whole, last_factor(size));
  std::memcpy(out, tile, static_cast<size_t>(whole) * sizeof(float));
  return are_finite(tile, whole);
}

static bool rotate(const Rotation& rotation, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  alignas(64) float tile[kRotated];
  bool finite = true;
  for (int64_t part = begin; part < end; ++part)
    finite &= rotation.inner > 1 ? rotate_columns(rotation, part, tile) : rotate_line(rotation, part, tile);
  return finite;
}

}  // namespace LOWP_ISA
}  // namespace lowp
