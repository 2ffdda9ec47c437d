// Lines of numbers read as fp32, as they are or rounded by a cast: how the operands of a product are read. Included once
// per instruction set.
#pragma once

#include "product.hpp"
#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

template <class C>
static void read_rounded(const Lines& from, float* to, int64_t stride) {
  const Caster<C> caster(*from.cast, from.seed, 0, from.keeps);
  alignas(64) typename C::Bits buffer[kBlock], rounded[C::kWidth == 32 ? 1 : kBlock];
  for (int64_t i = 0; i < from.lines; ++i, to += stride) {
    const typename C::Bits* in = load<C>(from.data, from.type, from.first + i * from.line, from.length, buffer);
    const int64_t index = from.index + i * from.index_line;
    typename C::Bits* place = C::kWidth == 32 ? reinterpret_cast<typename C::Bits*>(to) : rounded;
    caster(in, place, index, from.length);
    if (C::kWidth != 32) store<C>(place, to, kFp32, 0, from.length, false);
  }
}

// Writes lines of at most kBlock numbers to lines of `to` that are `stride` apart.
static void read_lines(const Lines& from, float* to, int64_t stride) {
  const ExactArithmetic exact;
  if (from.cast != nullptr) return reaches<F32>(*from.cast) ? read_rounded<F32>(from, to, stride) : read_rounded<F64>(from, to, stride);
  for (int64_t i = 0; i < from.lines; ++i, to += stride) {
    uint32_t* place = reinterpret_cast<uint32_t*>(to);
    const uint32_t* in = load<F32>(from.data, from.type, from.first + i * from.line, from.length, place);
    if (in != place) std::memcpy(place, in, static_cast<size_t>(from.length) * sizeof(float));
  }
}

}  // namespace LOWP_ISA
}  // namespace lowp
