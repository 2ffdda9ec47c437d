// Tensors whose numbers share scales: in one pass over strips of whole groups, or of given scales. Included once per
// instruction set.
#pragma once

#include "codes.hpp"
#include "tries.hpp"

namespace lowp {
namespace LOWP_ISA {

// The runs of a strip from the number `first` on, at most to `end`. If `whole`, its groups are: none if the first is longer
// than a strip.
struct Strip {
  int64_t group;  // of the first run
  int64_t rest;   // of the first group
  int64_t count = 0;
  bool follows = false;  // under the scales of the strip before
  const uint32_t* words = nullptr;  // the random words of columns, and
  int64_t index = 0;                // of the first of them
  Runs runs;

  // A row of `columns` numbers, `across` neighbours of which are in a group.
  Strip(int64_t columns, int64_t across) : group(0), rest(0), count(columns) {
    runs.number = (columns + across - 1) / across, runs.each = columns % across == 0 ? across : 0;
    for (int64_t run = 0; across > 1 && run < runs.number; ++run)
      runs.length[run] = static_cast<int32_t>(smaller(across, columns - run * across));
  }

  Strip(const Groups& groups, int64_t first, int64_t end, bool whole) {
    const int64_t of_row = (groups.row + groups.group - 1) / groups.group;
    int64_t column = first % groups.row;
    const int64_t begun = column % groups.group;
    group = first / groups.row * of_row + column / groups.group;
    runs.again = whole;
    rest = smaller(groups.group - begun, groups.row - column);
    const int64_t most = smaller(kBlock, end - first);
    if (begun == 0 && groups.row % groups.group == 0 && groups.group <= most) {
      runs.number = most / groups.group, runs.each = groups.group;
      count = runs.number * groups.group;
      if (runs.each != 16 && runs.each != 32)
        for (int64_t run = 0; run < runs.number; ++run) runs.length[run] = static_cast<int32_t>(groups.group);
      return;
    }
    for (int64_t length = rest; count < most; length = smaller(groups.group, groups.row - column)) {
      if (length > most - count) {
        if (whole) return;
        length = most - count;
      }
      runs.length[runs.number++] = static_cast<int32_t>(length);
      count += length, column += length;
      column = column == groups.row ? 0 : column;
    }
  }
};

// -- scales as they are kept ------------------------------------------------------------------------------------------
static inline bool keeps_fp32(const lowp_sharing& sharing) {
  return !sharing.power && sharing.scale.bits == 32 && sharing.scale.mantissa_bits == 23;
}

template <class T>
static void store_powers(const lowp_sharing& sharing, const double* scale, T* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int exponent = static_cast<int>(bits_of(scale[i]) >> 52) - 1023;
    out[i] = static_cast<T>(scale[i] == scale[i] ? exponent - sharing.stored_from : sharing.scale.nan);
  }
}

template <class T>
static void read_powers(const lowp_sharing& sharing, const T* in, double* scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int exponent = static_cast<int32_t>(in[i]) + sharing.stored_from;
    const bool known = exponent <= sharing.last || sizeof(T) > 2;  // the exponent of a whole tensor is a number
    scale[i] = known ? power_of_two<F64>(exponent) : number(Constants<F64>::kQuietNan);
  }
}

// At most kBlock scales, from that of `group` on.
static void store_scales(const Groups& groups, const double* scale, int64_t group, int64_t count) {
  const lowp_sharing& sharing = *groups.sharing;
  alignas(64) uint64_t bits[kBlock];
  std::memcpy(bits, scale, sizeof(double) * static_cast<size_t>(count));
  if (keeps_fp32(sharing)) return store<F64>(bits, groups.stored, kFp32, group, count, false);
  with_code_type(groups.stored_bytes, [&](auto code) {
    auto* const out = static_cast<decltype(code)*>(groups.stored) + group;
    if (sharing.power) return store_powers(sharing, scale, out, count);
    Coder<F64>(sharing.scale).encode(bits, out, count);
  });
}

static void read_scales(const Groups& groups, const Coder<F64>& coder, int64_t group, int64_t count, double* scale) {
  const lowp_sharing& sharing = *groups.sharing;
  alignas(64) uint64_t bits[kBlock];
  if (keeps_fp32(sharing)) {
    load<F64>(groups.stored, kFp32, group, count, bits);
  } else {
    with_code_type(groups.stored_bytes, [&](auto code) {
      const auto* const in = static_cast<const decltype(code)*>(groups.stored) + group;
      if (sharing.power) return read_powers(sharing, in, scale, count);
      coder.decode(in, bits, count);
    });
    if (sharing.power) return;
  }
  std::memcpy(scale, bits, sizeof(double) * static_cast<size_t>(count));
}

// -- codes that fill no whole bytes -----------------------------------------------------------------------------------
// Eight codes of `bits` bits, one a byte, as the lowest 8 * bits bits of a word, the first lowest; and back.
static inline uint64_t packed_eight(uint64_t codes, int bits) {
  const uint64_t each = 0x0101010101010101 * ((1u << bits) - 1);
  codes &= each;
  codes = (codes & 0x00ff00ff00ff00ff) | (codes & 0xff00ff00ff00ff00) >> (8 - bits);
  codes = (codes & 0x0000ffff0000ffff) | (codes & 0xffff0000ffff0000) >> (16 - 2 * bits);
  return (codes & 0x00000000ffffffff) | (codes & 0xffffffff00000000) >> (32 - 4 * bits);
}

static inline uint64_t unpacked_eight(uint64_t word, int bits) {
  const auto low = [](int count) { return (uint64_t{1} << count) - 1; };
  word = (word & low(4 * bits)) | (word >> (4 * bits) & low(4 * bits)) << 32;
  const uint64_t pair = 0x0000000100000001 * low(2 * bits), each = 0x0001000100010001 * low(bits);
  word = (word & pair) | (word << (16 - 2 * bits) & pair << 16);
  return (word & each) | (word << (8 - bits) & each << 8);
}

// At most kBlock codes, the first of which begins a byte. `codes` has room for eight more.
static void pack(uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  std::memset(codes + count, 0, 8);
  if (bits == 4) {
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < (count + 1) / 2; ++i) out[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    return;
  }
  uint8_t bytes[kBlock + 8];
  for (int64_t i = 0, at = 0; i < count; i += 8, at += bits) {
    uint64_t word;
    std::memcpy(&word, codes + i, 8);
    word = packed_eight(word, bits);
    std::memcpy(bytes + at, &word, 8);
  }
  std::memcpy(out, bytes, static_cast<size_t>((count * bits + 7) / 8));
}

// `codes` has room for eight more.
static void unpack(const uint8_t* in, int64_t count, int bits, bool is_signed, uint8_t* codes) {
  if (bits == 4) {
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      const uint8_t pair = in[i];
      codes[2 * i] = pair & 15, codes[2 * i + 1] = pair >> 4;
    }
  } else {
    uint8_t bytes[kBlock + 8];
    std::memcpy(bytes, in, static_cast<size_t>((count * bits + 7) / 8));
    for (int64_t i = 0, at = 0; i < count; i += 8, at += bits) {
      uint64_t word;
      std::memcpy(&word, bytes + at, 8);
      word = unpacked_eight(word, bits);
      std::memcpy(codes + i, &word, 8);
    }
  }
  if (!is_signed) return;
  const uint8_t sign = static_cast<uint8_t>(1u << (bits - 1));
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<uint8_t>((codes[i] ^ sign) - sign);
}

// -- values in the type of the tensor ---------------------------------------------------------------------------------
// One rounding from fp64.
static void narrow_exactly(uint64_t* values, int type, int64_t count) {
  if (type == kFp64) return;
  if (type == kFp32) {  // the conversion to fp32 is that rounding, except for overflow
    constexpr double kLargest = 0x1.fffffep127;
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) {
      const double value = number(values[i]);
      const double above = value < -kLargest ? -kLargest : value;
      values[i] = bits_of(above > kLargest ? kLargest : above);
    }
    return;
  }
  lowp_cast cast{};
  cast.bits = 16;
  cast.is_signed = cast.subnormals = cast.has_zero = cast.has_nan = cast.minus_zero = 1;
  cast.overflow = kSaturate;
  cast.mantissa_bits = type == kFp16 ? 10 : 7;
  cast.bias = type == kFp16 ? 15 : 127;
  cast.min_exponent = 1 - cast.bias;
  cast.maximum = type == kFp16 ? 65504.0 : 0x1.fep127;
  cast.minimum = -cast.maximum;
  cast_numbers<F64, kNearestEven, kPlain>(values, values, count, nullptr, make_lane<F64>(cast));
}

// Whether fp16 or bf16 lacks one of these numbers.
static bool loses(const uint32_t* values, int type, int64_t count) {
  uint32_t lost = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t a = values[i] & 0x7fffffff;
    const uint32_t tiny = mask<F32>(a < 0x38800000), small = a & tiny;
    const uint32_t below = mask<F32>(bits_of((number(small) + 0.5f) - 0.5f) != small);
    const uint32_t half = (tiny & below) | (~tiny & ((a & 0x1fff) | mask<F32>(a > 0x477fe000)));
    lost |= (type == kFp16 ? half : a & 0xffff) & mask<F32>(a <= 0x7f800000);
  }
  return lost != 0;
}

// The values of a strip, written. Returns whether the type lacks one: under powers of two they are not rounded again.
static bool write(const uint32_t* values, const Task& task, int64_t first, int64_t count) {
  const bool lost = task.out_type != kFp32 && loses(values, task.out_type, count);
  store<F32>(values, task.out, task.out_type, first, count, task.stream);
  return lost;
}

// Products that were rounded to fp32, written in bf16. Returns false, with nothing written, where the first rounding may decide
// the second, at the midpoint of two numbers of bf16, and where one is beyond its largest number or NaN.
static bool write_bf16(const uint32_t* values, const Task& task, int64_t first, int64_t count) {
  constexpr int32_t kBeyond = 0x7f7f8000;
  alignas(64) uint32_t moved[kBlock];
  uint32_t doubt = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = values[i];
    doubt |= mask<F32>(static_cast<int32_t>(bits & 0x7fffffff) >= kBeyond) | mask<F32>((bits & 0xffff) == 0x8000);
    moved[i] = bits + 0x8000;
  }
  if (doubt == 0) store<F32>(moved, task.out, kBf16, first, count, task.stream);
  return doubt == 0;
}

static bool write(uint64_t* values, const Task& task, bool power, int64_t first, int64_t count) {
  const bool once = power && task.out_type != kFp64;
  narrow_exactly(values, once ? kFp32 : task.out_type, count);
  if (!once) {
    store<F64>(values, task.out, task.out_type, first, count, task.stream);
    return false;
  }
  alignas(64) uint32_t narrow[kBlock];
  store<F64>(values, narrow, kFp32, 0, count, false);
  return write(narrow, task, first, count);
}

// -- the kernels ------------------------------------------------------------------------------------------------------
template <class C>
static double find_largest_in(const Task& task, int64_t begin, int64_t end) {
  alignas(64) typename C::Bits buffer[kBlock];
  double most = 0;
  bool finite = true;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = end - first < kBlock ? end - first : kBlock;
    const typename C::Bits* in = load<C>(task.in, task.in_type, first, count, buffer);
    typename C::Bits largest = largest_of<C, false>(in, count);
    if (largest >= Constants<C>::kInf) finite = false, largest = largest_of<C, true>(in, count);
    const double magnitude = wide_number(largest);
    most = magnitude > most ? magnitude : most;
  }
  return finite ? most : -most;
}

static double find_largest(const Task& task, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  return task.in_type == kFp64 ? find_largest_in<F64>(task, begin, end) : find_largest_in<F32>(task, begin, end);
}

// The scales of at most kBlock groups, which are stored, too.
static void choose_scales(const Groups& groups, int64_t group, const double* found, int64_t count, double* scale) {
  const ExactArithmetic exact;
  ScaleOf(*groups.sharing)(found, count, groups.outer, scale);
  if (groups.stored != nullptr) store_scales(groups, scale, group, count);
}

static double outer_scale(const lowp_sharing& sharing, double largest) {
  const ExactArithmetic exact;
  const double ratio = largest / sharing.outer_highest;
  const double rounded = cast_general(ratio, sharing.outer, 0, 0);
  return ratio == 0 ? 1.0 : rounded > sharing.outer_smallest ? rounded : sharing.outer_smallest;
}

// Of `count` columns the largest of each `across` neighbours, in place; with a minus sign if one has it. Returns their number.
static int64_t largest_across(double* found, int64_t count, int64_t across) {
  if (across == 1) return count;
  int64_t number = 0;
  for (int64_t begin = 0; begin < count; begin += across, ++number) {
    uint64_t most = 0, sign = 0;
    for (int64_t i = begin; i < smaller(begin + across, count); ++i) {
      const uint64_t bits = bits_of(found[i]), magnitude = bits & Constants<F64>::kMagnitude;
      most = magnitude > most ? magnitude : most, sign |= bits ^ magnitude;
    }
    found[number] = LOWP_ISA::number(most | sign);
  }
  return number;
}

// The same of groups that lie beside each other: of at most `beside` columns at a time, numbered from `begin` to `end`.
template <class C, class Use>
static bool each_row_of_columns(const Task& task, const Groups& groups, int64_t begin, int64_t end, Use use) {
  using Bits = typename C::Bits;
  const ScaleOf scale_of(*groups.sharing);
  Tries tries(scale_of, groups.outer);
  alignas(64) Bits buffer[kBeside], largest[kBeside];
  alignas(64) double scale[kBeside], found[kBeside];
  const int64_t across = groups.across, most = beside(groups), parts = (groups.inner + most - 1) / most;
  const int64_t of_row = (groups.row + groups.group - 1) / groups.group;
  bool finite = true;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t column = part % parts * most, count = smaller(most, groups.inner - column);
    const int64_t band = part / parts, above = band % of_row * groups.group, rows = smaller(groups.group, groups.row - above);
    const int64_t corner = (band / of_row * groups.row + above) * groups.inner + column;
    const auto row_of = [&](int64_t row) {
      return load<C>(task.in, task.in_type, corner + row * groups.inner, count, buffer);
    };
    largest_of_columns<C, false>(rows, count, row_of, largest);
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) found[i] = wide_number(largest[i]);
    if (largest_of<C, false>(largest, count) >= Constants<C>::kInf) {
      alignas(64) Bits others[kBeside];
      largest_of_columns<C, true>(rows, count, row_of, others);
      for (int64_t i = 0; i < count; ++i)
        if (largest[i] >= Constants<C>::kInf) found[i] = -wide_number(others[i]);
    }
    const int64_t number = largest_across(found, count, across);
    finite &= scale_of(found, number, groups.outer, scale);
    if (tries.are_needed()) {
      alignas(64) Bits line[kBeside];
      tries.begin(found, scale, number);
      tries.compare_columns(rows, count, across, row_of);
      tries.end(number, groups.group * across, [&](int64_t of, double* numbers) {
        const int64_t width = smaller(across, count - of * across);
        for (int64_t row = 0; row < groups.group; ++row) {
          double* const to = numbers + row * across;
          for (int64_t i = 0; i < across; ++i) to[i] = 0;
          if (row >= rows) continue;
          const Bits* const in = load<C>(task.in, task.in_type, corner + row * groups.inner + of * across, width, line);
          for (int64_t i = 0; i < width; ++i) to[i] = finite_magnitude<C>(in[i]);
        }
        return groups.group * across;
      }, scale);
    }
    Strip strip(count, across);
    alignas(64) uint32_t words[4 * kBeside];
    const int64_t index = task.index + (band / of_row * groups.inner + column) * groups.row + above;
    for (int64_t row = 0; row < rows; ++row, strip.follows = true) {
      if (groups.draws_across()) {
        const uint64_t first = static_cast<uint64_t>(index + row) / 4, distance = static_cast<uint64_t>(groups.row) / 4;
        if (row % 4 == 0) random_words_across(task.seed, first, distance, count, words);
        strip.words = words + row % 4 * count, strip.index = index + row - task.index;
      }
      use(row_of(row), corner + row * groups.inner, strip, scale, found);
    }
  }
  return finite;
}

// use(numbers, index of the first, strip, its scales, the largest magnitudes of its runs or null) for all strips from `begin` to
// `end`. Returns false where a scale was found of numbers that are not all finite.
template <class C, class Use>
static bool each_strip(const Task& task, const Groups& groups, int64_t begin, int64_t end, Use use) {
  if (groups.inner > 1) return each_row_of_columns<C>(task, groups, begin, end, use);
  const bool finds = groups.scale == nullptr;
  bool finite = true;
  const ScaleOf scale_of(*groups.sharing);
  Tries tries(scale_of, groups.outer);
  alignas(64) typename C::Bits buffer[kBlock];
  alignas(64) double scale[kBlock], found[kBlock];
  for (int64_t first = begin, long_end = begin; first < end;) {
    const bool inside = first < long_end;  // of a group longer than a strip, whose scale is known
    const Strip strip(groups, first, inside ? long_end : end, finds && !inside);
    if (strip.count == 0) {
      long_end = first + strip.rest;
      found[0] = find_largest(task, first, long_end);
      finite &= scale_of(found, 1, groups.outer, scale);
      if (groups.stored != nullptr) store_scales(groups, scale, strip.group, 1);
      continue;
    }
    const typename C::Bits* const in = load<C>(task.in, task.in_type, first, strip.count, buffer);
    if (finds && !inside) {
      largest_of_runs<C>(in, strip.runs, found);
      finite &= scale_of(found, strip.runs.number, groups.outer, scale);
      if (tries.are_needed()) {
        int64_t run = 0, next = 0;  // of the runs before it
        const auto length_of = [&](int64_t of) { return strip.runs.each ? strip.runs.each : strip.runs.length[of]; };
        tries.begin(found, scale, strip.runs.number);
        tries.compare(in, strip.runs);
        tries.end(strip.runs.number, groups.group, [&](int64_t of, double* numbers) {
          while (run < of) next += length_of(run++);
          for (int64_t i = 0; i < length_of(of); ++i) numbers[i] = finite_magnitude<C>(in[next + i]);
          return length_of(of);
        }, scale);
      }
      if (groups.stored != nullptr) store_scales(groups, scale, strip.group, strip.runs.number);
    }
    use(in, first, strip, finds ? scale : groups.scale + strip.group, finds ? found : nullptr);
    first += strip.count;
  }
  return finite;
}

static inline void widen(const uint32_t* in, uint64_t* out, int64_t count) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) out[i] = bits_of(static_cast<double>(number(in[i])));
}

// The scales of a strip's values, where they are corrected: the definition is `corrected` of numbers/scaled.py.
template <class Bits, class Element>
static const double* corrected(const Task& task, const Groups& groups, const Bits* in, const Element* element, const Strip& strip,
                               const double* scale, double* out) {
  const int64_t of_row = (groups.row + groups.group - 1) / groups.group;
  const int64_t first = task.index / groups.row * of_row + strip.group;
  lowp_cast random = groups.sharing->scale;
  random.rounding = kStochastic;
  alignas(64) double squares[kMostTried], products[kMostTried];
  each_run(strip.runs, [&](int64_t run, int64_t begin, auto count) {
    const double by = scale[run] * groups.outer;
    const int64_t length = count;
    LOWP_RUN_LOOP
    for (int64_t i = 0; i < length; ++i) {
      const double x = static_cast<double>(number(in[begin + i])), ratio = x / by;
      const double quotient = by > 0 && x - x == 0 ? ratio : 0, product = quotient * static_cast<double>(number(element[begin + i]));
      squares[i] = quotient * quotient;
      products[i] = quotient == 0 ? 0 : product;
    }
    const double square = sum_by_halves(squares, count, groups.group), product = sum_by_halves(products, count, groups.group);
    const double wanted = scale[run] * (product == 0 ? 1 : square / product);
    out[run] = wanted == wanted ? cast_general(wanted, random, task.seed, first + run) : wanted;
  });
  return out;
}

// The elements of each strip: in_fp32(elements, index, strip, scales), or in_fp64 if fp32 does not decide or x is fp64;
// near(cast, numbers, index, strip, scales) where that is rounded as it stands; none of them where whole(cast, numbers, index,
// strip, scales) is true.
template <class C, class Near, class Whole, class Narrow, class Wide>
static bool each_strip_rounded(const Task& task, const Groups& groups, int64_t begin, int64_t end, Near near, Whole whole,
                               Narrow in_fp32, Wide in_fp64) {
  const GroupCast cast(*groups.sharing, task.seed, task.index, groups.draws_across() ? groups.row : 1);
  alignas(64) uint32_t buffer[kBlock + 4], narrow[kBlock];
  alignas(64) uint64_t wide[kBlock];
  Factors by;
  alignas(64) double other[kBlock];
  const bool corrects = groups.sharing->corrects && groups.scale == nullptr;
  return each_strip<C>(task, groups, begin, end, [&](auto* in, int64_t first, const Strip& strip, const double* scale,
                                                     const double* found) {
    const int64_t count = strip.count;
    const uint32_t* words = strip.words == nullptr ? buffer : strip.words;
    const int64_t drawn = strip.words == nullptr ? first : strip.index;
    if (draws(cast.sharing.element.rounding) && words == buffer) words = words_from(task.seed, task.index + first, count, buffer);
    const int32_t* const points = groups.zero_point == nullptr ? nullptr : groups.zero_point + strip.group;
    if constexpr (sizeof(*in) == 4) {
      if (!strip.follows) {
        by.near = points == nullptr && cast.are_near(found, groups.most, strip.runs, scale, groups.outer, by.factor);
        by.reaches = !by.near && points == nullptr && cast.invert(strip.runs, scale, groups.outer, by);
      }
      if (by.near) return near(cast, in, first, strip, by);
      if (by.reaches && !corrects && whole(cast, in, first, strip, scale, by, words, drawn)) return;
      if (by.reaches && cast.elements(in, strip.runs, by, scale, groups.outer, words, drawn, count, narrow))
        return in_fp32(narrow, first, strip, corrects ? corrected(task, groups, in, narrow, strip, scale, other) : scale);
      widen(in, wide, count);
    } else {
      std::memcpy(wide, in, sizeof(wide[0]) * static_cast<size_t>(count));
    }
    cast.elements(wide, strip.runs, scale, groups.outer, points, words, drawn, count, wide);
    in_fp64(wide, first, strip, corrects ? corrected(task, groups, in, wide, strip, scale, other) : scale);
  });
}

template <class C>
static int quantize_groups_in(const Task& task, const Groups& groups, int64_t begin, int64_t end) {
  alignas(64) uint32_t result[kBlock];
  alignas(64) uint64_t wide[kBlock];
  const bool power = groups.sharing->power != 0;
  const bool narrow = task.out_type == kFp32 || (power && task.out_type != kFp64);
  const bool twice = !narrow && task.out_type == kBf16;  // rounded to fp32 and from there, unless that is in doubt
  // a strip that fp32 does not decide is read again
  const bool kept = task.in != task.out && !task.stream;
  const bool direct = kept && task.out_type == kFp32 && is_aligned(task.out, sizeof(uint32_t));
  bool lost = false;
  const auto in_fp64 = [&](uint64_t* element, int64_t first, const Strip& strip, const double* scale) {
    values(*groups.sharing, element, strip.runs, scale, groups.outer, nullptr);
    lost |= write(element, task, power, first, strip.count);
  };
  const auto in_fp32 = [&](const uint32_t* element, int64_t first, const Strip& strip, const double* scale) {
    uint32_t* const out = direct ? static_cast<uint32_t*>(task.out) + first : result;
    if (narrow || twice) values(*groups.sharing, element, strip.runs, scale, groups.outer, out);
    if (twice ? write_bf16(result, task, first, strip.count) : direct) return;
    if (narrow) {
      lost |= write(result, task, first, strip.count);
    } else {
      widen(element, wide, strip.count);
      in_fp64(wide, first, strip, scale);
    }
  };
  const auto whole = [&](const GroupCast& cast, const uint32_t* in, int64_t first, const Strip& strip, const double* scale,
                         const Factors& by, const uint32_t* words, int64_t drawn) {
    uint32_t* const out = direct ? static_cast<uint32_t*>(task.out) + first : result;
    if (!(narrow || twice) || !cast.all(in, strip.runs, by, scale, groups.outer, words, drawn, out)) return false;
    if (twice) return write_bf16(result, task, first, strip.count);
    if (!direct) lost |= write(result, task, first, strip.count);
    return true;
  };
  // values of few bits under near scales are bf16's, too
  const lowp_cast& element = groups.sharing->element;
  const int digits = element.kind == kInteger ? element.bits : element.mantissa_bits + 1;
  const bool holds = task.out_type == kFp32 || (task.out_type == kBf16 && digits <= 8);
  const bool at_once = task.out_type == kFp32 && !task.stream && is_aligned(task.out, sizeof(uint32_t));
  const auto near = [&](const GroupCast& cast, const uint32_t* in, int64_t first, const Strip& strip, Factors& by) {
    cast.template round_near<false>(in, strip.runs, by, strip.follows, at_once ? static_cast<uint32_t*>(task.out) + first : result);
    if (at_once) return;
    if (holds) return store<F32>(result, task.out, task.out_type, first, strip.count, task.stream);
    if (narrow) {
      lost |= write(result, task, first, strip.count);
    } else {
      widen(result, wide, strip.count);
      lost |= write(wide, task, power, first, strip.count);
    }
  };
  const bool finite = each_strip_rounded<C>(task, groups, begin, end, near, whole, in_fp32, in_fp64);
  if (task.stream) finish_streaming();
  return (lost ? kLost : 0) | (finite ? 0 : kNotFinite);
}

static int quantize_groups(const Task& task, const Groups& groups, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  if (task.in_type == kFp64) return quantize_groups_in<F64>(task, groups, begin, end);
  return quantize_groups_in<F32>(task, groups, begin, end);
}

template <class C, class T>
static int64_t encode_groups_in(const Task& task, const Groups& groups, int64_t begin, int64_t end) {
  const Coder<F32> narrow(groups.sharing->element);
  const Coder<F64> wide(groups.sharing->element);
  const int bits = groups.sharing->element.bits;
  alignas(64) T codes[kBlock + 8];
  int64_t nans = 0;
  const lowp_cast& other = groups.sharing->other;
  const auto put = [&](const auto& coder, auto* element, int64_t first, const Strip& strip, const double* scale) {
    T* const out = groups.packed ? codes : static_cast<T*>(task.out) + first;
    alignas(64) T wholes[kBlock];
    if (other.bits != 0) {
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < strip.count; ++i)
        wholes[i] = static_cast<T>(static_cast<int32_t>(number(element[i])) & ((1 << other.bits) - 1));
    }
    nans += coder.encode(element, out, strip.count);
    if (other.bits != 0) take_negative(strip.runs, scale, wholes, out);
    if constexpr (sizeof(T) == 1)
      if (groups.packed) pack(codes, strip.count, bits, static_cast<uint8_t*>(task.out) + first * bits / 8);
  };
  alignas(64) uint32_t found[kBlock];
  const auto put_found = [&](int64_t first, const Strip& strip) {
    T* const out = groups.packed ? codes : static_cast<T*>(task.out) + first;
    shorten(found, out, strip.count);
    if constexpr (sizeof(T) == 1)
      if (groups.packed) pack(codes, strip.count, bits, static_cast<uint8_t*>(task.out) + first * bits / 8);
  };
  const auto near = [&](const GroupCast& cast, const uint32_t* in, int64_t first, const Strip& strip, Factors& by) {
    cast.template round_near<true>(in, strip.runs, by, strip.follows, found);
    put_found(first, strip);
  };
  const auto whole = [&](const GroupCast& cast, const uint32_t* in, int64_t first, const Strip& strip, const double* scale,
                         const Factors& by, auto&&...) {
    if (!cast.codes(in, strip.runs, by, scale, groups.outer, found)) return false;
    put_found(first, strip);
    return true;
  };
  each_strip_rounded<C>(
      task, groups, begin, end, near, whole,
      [&](uint32_t* element, int64_t first, const Strip& strip, auto scale) { put(narrow, element, first, strip, scale); },
      [&](uint64_t* element, int64_t first, const Strip& strip, auto scale) { put(wide, element, first, strip, scale); });
  return nans;
}

// run(a zero of the unsigned type of codes)
template <class Run>
static auto with_short_code(int bits, Run run) {
  return bits <= 8 ? run(uint8_t{}) : run(uint16_t{});
}

static int64_t encode_groups(const Task& task, const Groups& groups, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  return with_short_code(groups.sharing->element.bits, [&](auto code) {
    using T = decltype(code);
    if (task.in_type == kFp64) return encode_groups_in<F64, T>(task, groups, begin, end);
    return encode_groups_in<F32, T>(task, groups, begin, end);
  });
}

// Whether fp32 has these scales, or they are NaN.
static bool are_fp32(const double* scale, int64_t count) {
  uint64_t lost = 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) lost |= mask<F64>(!is_fp32(scale[i])) & mask<F64>(scale[i] == scale[i]);
  return lost == 0;
}

template <class C, class T>
static bool decode_groups_in(const Task& task, const Groups& groups, int64_t begin, int64_t end) {
  const lowp_sharing& sharing = *groups.sharing;
  const Coder<C> coder(sharing.element);
  const Coder<F64> scale_coder(sharing.scale);
  alignas(64) typename C::Bits element[kBlock];
  alignas(64) uint64_t wide[kBlock];
  alignas(64) T copy[kBlock + 8];
  alignas(64) double scale[kBlock];
  const bool direct = task.out_type == kFp32 && !task.stream && is_aligned(task.out, sizeof(uint32_t));
  bool lost = false;
  for (int64_t first = begin; first < end;) {
    const Strip strip(groups, first, end, false);
    const int64_t count = strip.count;
    read_scales(groups, scale_coder, strip.group, strip.runs.number, scale);
    const T* codes = copy;
    if (groups.packed) {
      const int bits = sharing.element.bits;
      const uint8_t* const from = static_cast<const uint8_t*>(task.in) + first * bits / 8;
      if constexpr (sizeof(T) == 1) unpack(from, count, bits, sharing.element.kind != kFloat, copy);
    } else if (is_aligned(task.in, sizeof(T))) {
      codes = static_cast<const T*>(task.in) + first;
    } else {
      std::memcpy(copy, at(task.in, first, sizeof(T)), sizeof(T) * static_cast<size_t>(count));
    }
    coder.decode(codes, element, count);
    if (sharing.other.bits != 0) {
      const int sign = 1 << (sharing.element.bits - 1);
      alignas(64) typename C::Bits wholes[kBlock];
      LOWP_VECTOR_LOOP
      for (int64_t i = 0; i < count; ++i) wholes[i] = bits_of(static_cast<typename C::Number>((codes[i] ^ sign) - sign));
      take_negative(strip.runs, scale, wholes, element);
    }
    const bool narrow = sizeof(element[0]) == 4 && are_fp32(scale, strip.runs.number);
    if constexpr (sizeof(element[0]) == 4) {
      if (narrow) {
        uint32_t* const to = direct ? static_cast<uint32_t*>(task.out) + first : element;
        values(sharing, element, strip.runs, scale, groups.outer, to);
        if (!direct) lost |= write(element, task, first, count);
      } else {
        widen(element, wide, count);
      }
    } else {
      std::memcpy(wide, element, sizeof(wide[0]) * static_cast<size_t>(count));
    }
    if (!narrow) {
      values(sharing, wide, strip.runs, scale, groups.outer, groups.zero_point == nullptr ? nullptr : groups.zero_point + strip.group);
      lost |= write(wide, task, sharing.power != 0, first, count);
    }
    first += count;
  }
  if (task.stream) finish_streaming();
  return lost;
}

static bool decode_groups(const Task& task, const Groups& groups, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const lowp_sharing& sharing = *groups.sharing;
  const bool held = sharing.element.kind == kInteger || reaches<F32>(sharing.element);
  const bool once = task.out_type == kFp32 || (sharing.power && task.out_type != kFp64);
  const bool two = sharing.outer.bits == 0 || (is_fp32(groups.outer) && has_small_products(sharing));
  const bool narrow = held && once && two && groups.zero_point == nullptr;
  return with_short_code(sharing.element.bits, [&](auto code) {
    using T = decltype(code);
    if (narrow) return decode_groups_in<F32, T>(task, groups, begin, end);
    return decode_groups_in<F64, T>(task, groups, begin, end);
  });
}

}  // namespace LOWP_ISA
}  // namespace lowp
