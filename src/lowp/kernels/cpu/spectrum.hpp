// The profiler's counts of a tensor, and of the update of a weight, in one read. Included once per instruction set.
#pragma once

#include <new>

#include "statistics.hpp"

namespace lowp {
namespace LOWP_ISA {

// The bits of significand that a number needs, including the leading one, from its lowest set bit.
static inline unsigned significant_bits(uint32_t bits) {
  return 24 - static_cast<unsigned>(__builtin_ctz(bits | 0x800000));
}

constexpr int kNoPower = 256;

// The exponent field of a power of two, kNoPower for other numbers; without a branch, which would be mispredicted.
static inline int power_field(uint32_t magnitude) {
  return (magnitude & 0x7fffff) == 0 ? static_cast<int>(magnitude >> 23) : kNoPower;
}

// Neighbours often share a bin: several tables, so that an increment does not wait for the previous one.
struct SpectrumTables {
  uint32_t bins[2][kSpectrumBins];
  uint32_t significant[4][kSignificant];
  uint32_t powers[4][kNoPower + 1];
  int64_t held = 0;

  SpectrumTables() : bins(), significant(), powers() {}

  void add(const uint32_t* bits, int64_t count) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4)
      for (int lane = 0; lane < 4; ++lane) {
        const uint32_t magnitude = bits[i + lane] & 0x7fffffff;
        ++bins[lane & 1][magnitude >> kSpectrumShift];
        ++significant[lane][significant_bits(magnitude)];
        ++powers[lane][power_field(magnitude)];
      }
    for (; i < count; ++i) {
      const uint32_t magnitude = bits[i] & 0x7fffffff;
      ++bins[0][magnitude >> kSpectrumShift];
      ++significant[0][significant_bits(magnitude)];
      ++powers[0][power_field(magnitude)];
    }
    held += count;
  }

  void move_to(SpectrumSeen* seen) {
    for (int bin = 0; bin < kSpectrumBins; ++bin) seen->bins[bin] += int64_t{bins[0][bin]} + bins[1][bin];
    for (int length = 0; length < kSignificant; ++length)
      for (int lane = 0; lane < 4; ++lane) seen->significant[length] += significant[lane][length];
    for (int field = 0; field < kNoPower; ++field)
      for (int lane = 0; lane < 4; ++lane) seen->powers[field] += powers[lane][field];
    *this = SpectrumTables();
  }
};

// For a few numbers, or numbers that are not all finite: without the tables.
static void add_finite(const uint32_t* bits, int64_t count, SpectrumSeen* seen) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = bits[i] & 0x7fffffff;
    if (magnitude >= 0x7f800000) continue;
    ++seen->bins[magnitude >> kSpectrumShift];
    ++seen->significant[significant_bits(magnitude)];
    if (const int field = power_field(magnitude); field != kNoPower) ++seen->powers[field];
  }
}

static inline int64_t sum_of_bits(const uint32_t* bits, int64_t count) {
  int64_t sum = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) sum += static_cast<int32_t>(bits[i]);
  return sum;
}

// Counts of the finite nonzero numbers, and the sum of the bits of all, for the tensor divided by `scale`.
static void spectrum(const Task& task, float scale, SpectrumSeen* seen, double* partial_sums, int64_t begin,
                     int64_t end) {
  const ExactArithmetic exact;
  alignas(64) uint32_t buffer[kSumBlock];
  const bool few = end - begin <= kSumBlock;
  SpectrumTables* const tables = few ? nullptr : new (std::nothrow) SpectrumTables;
  for (int64_t first = begin; first < end; first += kSumBlock) {
    const int64_t count = end - first < kSumBlock ? end - first : kSumBlock;
    const uint32_t* bits = load<F32>(task.in, task.in_type, first, count, buffer);
    if (scale != 1) {
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < count; ++i) buffer[i] = bits_of(number(bits[i]) / scale);
      bits = buffer;
    }
    const auto kinds = kinds_of<F32>(bits, count);
    if (tables == nullptr || !kinds.are_finite())
      add_finite(bits, count, seen);
    else
      tables->add(bits, count);
    if (tables != nullptr && tables->held > int64_t{1} << 30) tables->move_to(seen);
    kinds.add_to(seen);
    seen->checksum += sum_of_bits(bits, count);
    partial_sums[first / kSumBlock] = kinds.are_finite() ? sum_of_squares<true>(bits, count) : sum_of_squares<false>(bits, count);
  }
  if (tables != nullptr) tables->move_to(seen);
  delete tables;
}

// The bits of the largest magnitude: those of infinities and NaN are above all others.
static int32_t largest(const float* in, int64_t count) {
  int32_t most = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(bits_of(in[i]) & 0x7fffffff);
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// The row of an exponent: its field minus `lowest`, limited to the number of rows.
static inline int row_of(uint32_t bits, int lowest) {
  const int row = static_cast<int>(bits >> 23 & 255) - 127 - lowest;
  return row < 0 ? 0 : row >= kUpdateRows ? kUpdateRows - 1 : row;
}

static void updates(const Update& given, UpdatesSeen* seen, double* energy, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t weight = bits_of(given.weight[i]), update = bits_of(given.update[i]);
    const int row = row_of(weight, kLowestWeight);
    const bool present = (update & 0x7fffffff) != 0;
    if (present) {
      const bool shrinks = ((weight ^ update) >> 31) != 0 && (weight & 0x7fffffff) != 0;
      const int kind = !shrinks ? 0 : (weight & 0x7fffff) == 0 ? 2 : 1;
      ++seen->joint[(row * kUpdateRows + row_of(update, kLowestUpdate)) * 3 + kind];
    }
    if (given.gradient != nullptr) {
      const float slope = given.gradient[i];
      if ((bits_of(slope) & 0x7fffffff) < 0x7f800000) {
        energy[row] += static_cast<double>(slope) * static_cast<double>(slope);
        seen->none += slope != 0 && !present;
      }
    }
  }
}

}  // namespace LOWP_ISA
}  // namespace lowp
