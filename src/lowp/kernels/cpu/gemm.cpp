// The integer matrix product: choice of the micro-kernel, distribution of the result, and the C functions.
#include "gemm.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#include "gemm_sides.hpp"
#include "parallel.hpp"

namespace lowp {

#if !defined(__x86_64__)
const Micro* micro_avx2() { return nullptr; }
const Micro* micro_avx512() { return nullptr; }
#endif
#if !defined(__aarch64__)
const Micro* micro_neon() { return nullptr; }
#endif

const Micro* choose_micro(const char* name) {
  const Micro* best_first[] = {micro_avx512(), micro_avx2(), micro_neon(), micro_portable()};
  for (const Micro* micro : best_first)
    if (micro && (!name || !*name || std::strcmp(name, micro->name) == 0)) return micro;
  return nullptr;
}

void Tally::merge(const Tally& other) {
  saturated += other.saturated;
  largest_mantissa = std::max(largest_mantissa, other.largest_mantissa);
  largest_sum = std::max(largest_sum, other.largest_sum);
  largest_value = std::max(largest_value, other.largest_value);
}

void Tally::report(int64_t* seen, double* largest) const {
  seen[0] = saturated, seen[1] = largest_mantissa, seen[2] = largest_sum;
  *largest = largest_value;
}

// A tensor may begin at any byte.
float Bias::number(int64_t i) const {
  float found;
  std::memcpy(&found, numbers + i, sizeof(found));
  return found;
}

bool Bias::is_finite() const {
  for (int64_t i = 0; numbers && i < count; i++)
    if (!std::isfinite(number(i))) return false;
  return true;
}

std::vector<double> Bias::panels(int64_t first, int64_t count, int width) const {
  if (!numbers) return {};
  std::vector<double> whole(static_cast<size_t>(divide_up(count, width) * width));
  for (int64_t i = 0; i < count; i++)
    whole[static_cast<size_t>(i)] = std::ldexp(static_cast<double>(number(first + i)), exponent);
  return whole;
}

float Operand::chunk_norm(int) const { return LARGEST_NORM; }

void Target::offsets(int64_t first, int64_t count, int64_t* out) const {
  for (int64_t i = 0; i < count; i++) out[i] = first + i;
}

namespace {

constexpr int64_t KEPT_BYTES = int64_t{64} << 20;

// A part of one result: panels of rows times panels of columns, over the whole depth.
struct Unit {
  size_t product;
  int64_t row, rows, column, columns;  // in panels
};

void cut(int64_t total, int64_t at_most, std::vector<int64_t>& begins) {
  const int64_t parts = std::max<int64_t>(1, divide_up(total, std::max<int64_t>(1, at_most)));
  begins.clear();
  for (int64_t part = 0; part <= parts; part++) begins.push_back(total * part / parts);
}

// Rows and columns of a unit: as many as stay in the second-level cache beside the accumulators; fewer columns if threads
// would wait.
std::vector<Unit> plan(const Micro& micro, const std::vector<Product>& products, bool right_ahead, int threads) {
  std::vector<Unit> units;
  for (int64_t shrink = 1; shrink <= 8; shrink *= 2) {
    units.clear();
    for (size_t i = 0; i < products.size(); i++) {
      const int64_t rows = divide_up(products[i].left->count, micro.rows);
      const int64_t columns = divide_up(products[i].right->count, micro.columns);
      if (rows == 0 || columns == 0) continue;
      std::vector<int64_t> row_cuts, column_cuts;
      cut(rows, (right_ahead ? 96 : 384) / micro.rows, row_cuts);
      const int64_t unit_rows = divide_up(rows, static_cast<int64_t>(row_cuts.size()) - 1) * micro.rows;
      const int64_t unit_columns = std::min<int64_t>(256, 32768 / unit_rows) / micro.columns / shrink;
      cut(columns, unit_columns, column_cuts);
      for (size_t c = 0; c + 1 < column_cuts.size(); c++)
        for (size_t r = 0; r + 1 < row_cuts.size(); r++)
          units.push_back(
              {i, row_cuts[r], row_cuts[r + 1] - row_cuts[r], column_cuts[c], column_cuts[c + 1] - column_cuts[c]});
    }
    if (threads == 1 || units.size() >= 4 * static_cast<size_t>(threads)) break;
  }
  // the same columns of all products together: their results may be neighbours in memory
  if (products.size() > 1)
    std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.column < b.column; });
  return units;
}

struct Buffers {
  Scratch<int32_t> right, right_digits;
  Scratch<float> right_bounds, right_errors, chained;
  Scratch<int64_t> exact;
};

template <class T>
T* accumulators(Buffers& buffers, int64_t count);
template <>
float* accumulators<float>(Buffers& buffers, int64_t count) {
  return buffers.chained.get(count);
}
template <>
int64_t* accumulators<int64_t>(Buffers& buffers, int64_t count) {
  return buffers.exact.get(count);
}

void add(const Micro& micro, const Side& a, const Side& b, bool begin, float* out) {
  micro.add_chained(a, b, begin, out);
}
void add(const Micro& micro, const Side& a, const Side& b, bool begin, int64_t* out) {
  micro.add_exact(a, b, begin, out);
}

// Writes one tile of results to the target.
template <class Out>
class Writer {
 public:
  Writer(const Micro& micro, const Product& product) : micro_(micro), product_(product) {}

  void begin_columns(int64_t panel) {
    first_ = panel * micro_.columns;
    count_ = std::min<int64_t>(micro_.columns, product_.right->count - first_);
    product_.target->offsets(first_, count_, offsets_);
    span_count_ = 0;
    for (int64_t j = 0, end; j < count_; j = end) {
      end = j + 1;
      if (offsets_[j] < 0) continue;
      const int64_t step = end < count_ && offsets_[end] > offsets_[j] ? offsets_[end] - offsets_[j] : 1;
      while (end < count_ && offsets_[end] == offsets_[end - 1] + step) end++;
      spans_[span_count_++] = {j, offsets_[j], end - j, step};
    }
  }

  // Writes a tile by finish(place, addends): directly if all its columns are adjacent, otherwise through a buffer.
  template <class Finish>
  void write(int64_t row_panel, Finish&& finish) {
    const int64_t first_row = row_panel * micro_.rows, stride = product_.target->row_stride;
    const int rows = static_cast<int>(std::min<int64_t>(micro_.rows, product_.left->count - first_row));
    const double *by_row = product_.row_addends, *by_column = product_.column_addends;
    const Addends addends{by_row ? by_row + first_row : nullptr, by_column ? by_column + first_ : nullptr, count_};
    Out* data = static_cast<Out*>(product_.target->data) + first_row * stride;
    if (span_count_ == 1 && spans_[0].step == 1 && spans_[0].length == micro_.columns)
      return finish(Place<Out>{data + spans_[0].place, stride, rows}, addends);
    finish(Place<Out>{results_, micro_.columns, rows}, addends);
    for (int64_t i = 0; i < rows; i++) write_row(data + i * stride, results_ + i * micro_.columns);
  }

 private:
  void write_row(Out* row, const Out* from) const {
    for (int s = 0; s < span_count_; s++) {
      const Span& span = spans_[s];
      Out* to = row + span.place;
      const Out* source = from + span.column;
      if (span.step == 1)
        std::memcpy(to, source, static_cast<size_t>(span.length) * sizeof *source);
      else
        for (int64_t j = 0; j < span.length; j++) to[j * span.step] = source[j];
    }
  }

  // Columns of the panel at places `step` apart.
  struct Span {
    int64_t column, place, length, step;
  };

  alignas(64) Out results_[12 * 32];
  const Micro& micro_;
  const Product& product_;
  int64_t first_ = 0, count_ = 0, offsets_[64];
  Span spans_[64];
  int span_count_ = 0;
};

// Packs a panel of B over one step, and its digits if they may be needed with `left`.
Side pack_right(const Micro& micro, const Operand& operand, int64_t panel, int64_t k, const PackedSide& left,
                Buffers& buffers) {
  const int64_t end = left.end(k), pairs = (end - k + 1) / 2;
  int32_t* data = buffers.right.get(STEP / 2 * micro.columns + OVERRUN);
  float* bounds = buffers.right_bounds.get(Digits::ERRORS);
  const Digits digits = Digits::in(buffers.right_digits.get(Digits::size(micro.columns, STEP)),
                                   buffers.right_errors.get(Digits::ERRORS), micro.columns);
  operand.pack(micro.right, panel * micro.columns, k, end, data);
  micro.right.bound(pairs, data, bounds);
  if (needs_digits(bounds, left.largest.data() + k / BLOCK * BOUNDS, end - k)) micro.right.digits(pairs, data, digits);
  return {data, bounds, pairs, digits, 0};
}

// For results that are summed first and finished then.
struct NotAtOnce {
  template <class Out>
  bool operator()(const Side&, const Side&, const Addends&, const Place<Out>&) const {
    return false;
  }
};

// Sums all tiles of a unit over the depth, step by step, and writes each tile after its last step; `finish` converts a tile
// of sums to results, and `at_once` does both, or returns false, if one step is the whole depth. Tile (column, row) is at
// (column * rows + row) * tile size, or with one step all tiles are at the same place.
template <class T, class Out, class Finish, class AtOnce = NotAtOnce>
void run_tiles(const Micro& micro, const Unit& unit, const Product& product, const PackedSide& left,
               const PackedSide* right, Buffers& buffers, Finish finish, AtOnce at_once = {}) {
  const int64_t tile = micro.rows * micro.columns, depth = product.depth;
  const bool one_step = depth <= left.step;
  const int64_t sums_size = one_step ? tile : tile * unit.rows * unit.columns;
  T* sums = accumulators<T>(buffers, sums_size);
  Writer<Out> writer(micro, product);
  int64_t k = 0;
  do {  // once for a depth of 0, which writes zeros
    const bool last = left.end(k) == depth;
    for (int64_t c = 0; c < unit.columns; c++) {
      const int64_t panel = unit.column + c;
      const Side b =
          right ? right->side(panel, k) : pack_right(micro, *product.right, panel, k, left, buffers);
      if (last) writer.begin_columns(panel);
      for (int64_t r = 0; r < unit.rows; r++) {
        T* tile_sums = one_step ? sums : sums + (c * unit.rows + r) * tile;
        const Side a = left.side(unit.row + r, k);
        if (!one_step) add(micro, a, b, k == 0, tile_sums);
        if (!last) continue;
        writer.write(unit.row + r, [&](const Place<Out>& to, const Addends& addends) {
          if (one_step && at_once(a, b, addends, to)) return;
          if (one_step) add(micro, a, b, true, tile_sums);
          finish(tile_sums, addends, to);
        });
      }
    }
    k += left.step;
  } while (k < depth);
}

void run_unit(const Micro& micro, const Unit& unit, const Product& product, const PackedSide& left,
              const PackedSide* right, const Format& format, Buffers& buffers, Tally& tally) {
  // |sum| <= depth * 2^30: below 2^51 the cheap conversion to double is exact
  const bool narrow = product.depth < int64_t{1} << 21;
  const int exponent = format.exponent;
  switch (format.kind) {
    case Kind::chained:
      return run_tiles<float, float>(micro, unit, product, left, right, buffers,
                                     [&](const float* sums, const Addends& addends, const Place<float>& to) {
                                       micro.finish_chained(sums, exponent, addends, to, tally);
                                     });
    case Kind::int16:
      return run_tiles<int64_t, int16_t>(
          micro, unit, product, left, right, buffers,
          [&](const int64_t* sums, const Addends& addends, const Place<int16_t>& to) {
            micro.finish_int16(sums, narrow, exponent, addends, format.lowest, to, tally);
          },
          [&](const Side& a, const Side& b, const Addends& addends, const Place<int16_t>& to) {
            micro.exact_int16(a, b, exponent, addends, format.lowest, to, tally);
            return true;
          });
    case Kind::float32:
      return run_tiles<int64_t, float>(micro, unit, product, left, right, buffers,
                                       [&](const int64_t* sums, const Addends&, const Place<float>& to) {
                                         micro.finish_float(sums, narrow, exponent, to, tally);
                                       });
    case Kind::float64:
      return run_tiles<int64_t, double>(micro, unit, product, left, right, buffers,
                                        [&](const int64_t* sums, const Addends&, const Place<double>& to) {
                                          micro.finish_double(sums, narrow, exponent, to, tally);
                                        });
    case Kind::int64:
      return run_tiles<int64_t, int64_t>(micro, unit, product, left, right, buffers,
                                         [&](const int64_t* sums, const Addends&, const Place<int64_t>& to) {
                                           micro.finish_int64(sums, narrow, to, tally);
                                         });
  }
}

}  // namespace

void run(const Micro& micro, const std::vector<Product>& products, const Format& format, bool right_ahead, int threads,
         Tally& tally) {
  static thread_local SideMemory left_memory, right_memory;
  std::vector<const Operand*> lefts, rights;
  std::vector<int64_t> depths;
  for (const Product& product : products) {
    lefts.push_back(product.left);
    rights.push_back(product.right);
    depths.push_back(product.depth);
  }
  PackedSides left(micro.left, lefts, depths, left_memory);
  std::unique_ptr<PackedSides> right;
  if (right_ahead) right.reset(new PackedSides(micro.right, rights, depths, right_memory));
  pack_sides(left, right.get(), rights, threads);
  const std::vector<Unit> units = plan(micro, products, right_ahead, threads);
  std::mutex mutex;
  bool out_of_memory = false;
  std::atomic<int64_t> next{0};  // few and large units: one at a time, so that threads do not wait for long
  const auto work = [&](int64_t, int64_t) noexcept {
    static thread_local Buffers buffers;
    Tally seen;
    bool failed = false;
    try {
      for (int64_t u = next++; u < static_cast<int64_t>(units.size()); u = next++) {
        const Unit& unit = units[static_cast<size_t>(u)];
        run_unit(micro, unit, products[unit.product], left.sides[unit.product],
                 right ? &right->sides[unit.product] : nullptr, format, buffers, seen);
      }
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    tally.merge(seen);
    out_of_memory = out_of_memory || failed;
  };
  parallel_for(std::min<int64_t>(threads, static_cast<int64_t>(units.size())), 1, threads, work);
  if (out_of_memory) throw std::bad_alloc();
  left_memory.release_above(KEPT_BYTES);
  right_memory.release_above(KEPT_BYTES);
}

namespace {

// A matrix with a stride of 1.
class Matrix : public Operand {
 public:
  Matrix(const int16_t* data, int64_t count, int64_t stride_count, int64_t stride_depth)
      : Operand(count), data_(data), stride_count_(stride_count), stride_depth_(stride_depth) {}

  void pack(const Packer& packer, int64_t first, int64_t k0, int64_t k1, int32_t* panel) const override {
    if (stride_depth_ == 1) {
      const int16_t* lines[64];
      for (int w = 0; w < packer.width; w++)
        lines[w] = first + w < count ? data_ + (first + w) * stride_count_ + k0 : nullptr;
      packer.lines(lines, k1 - k0, panel);
      return;
    }
    int64_t offsets[STEP];
    for (int64_t k = k0; k < k1; k++) offsets[k - k0] = k * stride_depth_;
    packer.rows(data_ + first, offsets, k1 - k0, count - first, panel);
  }

 private:
  const int16_t* data_;
  const int64_t stride_count_, stride_depth_;
};

}  // namespace
}  // namespace lowp

// c[i, j] = a[i, j] times b[i, j] for pairs of int16 matrices in two dimensions; see `multiply` in integer.py.
//   sizes   the matrices along i and along j, m, n, k
//   strides of a: i, j, m, k; of b: i, j, n, k (one of the last two is 1); of c: i, j, m (n has stride 1)
//   kind    0 chained fp32; exact: 1 int16, 2 fp32, 3 fp64, 4 int64
//   bias    null, or n numbers added to chained results, or times 2^bias_exponent to the sums rounded to int16
//   seen    int64[3]: saturated, largest mantissa, largest sum; largest: the largest value written (chained)
// Returns 0; 1 if `forced` names a kernel that this machine lacks; 2 if memory ran out; 3 if numbers to round to int16 are
// not finite.
LOWP_EXPORT int lowp_integer_matmul(const char* forced, const int16_t* a, const int16_t* b, void* c,
                                    const int64_t* sizes, const int64_t* strides, int kind, int exponent, int lowest,
                                    const float* bias, int bias_exponent, int threads, int64_t* seen,
                                    double* largest) {
  const lowp::Micro* micro = lowp::choose_micro(forced);
  if (!micro) return 1;
  try {
    const int64_t inner = sizes[1], batch = sizes[0] * inner, m = sizes[2], n = sizes[3], k = sizes[4];
    const int64_t *of_a = strides, *of_b = strides + 4, *of_c = strides + 8;
    static const int64_t bytes[] = {4, 2, 4, 8, 8};
    std::vector<lowp::Matrix> lefts, rights;
    std::vector<lowp::Target> targets(static_cast<size_t>(batch));
    std::vector<lowp::Product> products;
    const lowp::Bias numbers{bias, n, bias_exponent};
    if (static_cast<lowp::Kind>(kind) == lowp::Kind::int16 && !numbers.is_finite()) return 3;
    const std::vector<double> added = numbers.panels(0, n, micro->columns);
    lefts.reserve(static_cast<size_t>(batch));
    rights.reserve(static_cast<size_t>(batch));
    for (int64_t i = 0; i < batch; i++) {
      const auto place = [&](const int64_t* of) { return i / inner * of[0] + i % inner * of[1]; };
      lefts.emplace_back(a + place(of_a), m, of_a[2], of_a[3]);
      rights.emplace_back(b + place(of_b), n, of_b[2], of_b[3]);
      lowp::Target& target = targets[static_cast<size_t>(i)];
      target.data = static_cast<char*>(c) + place(of_c) * bytes[kind];
      target.row_stride = of_c[2];
      products.push_back({&lefts.back(), &rights.back(), k, &target, nullptr, bias ? added.data() : nullptr});
    }
    lowp::Tally tally;
    lowp::run(*micro, products, {static_cast<lowp::Kind>(kind), exponent, lowest}, true, threads, tally);
    tally.report(seen, largest);
    return 0;
  } catch (const std::exception&) {
    return 2;
  }
}
