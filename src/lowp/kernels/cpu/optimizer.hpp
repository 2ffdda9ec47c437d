// Steps of optimizers on weights and moments in few bits: at most kBlock numbers are read as fp32, moved and written again, all
// in the cache. Included once per instruction set. lowp/kernels/steps/updates.py has the definition; every operation is rounded.
#pragma once

#include "groups.hpp"
#include "quantize.hpp"

namespace lowp {
namespace LOWP_ISA {

// -- weights: bf16 and a remainder, of 16 or 8 bits, of which the whole are the bits of an fp32 number ----------------------
template <class T>
static void join(const uint16_t* half, const T* rest, uint32_t* out, int64_t count) {
  constexpr int kShift = 16 - 8 * sizeof(T);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t upper = static_cast<uint32_t>(half[i]) << 16;
    const uint32_t joined = upper + (static_cast<uint32_t>(static_cast<int32_t>(rest[i])) << kShift);
    out[i] = (upper << 1) == 0 && rest[i] < 0 ? upper : joined;  // less than zero is no number
  }
}

template <class T>
static void split(const uint32_t* in, uint16_t* half, T* rest, int64_t count) {
  constexpr int kShift = 16 - 8 * sizeof(T), kBits = 8 * sizeof(T);
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = in[i], kept = kShift == 0 ? bits : (bits + 0x80) >> kShift;
    const uint32_t upper = (kept + (1u << (kBits - 1))) >> kBits;
    const bool nan = (bits & 0x7fffffff) > Constants<F32>::kInf;
    half[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : upper);
    rest[i] = static_cast<T>(nan ? 0 : kept - (upper << kBits));
  }
}

static void load_weight(const lowp_rule& rule, const Stepping& one, int64_t begin, int64_t count, uint32_t* out) {
  const uint16_t* const half = static_cast<const uint16_t*>(one.weight) + begin;
  if (rule.rest_bytes == 2) return join(half, static_cast<const int16_t*>(one.rest) + begin, out, count);
  if (rule.rest_bytes == 1) return join(half, static_cast<const int8_t*>(one.rest) + begin, out, count);
  const uint32_t* const found = load<F32>(one.weight, static_cast<int>(rule.type), begin, count, out);
  if (found != out) std::memcpy(out, found, sizeof(out[0]) * static_cast<size_t>(count));
}

static void store_weight(const lowp_rule& rule, const Stepping& one, int64_t begin, int64_t count, uint32_t* weight) {
  uint16_t* const half = static_cast<uint16_t*>(one.weight) + begin;
  if (rule.rest_bytes != 0 && rule.cast != nullptr)
    quantize({rule.cast, weight, weight, kFp32, kFp32, one.seed, false, one.index}, 0, count);
  if (rule.rest_bytes == 2) return split(weight, half, static_cast<int16_t*>(one.rest) + begin, count);
  if (rule.rest_bytes == 1) return split(weight, half, static_cast<int8_t*>(one.rest) + begin, count);
  const int type = static_cast<int>(rule.type);
  if (rule.cast == nullptr) return store<F32>(weight, one.weight, type, begin, count, false);
  quantize({rule.cast, weight, at(one.weight, begin, carrier_bytes(type)), kFp32, type, one.seed, false, one.index}, 0, count);
}

// -- moments ----------------------------------------------------------------------------------------------------------
// Every moment draws by a seed of its own: `seed_of` of optim/storage.py spreads the counters by these odd numbers.
constexpr uint64_t kSeedOfStep = 0x9E3779B97F4A7C15, kSeedOfTensor = 0xC2B2AE3D27D4EB4F;

static Groups groups_of(const lowp_moment& kept, void* scales, int64_t begin, int64_t count) {
  void* const stored = at(scales, begin / kept.group, kept.scale_bytes);
  return {kept.sharing, count, smaller(kept.group, count), 1, nullptr, nullptr, stored, static_cast<int32_t>(kept.scale_bytes), false};
}

static void load_moment(const lowp_moment& kept, void* from, void* scales, int64_t begin, int64_t count, float* out) {
  if (kept.sharing != nullptr) {
    Groups groups = groups_of(kept, scales, begin, count);
    const int bits = kept.sharing->element.bits;
    groups.packed = bits < 8;
    decode_groups({nullptr, at(from, begin * bits / 8, 1), out, 0, kFp32, 0, false}, groups, 0, count);
  } else {
    uint32_t* const numbers = reinterpret_cast<uint32_t*>(out);
    const uint32_t* const found = load<F32>(from, static_cast<int>(kept.type), begin, count, numbers);
    if (found != numbers) std::memcpy(numbers, found, sizeof(float) * static_cast<size_t>(count));
  }
  if (!kept.root) return;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) out[i] = out[i] * out[i];
}

template <class T>
static void raise_zeros(const float* roots, T* codes, int64_t count) {
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<T>(codes[i] | (codes[i] == 0 && roots[i] > 0));
}

static void store_codes(const lowp_moment& kept, void* to, void* scales, const Task& given, int64_t begin, int64_t count) {
  const int bits = kept.sharing->element.bits;
  alignas(64) uint8_t few[kBlock + 8];
  Task task = given;
  task.out = bits < 8 ? few : reinterpret_cast<uint8_t*>(at(to, begin * (bits > 8 ? 2 : 1), 1));
  encode_groups(task, groups_of(kept, scales, begin, count), 0, count);
  const float* const roots = static_cast<const float*>(given.in);
  if (kept.root && bits > 8) raise_zeros(roots, static_cast<uint16_t*>(task.out), count);
  if (kept.root && bits <= 8) raise_zeros(roots, static_cast<uint8_t*>(task.out), count);
  if (bits < 8) pack(few, count, bits, reinterpret_cast<uint8_t*>(at(to, begin * bits / 8, 1)));
}

// Keeps a moment, given its root where that is kept. NaN becomes 0 and infinities the largest number.
static void store_moment(const lowp_rule& rule, const Stepping& one, int slot, int64_t begin, int64_t count, float* moment) {
  const lowp_moment& kept = rule.moments[slot];
  const float largest = kept.root ? 0x1.fffffep63f : 0x1.fffffep127f;  // the root of the largest number
  if (kept.sharing != nullptr || kept.cast != nullptr) {
    LOWP_VECTOR_LOOP
    for (int64_t i = 0; i < count; ++i) {
      const float x = moment[i], below = x > largest ? largest : x, within = below < -largest ? -largest : below;
      moment[i] = x != x ? 0 : within;
    }
  }
  const int type = static_cast<int>(kept.type);
  const uint64_t seed = one.seed * kSeedOfStep + static_cast<uint64_t>(slot + 1) * kSeedOfTensor;
  const Task task{kept.cast, moment, nullptr, kFp32, type, seed, false, one.index};
  if (kept.sharing != nullptr) return store_codes(kept, one.moments[slot], one.scales[slot], task, begin, count);
  if (kept.cast == nullptr)
    return store<F32>(reinterpret_cast<uint32_t*>(moment), one.moments[slot], type, begin, count, false);
  Task written = task;
  written.out = at(one.moments[slot], begin, carrier_bytes(type));
  quantize(written, 0, count);
}

// -- rules ------------------------------------------------------------------------------------------------------------
// numbers: 1 - beta1, beta1, beta2, 1 - beta2, epsilon. rates: 1 - lr * decay, -lr / (1 - beta1^n), sqrt(1 - beta2^n). Leaves the
// root of the second moment where that is kept.
static void adamw(const lowp_rule& rule, const float* rates, float* weight, const float* gradient, float* average, float* square,
                  int64_t count) {
  const float first = rule.numbers[0], rest = rule.numbers[1], beta2 = rule.numbers[2], second = rule.numbers[3];
  const float epsilon = rule.numbers[4], kept = rates[0], size = rates[1], root_of = rates[2];
  const bool near = (rule.flags & kNear) != 0, keeps_root = rule.moments[1].root != 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i], away = g - average[i];
    const float mean = near ? average[i] + away * first : g - away * rest;
    const float squares = square[i] * beta2 + g * second * g, root = __builtin_sqrtf(squares);
    average[i] = mean, square[i] = keeps_root ? root : squares;
    weight[i] = weight[i] * kept + mean * size / (root / root_of + epsilon);
  }
}

// numbers: momentum, 1 - dampening, weight decay. rates: -lr, and above zero if there is a momentum of earlier steps.
static void sgd(const lowp_rule& rule, const float* rates, float* weight, const float* gradient, float* buffer, int64_t count) {
  const float momentum = rule.numbers[0], undamped = rule.numbers[1], decay = rule.numbers[2], size = rates[0];
  const bool decays = (rule.flags & kDecays) != 0, moves = (rule.flags & kMoves) != 0, nesterov = (rule.flags & kNesterov) != 0;
  const bool begun = rates[1] > 0;
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float g = decays ? gradient[i] + weight[i] * decay : gradient[i];
    const float moved = begun ? buffer[i] * momentum + g * undamped : g;
    buffer[i] = moved;
    const float along = nesterov ? g + moved * momentum : moved;
    weight[i] = weight[i] + (moves ? along : g) * size;
  }
}

// numbers: beta1, 1 - beta1, beta2, 1 - beta2. rates: 1 - lr * decay, -lr.
static void lion(const lowp_rule& rule, const float* rates, float* weight, const float* gradient, float* average, int64_t count) {
  const float beta1 = rule.numbers[0], first = rule.numbers[1], beta2 = rule.numbers[2], second = rule.numbers[3];
  const float kept = rates[0], size = rates[1];
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i], toward = average[i] * beta1 + g * first;
    average[i] = average[i] * beta2 + g * second;
    const float sign = toward > 0 ? 1.0f : toward < 0 ? -1.0f : toward;  // of NaN: NaN
    weight[i] = weight[i] * kept + sign * size;
  }
}

// Asks for the bytes of the next block, which the processor does not find by itself while it computes on this one.
static void ask_for_next(const void* from, int64_t begin, int64_t bits) {
  if (from == nullptr) return;
  const char* const next = static_cast<const char*>(from) + (begin + kBlock) * bits / 8;
  for (int64_t byte = 0; byte < kBlock * bits / 8; byte += 64) __builtin_prefetch(next + byte);
}

static int64_t bits_of_moment(const lowp_moment& kept) {
  return kept.sharing == nullptr ? 8 * carrier_bytes(static_cast<int>(kept.type)) : kept.sharing->element.bits;
}

[[maybe_unused]] static void step(const lowp_rule& rule, const Stepping& one, int64_t begin, int64_t end) {
  const ExactArithmetic exact;
  const int64_t count = end - begin;
  alignas(64) uint32_t weight[kBlock], wide[kBlock];
  alignas(64) float gradient[kBlock], moments[2][kBlock];
  load_weight(rule, one, begin, count, weight);
  ask_for_next(one.weight, begin, 8 * carrier_bytes(static_cast<int>(rule.type)));
  ask_for_next(one.rest, begin, 8 * rule.rest_bytes);
  const float* const given =
      reinterpret_cast<const float*>(load<F32>(one.gradient, static_cast<int>(rule.gradient_type), begin, count, wide));
  LOWP_VECTOR_LOOP
  for (int64_t i = 0; i < count; ++i) gradient[i] = given[i] * one.scale;
  ask_for_next(one.gradient, begin, 8 * carrier_bytes(static_cast<int>(rule.gradient_type)));
  for (int slot = 0; slot < 2; ++slot) {
    if (one.moments[slot] == nullptr) continue;
    load_moment(rule.moments[slot], one.moments[slot], one.scales[slot], begin, count, moments[slot]);
    ask_for_next(one.moments[slot], begin, bits_of_moment(rule.moments[slot]));
  }
  float* const numbers = reinterpret_cast<float*>(weight);
  if (rule.kind == kAdamW) adamw(rule, one.rates, numbers, gradient, moments[0], moments[1], count);
  if (rule.kind == kSgd) sgd(rule, one.rates, numbers, gradient, moments[0], count);
  if (rule.kind == kLion) lion(rule, one.rates, numbers, gradient, moments[0], count);
  for (int slot = 0; slot < 2; ++slot)
    if (one.moments[slot] != nullptr) store_moment(rule, one, slot, begin, count, moments[slot]);
  store_weight(rule, one, begin, count, weight);
}

}  // namespace LOWP_ISA
}  // namespace lowp
