// Detection of the processor's instruction sets.
#include "levels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lowp {
namespace {

#if defined(__x86_64__)
// Which registers the system saves: bits 1 and 2 for those of AVX2, 5 to 7 for those that AVX-512 adds.
unsigned saved_registers() {
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
#endif

// By cpuid: __builtin_cpu_supports knows no f16c in some compilers, and needs a library that clang-cl does not link.
Level found_level() {
#if defined(__x86_64__)
  constexpr unsigned kFirst = bit_OSXSAVE | bit_FMA | bit_F16C, kSecond = bit_AVX2 | bit_BMI | bit_BMI2;
  constexpr unsigned kThird = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kFirst) != kFirst) return kPortable;
  const unsigned saved = saved_registers();
  if ((saved & 0x6) != 0x6) return kPortable;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & kSecond) != kSecond) return kPortable;
  return (saved & 0xe6) == 0xe6 && (b & kThird) == kThird && (c & bit_AVX512VNNI) ? kAvx512 : kAvx2;
#else
  return kPortable;
#endif
}

}  // namespace

Level best_level() {
  static const Level found = found_level();
  return found;
}

Level usable_level(int asked) {
  return asked < 0 || asked > best_level() ? best_level() : static_cast<Level>(asked);
}

}  // namespace lowp
