// The packed operands of products: the place of each panel, and the distribution of packing over threads.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "gemm.hpp"
#include "memory.hpp"
#include "parallel.hpp"

namespace lowp {

struct Free {
  void operator()(void* memory) const { free_aligned(memory); }
};

// Memory that a thread keeps for its next call: new pages would take as much time as packing.
template <class T>
class Scratch {
 public:
  T* get(int64_t count) {
    if (count > size_) {
      memory_.reset();
      memory_.reset(static_cast<T*>(allocate_aligned(64, static_cast<size_t>(count) * sizeof(T))));
      size_ = count;
    }
    return memory_.get();
  }
  void release_above(int64_t bytes) {
    if (size_ * static_cast<int64_t>(sizeof(T)) > bytes) {
      memory_.reset();
      size_ = 0;
    }
  }

 private:
  std::unique_ptr<T[], Free> memory_;
  int64_t size_ = 0;
};

// The depth of a step: about 512, evenly divided, in whole blocks.
inline int64_t step_of(int64_t depth) {
  const int64_t steps = std::max<int64_t>(1, (depth + 255) / 512);
  return std::min(STEP, std::max<int64_t>(1, divide_up(divide_up(depth, steps), BLOCK)) * BLOCK);
}

// Whether some chunk of a panel may need digits, with chunks of the other side whose norms are at most `others`
// (null: `most`).
inline bool needs_digits(const float* bounds, const float* others, int64_t depth, float most = LARGEST_NORM) {
  for (int64_t block = 0; block < blocks(depth); block++)
    for (int64_t c = block * BOUNDS + 1; c < (block + 1) * BOUNDS; c++)
      if (!(bounds[c] * (others ? others[c] : most) < SAFE)) return true;
  return false;
}

struct SideMemory {
  Scratch<int32_t> data, digits;
  Scratch<float> bounds, errors;
  void release_above(int64_t bytes) {
    data.release_above(bytes);
    digits.release_above(bytes);
    bounds.release_above(bytes);
    errors.release_above(bytes);
  }
};

// One packed side of one product. Panels of one step of the depth are contiguous, so that those of a unit are read
// in one stream.
struct PackedSide {
  const Packer* packer;
  const Operand* operand;
  int64_t depth, step, panels;
  int32_t* data;
  float* bounds;
  int32_t* digits_memory;
  float* errors;
  std::vector<float> largest;  // the largest bounds over all panels, with the layout of one panel's
  float most;                  // at least the norm of every chunk of the other side, where that is not packed ahead

  int64_t places() const { return panels * divide_up(depth, step); }  // panels of all steps
  int64_t end(int64_t k) const { return std::min(k + step, depth); }
  int32_t* panel(int64_t index, int64_t k) const {
    return data + (k / 2 * panels + index * ((end(k) - k + 1) / 2)) * packer->width;
  }
  float* bound(int64_t index, int64_t k) const { return bounds + (index * blocks(depth) + k / BLOCK) * BOUNDS; }
  Digits digits(int64_t index, int64_t k) const {
    const int64_t place = k / step * panels + index;
    return Digits::in(digits_memory + place * Digits::size(packer->width, step), errors + place * Digits::ERRORS,
                      packer->width);
  }
  Side side(int64_t index, int64_t k) const {
    const int rows = static_cast<int>(std::min<int64_t>(packer->width, operand->count - index * packer->width));
    return {panel(index, k), bound(index, k), (end(k) - k + 1) / 2, digits(index, k), rows};
  }
};

// The same side of several products. All panels are numbered, for distribution over threads.
class PackedSides {
 public:
  PackedSides(const Packer& packer, const std::vector<const Operand*>& operands, const std::vector<int64_t>& depths,
              SideMemory& memory)
      : packer_(packer) {
    int64_t pairs = 0, block_count = 0, places = 0, digits_size = 0;
    for (size_t i = 0; i < operands.size(); i++) {
      const int64_t depth = depths[i], count = divide_up(operands[i]->count, packer.width);
      sides.push_back({&packer, operands[i], depth, step_of(depth), count, nullptr, nullptr, nullptr, nullptr, {}, LARGEST_NORM});
      first_panels_.push_back(panels);
      panels += count;
      pairs += count * ((depth + 1) / 2);
      block_count += count * blocks(depth);
      places += sides.back().places();
      digits_size += sides.back().places() * Digits::size(packer.width, step_of(depth));
    }
    int32_t* data = memory.data.get(pairs * packer.width);
    float* bounds = memory.bounds.get(block_count * BOUNDS);
    int32_t* digits = memory.digits.get(digits_size);
    float* errors = memory.errors.get(places * Digits::ERRORS);
    for (PackedSide& side : sides) {
      side.data = data;
      side.bounds = bounds;
      side.digits_memory = digits;
      side.errors = errors;
      data += side.panels * ((side.depth + 1) / 2) * packer.width;
      bounds += side.panels * blocks(side.depth) * BOUNDS;
      digits += side.places() * Digits::size(packer.width, side.step);
      errors += side.places() * Digits::ERRORS;
    }
  }

  void pack(int64_t begin, int64_t end) const {
    each_step(begin, end, [&](const PackedSide& side, int64_t index, int64_t k) {
      int32_t* panel = side.panel(index, k);
      side.operand->pack(packer_, index * packer_.width, k, side.end(k), panel);
      packer_.bound((side.end(k) - k + 1) / 2, panel, side.bound(index, k));
    });
  }

  // after all is packed
  void find_largest() {
    for (PackedSide& side : sides) {
      const int64_t size = blocks(side.depth) * BOUNDS;
      side.largest.assign(static_cast<size_t>(size), 0.0f);
      for (int64_t panel = 0; panel < side.panels; panel++)
        for (int64_t i = 0; i < size; i++) {
          float& largest = side.largest[static_cast<size_t>(i)];
          largest = std::max(largest, side.bounds[panel * size + i]);
        }
    }
  }

  // Whether any panel may need digits with `others` (null: any).
  bool need_digits(const PackedSides* others) const {
    for (size_t i = 0; i < sides.size(); i++)
      if (needs_digits(sides[i].largest.data(), others ? others->sides[i].largest.data() : nullptr, sides[i].depth,
                       sides[i].most))
        return true;
    return false;
  }

  // Computes the digits of those panels that may need them.
  void read_digits(int64_t begin, int64_t end, const PackedSides* others) const {
    each_step(begin, end, [&](const PackedSide& side, int64_t index, int64_t k) {
      const size_t i = static_cast<size_t>(&side - sides.data());
      const float* largest = others ? others->sides[i].largest.data() + k / BLOCK * BOUNDS : nullptr;
      if (!needs_digits(side.bound(index, k), largest, side.end(k) - k, side.most)) return;
      packer_.digits((side.end(k) - k + 1) / 2, side.panel(index, k), side.digits(index, k));
    });
  }

  std::vector<PackedSide> sides;
  int64_t panels = 0;

 private:
  // Calls visit(side, index of the panel, begin of the step) for all steps of some panels.
  template <class Visit>
  void each_step(int64_t begin, int64_t end, Visit&& visit) const {
    size_t i = 0;
    for (int64_t panel = begin; panel < end; panel++) {
      while (i + 1 < sides.size() && panel >= first_panels_[i + 1]) i++;
      for (int64_t k = 0; k < sides[i].depth; k += sides[i].step) visit(sides[i], panel - first_panels_[i], k);
    }
  }

  const Packer& packer_;
  std::vector<int64_t> first_panels_;
};

// Distributes the panels of A and B (null: only of A) over threads.
template <class OnPanels>
void for_panels(const PackedSides& left, const PackedSides* right, int threads, OnPanels&& visit) {
  const int64_t lefts = left.panels, total = lefts + (right ? right->panels : 0);
  parallel_for(total, 4, threads, [&](int64_t begin, int64_t end) noexcept {
    if (begin < lefts) visit(left, begin, std::min(end, lefts), right);
    if (end > lefts) visit(*right, std::max(begin, lefts) - lefts, end - lefts, &left);
  });
}

// Packs both sides (null: only A), with the digits that may be needed; `rights` are the operands of B.
inline void pack_sides(PackedSides& left, PackedSides* right, const std::vector<const Operand*>& rights, int threads) {
  for_panels(left, right, threads, [](const PackedSides& sides, int64_t begin, int64_t end, const PackedSides*) {
    sides.pack(begin, end);
  });
  left.find_largest();
  if (right) right->find_largest();
  if (!left.need_digits(right)) return;
  for (size_t i = 0; !right && i < left.sides.size(); i++) left.sides[i].most = rights[i]->chunk_norm(threads);
  if (!left.need_digits(right)) return;
  for_panels(left, right, threads,
             [](const PackedSides& sides, int64_t begin, int64_t end, const PackedSides* others) {
               sides.read_digits(begin, end, others);
             });
}

}  // namespace lowp
