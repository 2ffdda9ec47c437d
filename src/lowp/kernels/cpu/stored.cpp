// The C functions of weights that are stored as their fp32 masters rounded by a cast, called by lowp/kernels/steps/stored.py: one
// pass over all weights of a step, without a tensor of rounded values in memory.
#include <atomic>
#include <cstring>

#include "calls.hpp"

namespace lowp {
namespace {

// A row of `given`.
struct Weight {
  const float* master;
  char* stored;
  int64_t count;

  explicit Weight(const int64_t* row)
      : master(reinterpret_cast<const float*>(static_cast<uintptr_t>(row[0]))),
        stored(reinterpret_cast<char*>(static_cast<uintptr_t>(row[1]))),
        count(row[2]) {}
};

// Rounds masters to `out`, at most kSumBlock. Returns false if there is a NaN.
struct Rounder {
  const lowp_cast* cast;
  int type;
  bool narrows;
  const Kernels& kernel;

  Rounder(const lowp_cast* given, int to) : cast(given), type(to), narrows(is_type(*given, to)), kernel(kernels()) {}

  bool operator()(const float* master, void* out, int64_t count) const {
    if (narrows) return kernel.narrow(master, type, static_cast<uint16_t*>(out), count);
    if (kernel.largest(master, count) > kInfiniteBits) return false;
    kernel.quantize({cast, master, out, kFp32, type, 0, false}, 0, count);
    return true;
  }
};

// Calls work(begin, end), with at most kSumBlock elements each, until one call returns false. Whether none did.
template <class Work>
bool all_blocks(int64_t count, int threads, Work work) {
  std::atomic<bool> all{true};
  parallel_for(count, kSumBlock, enough_threads(count, threads), [&](int64_t begin, int64_t end) {
    for (; begin < end && all.load(std::memory_order_relaxed); begin += kSumBlock)
      if (!work(begin, end - begin < kSumBlock ? end : begin + kSumBlock)) all.store(false, std::memory_order_relaxed);
  });
  return all.load();
}

}  // namespace
}  // namespace lowp

using namespace lowp;

// given: master, stored, elements of each weight; `type` is a Carrier, of 16 or 32 bits, of all stored. The cast draws no
// random numbers. found: 0 if every stored element has the bits of its rounded master and none is NaN, otherwise 1.
LOWP_EXPORT void lowp_are_rounded_list(const lowp_cast* cast, int type, const int64_t* given, int64_t number,
                                       int threads, int64_t* found) {
  const Rounder round_to(cast, type);
  const int64_t bytes = bytes_of(type);
  for (int64_t i = 0; i < number; ++i, given += 3) {
    const Weight weight(given);
    found[i] = !all_blocks(weight.count, threads, [&](int64_t begin, int64_t end) {
      alignas(64) char rounded[kSumBlock * 4];
      return round_to(weight.master + begin, rounded, end - begin) &&
             std::memcmp(rounded, weight.stored + begin * bytes, static_cast<size_t>((end - begin) * bytes)) == 0;
    });
  }
}

// Stores every rounded master. found: 1 for weights with a NaN, whose block is not stored, or with other bits in place of the
// NaN; otherwise 0. What is stored does not depend on the threads.
LOWP_EXPORT void lowp_store_rounded_list(const lowp_cast* cast, int type, const int64_t* given, int64_t number,
                                         int threads, int64_t* found) {
  const Rounder round_to(cast, type);
  const int64_t bytes = bytes_of(type);
  for (int64_t i = 0; i < number; ++i, given += 3) {
    const Weight weight(given);
    std::atomic<int64_t> has_nan{0};
    all_blocks(weight.count, threads, [&](int64_t begin, int64_t end) {
      if (!round_to(weight.master + begin, weight.stored + begin * bytes, end - begin)) has_nan = 1;
      return true;
    });
    found[i] = has_nan;
  }
}
