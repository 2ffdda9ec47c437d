// The C function of an optimizer's step on many parameters, called by lowp/kernels/steps/updates.py.
#include <algorithm>

#include "calls.hpp"

namespace lowp {
namespace {

constexpr uint64_t kSeedOfBlock = 0x165667B19E3779F9;  // `slot` of seed_of in optim/storage.py
constexpr int kColumns = 10;

void* pointer(int64_t address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

}  // namespace
}  // namespace lowp

using namespace lowp;

// given, kColumns for each parameter: weight, remainder, gradient, then each moment and its scales, 0 for what there is not; the
// count of numbers, the place of the first in the whole tensor, and the seed. `share`: numbers that draw by one seed. `rates`:
// four for each parameter.
LOWP_EXPORT void lowp_step_list(const lowp_rule* rule, const int64_t* given, int64_t number, int64_t share, const float* rates, float scale,
                                int threads) {
  const Kernels& kernel = kernels();
  for (int64_t i = 0; i < number; ++i, given += kColumns, rates += 4) {
    const int64_t count = given[7], before = given[8];
    const uint64_t seed = static_cast<uint64_t>(given[9]);
    parallel_for(count, kBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
      Stepping one{pointer(given[0]), pointer(given[1]), {pointer(given[3]), pointer(given[5])},
                   {pointer(given[4]), pointer(given[6])}, pointer(given[2]), {}, scale, 0, 0};
      std::copy(rates, rates + 4, one.rates);
      for (int64_t last; begin < end; begin = last) {
        const int64_t block = (before + begin) / share;
        last = std::min({begin + kBlock, end, (block + 1) * share - before});
        one.seed = seed + static_cast<uint64_t>(block) * kSeedOfBlock, one.index = before + begin - block * share;
        kernel.step(*rule, one, begin, last);
      }
    });
  }
}
