// The C functions of tables of shared exponents, called by lowp/kernels/int16/entries.py: tensors are written under the exponents
// of their entries, which begin at a first write, and predictions are made from what was seen. And the maxima of delayed scales.
#include "exponents.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "calls.hpp"

namespace lowp {
namespace {

constexpr int kMostWindow = 256;
constexpr int64_t kMostMantissa = 1 << 29;  // that is noted of a single number beyond the entry's exponent, in its units

enum How : int64_t { kPlain = 0, kTwoWords = 1, kRoots = 2, kUnlessExact = 3 };

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

int within(const lowp_autoflex& rule, int exponent) {
  return std::clamp(exponent, rule.min_exponent, rule.max_exponent);
}

double limit_of(const lowp_autoflex& rule) { return (1 << (rule.bits - 1)) - 1; }

int floor_log2(double x) {  // -1 of zero, as torch's frexp has it
  int exponent = 0;
  std::frexp(x, &exponent);
  return exponent - 1;
}

// -- a first write ----------------------------------------------------------------------------------------------------

// Algorithm 1: the exponent of an entry whose first tensor has this maximum.
int guess(const lowp_autoflex& rule, double maximum) {
  constexpr int kStart = -8, kTries = 10, kTelling = 32;
  if (maximum == 0) return within(rule, 0);
  const double limit = limit_of(rule);
  int exponent = within(rule, kStart);
  for (int tries = 0; tries < kTries; ++tries) {
    const double mantissa = std::min(std::nearbyint(std::ldexp(maximum, -exponent)), limit);
    const bool saturated = mantissa >= limit, small = mantissa < (1 << (rule.bits - 2));
    const int length = std::max(floor_log2(mantissa) + 1, 1);
    const int wanted = saturated ? exponent + (rule.bits - 1) / 2 : small ? exponent + length - (rule.bits - 1) : exponent;
    exponent = within(rule, wanted);
    if (saturated ? exponent != wanted : !small || mantissa >= kTelling) break;
  }
  return within(rule, exponent + rule.start_headroom);
}

double largest_root(const float* x, int64_t count) {
  float most = 0;
  for (int64_t i = 0; i < count; ++i)
    if (x[i] > most && x[i] <= std::numeric_limits<float>::max()) most = x[i];
  return std::sqrt(static_cast<double>(most));
}

// -- one write --------------------------------------------------------------------------------------------------------

template <class T>
bool any_nan(const void* x, int64_t count) {
  const T* numbers = static_cast<const T*>(x);
  return std::any_of(numbers, numbers + count, [](T one) { return one != one; });
}

bool has_nan(int type, const void* x, int64_t count) {
  if (type == kFp64) return any_nan<double>(x, count);
  if (type == kFp32) return any_nan<float>(x, count);
  const int infinity = type == kFp16 ? 0x7c00 : 0x7f80;
  const auto* bits = static_cast<const uint16_t*>(x);
  return std::any_of(bits, bits + count, [=](uint16_t one) { return (one & 0x7fff) > infinity; });
}

int64_t crowded_of(const int16_t* mantissas, int64_t count, int64_t half) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += mantissas[i] > half || mantissas[i] < -half;
  return found;
}

// One tensor that is written. Of a single number, such as a loss, nothing would be left if it were cut off: its exponent is
// one that holds it.
struct Row {
  int64_t entry;
  How how;
  int type;
  const void* x;
  int16_t* mantissas;  // null: not needed
  float* values;       // may be x
  int64_t count, low_bits;
  int32_t* exponent;  // null: not asked for

  explicit Row(const int64_t* given)
      : entry(given[0]), how(static_cast<How>(given[1])), type(static_cast<int>(given[2])), x(at<void>(given[3])),
        mantissas(at<int16_t>(given[4])), values(at<float>(given[5])), count(given[6]), low_bits(given[7]),
        exponent(at<int32_t>(given[8])) {}

  // The largest finite magnitude; with a minus sign if there is an infinity or a NaN.
  double largest() const {
    if (count == 0) return 0;
    const Task task{nullptr, x, nullptr, type, 0, 0, false};
    const double found = kernels().find_largest(task, 0, count);
    return how == kRoots ? largest_root(static_cast<const float*>(x), count) : found;
  }

  int holding(const lowp_autoflex& rule, int exponent) const {
    if (count != 1 || !rule.adapt || how == kTwoWords) return exponent;
    const double size = largest();
    if (std::signbit(size) || size <= std::ldexp(limit_of(rule), exponent)) return exponent;
    return std::max(within(rule, floor_log2(size) - (rule.bits - 2)), exponent);
  }

  void write(const lowp_cast& cast, int32_t exponent, int threads, int64_t* counts) const {
    if (how == kPlain)
      return lowp_write_int16(&cast, type, x, &exponent, mantissas, values, count, 0, threads, counts);
    const Kernels& kernel = kernels();
    Mantissas all{};
    gather(count, kBlock, threads, &all, [&](Mantissas* part, int64_t begin, int64_t end) {
      if (how == kRoots) return kernel.roots_int16(values, exponent, cast, part, begin, end);
      kernel.words_int16(values, exponent, static_cast<int>(low_bits), static_cast<int>(cast.minimum), part, begin, end);
    });
    tell(all, counts);
  }
};

void begin(const lowp_table& table, const Row& row) {
  if (table.started[row.entry]) return;
  const double maximum = std::fabs(row.largest());
  table.exponent[row.entry] = table.before[row.entry] = guess(table.rule, maximum);
  table.started[row.entry] = maximum > 0;
}

// Whether x, fp32, is in the format under the exponent of its own maximum, which is then told.
bool is_exact(const lowp_table& table, const lowp_cast& cast, const Row& row, int threads) {
  const lowp_autoflex& rule = table.rule;
  return lowp_is_exact_int16(&cast, static_cast<const float*>(row.x), 2 - rule.bits, rule.min_exponent,
                             rule.max_exponent, row.count, threads, row.exponent);
}

// Returns whether anything is not finite.
bool write(const lowp_table& table, const lowp_cast& cast, Row row, int threads) {
  begin(table, row);
  const int predicted = table.exponent[row.entry], exponent = row.holding(table.rule, predicted);
  std::vector<int16_t> own(static_cast<size_t>(table.crowds && !row.mantissas ? row.count : 0));
  if (!own.empty()) row.mantissas = own.data();
  int64_t counts[4];
  row.write(cast, exponent, threads, counts);
  if (row.exponent) *row.exponent = exponent;
  const bool is_nan = counts[2] > 0 && has_nan(row.type, row.x, row.count);  // in place infinities and NaNs stay
  const int64_t half = static_cast<int64_t>(cast.maximum) / 2;
  const int64_t crowded = table.crowds ? crowded_of(row.mantissas, row.count, half) : 0;
  note(table, row.entry, counts, exponent - predicted, row.count, is_nan, crowded);
  return counts[2] > 0;
}

// -- the end of a step ------------------------------------------------------------------------------------------------

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
  const int warm = count < rule.window ? rule.warm_headroom : 0;
  return within(rule, floor_log2(chi) - (rule.bits - 2) + rule.headroom + warm);
}

void count(const lowp_table& table, int64_t i, double mantissa, double limit, bool is_good) {
  if (!is_good || mantissa <= 0) return;
  const bool saturated = mantissa >= limit;
  const bool needed = saturated || std::ldexp(mantissa, table.exponent[i]) > std::ldexp(limit, table.before[i]);
  table.headroom_sum[i] += std::log2(32768.0 / mantissa);
  table.measured[i] += 1;
  table.raises_needed[i] += needed;
  table.raises_in_time[i] += needed && !saturated;
}


void observe(const lowp_table& table, int64_t i) {
  const lowp_autoflex& rule = table.rule;
  const int64_t* seen = table.seen + i * kWords;
  const double limit = limit_of(rule), mantissa = static_cast<double>(seen[kLargest]);
  const bool is_good = !(seen[kFlags] & (table.is_result[i] ? kSawNan : kSawNonFinite));
  const bool saturated = is_good && mantissa >= limit;
  count(table, i, mantissa, limit, is_good);
  double* history = table.history + i * rule.window;
  const double kappa = std::ldexp(1.0, table.exponent[i]);
  if (saturated) {
    std::fill(history, history + rule.window, 0.0);
    table.known[i] = 0;
  }
  if (is_good && mantissa > 0) history[table.known[i]++ % rule.window] = (saturated ? 2 * mantissa : mantissa) * kappa;
  const int before = table.exponent[i];
  if (is_good && table.known[i] > 0 && rule.adapt) table.exponent[i] = predicted(rule, history, table.known[i], kappa);
  if ((seen[kFlags] & kSawVanished) && is_good && rule.adapt) table.started[i] = false;
  table.before[i] = before;
  table.writes[i] += 1;
  table.saturated[i] += saturated;
  table.moved[i] += table.exponent[i] != before;
  table.nonfinite[i] += !is_good;
}

}  // namespace
}  // namespace lowp

using namespace lowp;

void lowp::note(const lowp_table& table, int64_t entry, const int64_t* counts, int shift, int64_t elements, bool has_nan,
                int64_t crowded) {
  int64_t* seen = table.seen + entry * kWords;
  const int64_t mantissa = shift ? std::min(counts[0] << shift, kMostMantissa) : counts[0];
  seen[kLargest] = std::max(seen[kLargest], mantissa);
  seen[kOverflowed] += counts[1], seen[kCrowded] += crowded, seen[kElements] += elements;
  if (counts[2] > 0) seen[kFlags] |= kSawNonFinite;
  if (has_nan) seen[kFlags] |= kSawNan;
  if (counts[0] == 0 && counts[2] == 0 && counts[3]) seen[kFlags] |= kSawVanished;
}

// Writes tensors to nearest even, or as `cast` rounds, each under its entry's exponent, which begins with it if it has not.
// rows: entry, how (0 as values, which may overwrite x; in place 1 as two words, 2 as squares of values, of which none
// vanishes), type, x, mantissas (0: not needed), values, elements, how many binary places a second word is lower, and where the
// exponent is told (0: nowhere). With 3 for how, fp32 is written as values unless it is in the format: then its own
// exponent is told, and nothing else done. Returns of how many tensors something is not finite, less those not written.
LOWP_EXPORT int64_t lowp_write_entries(const lowp_table* table, const lowp_cast* cast, const int64_t* rows,
                                       int64_t count, int threads) {
  int64_t nonfinite = 0;
  for (int64_t i = 0; i < count; ++i, rows += 9) {
    Row row(rows);
    if (row.how == kUnlessExact && is_exact(*table, *cast, row, threads)) {
      --nonfinite;
      continue;
    }
    if (row.how == kUnlessExact) row.how = kPlain;
    nonfinite += write(*table, *cast, row, threads);
  }
  return nonfinite;
}

// Reads weights as mantissas before a step. rows: entries of update and weight, weight, its mantissas, elements. told: of
// each its exponent, and whether the step may be written by lowp_end_entries: both entries have begun, and the weight is
// in the format under its exponent, with room for what is added.
LOWP_EXPORT void lowp_hold_entries(const lowp_table* table, const int64_t* rows, int64_t count, int threads,
                                   int64_t* told) {
  for (int64_t i = 0; i < count; ++i, rows += 5, told += 2) {
    told[0] = table->exponent[rows[1]], told[1] = 0;
    if (!table->started[rows[0]] || !table->started[rows[1]]) continue;
    const int64_t largest =
        lowp_exact_int16(at<float>(rows[2]), table->exponent + rows[1], at<int16_t>(rows[3]), rows[4], threads);
    told[1] = largest >= 0 && static_cast<double>(largest) <= limit_of(table->rule);
  }
}

// Writes what a step has changed of weights, and each as the sum, in place, and then `more` tensors. steps: rows of
// lowp_hold_entries; `told` are the exponents that it told. writes: rows of lowp_write_entries.
LOWP_EXPORT void lowp_end_entries(const lowp_table* table, const lowp_cast* cast, const int64_t* steps, int64_t count,
                                  const int64_t* told, const int64_t* writes, int64_t more, int threads) {
  for (int64_t i = 0; i < count; ++i, steps += 5, told += 2) {
    const int exponents[] = {static_cast<int>(told[0]), table->exponent[steps[0]], table->exponent[steps[1]]};
    int64_t counts[8];
    write_step(at<float>(steps[2]), at<int16_t>(steps[3]), exponents, static_cast<int>(cast->minimum), steps[4], threads,
               counts);
    for (int64_t part = 0; part < 2; ++part) note(*table, steps[part], counts + 4 * part, 0, steps[4], false, 0);
  }
  for (int64_t i = 0; i < more; ++i, writes += 9) write(*table, *cast, Row(writes), threads);
}

// Observes what was seen of `count` entries, predicts their exponents, and forgets it. A window has 1 to 256 maxima.
LOWP_EXPORT void lowp_observe_entries(const lowp_table* table, const int64_t* entries, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t* seen = table->seen + entries[i] * kWords;
    observe(*table, entries[i]);
    table->faulty[entries[i]] |= (seen[kFlags] & kSawNonFinite) != 0;
    std::fill(seen, seen + kWords, 0);
  }
}

// Whether anything that was written in this step is not finite (1), and whether a finite number did not fit (2); the sum.
LOWP_EXPORT int lowp_met_in_entries(const lowp_table* table, int64_t count) {
  int found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* seen = table->seen + i * kWords;
    if (table->faulty[i] || (seen[kFlags] & kSawNonFinite)) found |= 1;
    if (seen[kOverflowed] > 0) found |= 2;
  }
  return found;
}

// Remembers the maxima of a step, as `DelayedMaximum` of lowp/scaling/delayed.py does, and chooses the next scales in fp32.
//   rows[n][3]: of each entry the scale, the maximum met, and whether any was; the last two become 0
//   history[n][window], largest[n]; known, writes, saturated, nonfinite: int64[n]
//   factor: 2^headroom; highest: what the largest number is to become
LOWP_EXPORT void lowp_remember_maxima(double* rows, int64_t n, float* history, int64_t window, int64_t* known, float* largest,
                                      int64_t* writes, int64_t* saturated, int64_t* nonfinite, double factor,
                                      double highest) {
  for (int64_t i = 0; i < n; i++, rows += 3) {
    const float seen = static_cast<float>(rows[1]);
    const bool is_met = rows[2] > 0, is_good = is_met && std::isfinite(seen);
    writes[i] += is_met, nonfinite[i] += is_met && !is_good;
    if (is_good) {
      saturated[i] += largest[i] > 0 && seen > largest[i] * static_cast<float>(factor);
      float* const ring = history + i * window;
      ring[known[i]++ % window] = seen;
      uint32_t most = 0;  // bits of numbers that are not negative are ordered like them
      for (int64_t t = 0; t < window; t++) {
        uint32_t bits;
        std::memcpy(&bits, ring + t, sizeof(bits));
        most = bits > most ? bits : most;
      }
      std::memcpy(largest + i, &most, sizeof(most));
    }
    const double ratio = static_cast<double>(largest[i]) * factor / highest, rounded = static_cast<double>(static_cast<float>(ratio));
    const double least = std::numeric_limits<float>::min(), most = std::numeric_limits<float>::max();
    rows[0] = ratio == 0 ? 1.0 : std::min(std::max(rounded, least), most);
    rows[1] = rows[2] = 0;
  }
}
