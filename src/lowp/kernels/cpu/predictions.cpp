// The C function that updates predicted exponents from the writes of a step, called by lowp/kernels/int16/predictions.py.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "export.hpp"

// Layout as in lowp/kernels/cpu/abi.py; lowp/scaling/autoflex.py defines the members and the computation.
struct lowp_autoflex {
  double beta, gamma;
  int32_t bits, window, min_exponent, max_exponent, headroom, warm_headroom, adapt, unused;
};

// The columns of a table of entries, in the order in which lowp/exponents/table.py gives them.
struct lowp_entries {
  int32_t* exponent;
  double* history;  // `window` maxima per entry
  int32_t* seen;
  bool* started;
  int64_t *writes, *saturated, *moved, *nonfinite;
  int32_t* before;  // the exponent of the previous write
  double *raises_needed, *raises_in_time, *headroom_sum, *measured;
};

namespace lowp {
namespace {

constexpr int kNonFinite = 1, kVanished = 2;
constexpr int kMostWindow = 256;

struct Written {
  int32_t entry, mantissa, flags;
};

// The sum by halves, as in the definition: the second half of a row, padded with zeros to a power of two, is added to the
// first half until one number is left.
double folded(const double* row, int count) {
  double sums[kMostWindow] = {};
  std::copy(row, row + count, sums);
  int size = 1;
  while (size < count) size *= 2;
  for (int half = size / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[half + i];
  return sums[0];
}

int predicted(const lowp_autoflex& rule, const double* history, int count, double kappa) {
  const int known = std::min(count, rule.window);
  const double number = std::max(known, 1), mean = folded(history, rule.window) / number;
  double squares[kMostWindow] = {};
  for (int i = 0; i < known; ++i) squares[i] = (history[i] - mean) * (history[i] - mean);
  const double deviation = std::sqrt(folded(squares, rule.window) / number);
  const double chi =
      *std::max_element(history, history + rule.window) + rule.beta * deviation + rule.gamma * kappa;
  int exponent = 0;
  std::frexp(chi, &exponent);
  exponent += rule.headroom - 1 - (rule.bits - 2) + (count < rule.window ? rule.warm_headroom : 0);
  return std::clamp(exponent, rule.min_exponent, rule.max_exponent);
}

void count(const lowp_entries& table, int64_t i, double mantissa, double limit, bool is_good) {
  if (!is_good || mantissa <= 0) return;
  const bool saturated = mantissa >= limit;
  const bool needed = saturated || std::ldexp(mantissa, table.exponent[i]) > std::ldexp(limit, table.before[i]);
  table.headroom_sum[i] += std::log2(32768.0 / mantissa);
  table.measured[i] += 1;
  table.raises_needed[i] += needed;
  table.raises_in_time[i] += needed && !saturated;
}

void observe(const lowp_autoflex& rule, const lowp_entries& table, const Written& one) {
  const int64_t i = one.entry;
  const double limit = (1 << (rule.bits - 1)) - 1, mantissa = one.mantissa;
  const bool is_good = !(one.flags & kNonFinite), saturated = is_good && mantissa >= limit;
  count(table, i, mantissa, limit, is_good);
  double* history = table.history + i * rule.window;
  const double kappa = std::ldexp(1.0, table.exponent[i]);
  if (saturated) {
    std::fill(history, history + rule.window, 0.0);
    table.seen[i] = 0;
  }
  if (is_good && mantissa > 0) history[table.seen[i]++ % rule.window] = (saturated ? 2 * mantissa : mantissa) * kappa;
  const int before = table.exponent[i];
  if (is_good && table.seen[i] > 0 && rule.adapt)
    table.exponent[i] = predicted(rule, history, table.seen[i], kappa);
  if ((one.flags & kVanished) && is_good && rule.adapt) table.started[i] = false;
  table.before[i] = before;
  table.writes[i] += 1;
  table.saturated[i] += saturated;
  table.moved[i] += table.exponent[i] != before;
  table.nonfinite[i] += !is_good;
}

}  // namespace
}  // namespace lowp

// written: entry, largest |mantissa| and flags (1: not finite, 2: vanished) of each of `count` entries. A window has 1 to
// 256 maxima.
LOWP_EXPORT void lowp_autoflex_observe(const lowp_autoflex* rule, const lowp_entries* table, const int32_t* written,
                                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* one = written + 3 * i;
    lowp::observe(*rule, *table, {one[0], one[1], one[2]});
  }
}
