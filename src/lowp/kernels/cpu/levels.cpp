// Detection of the processor's instruction sets.
#include "levels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace lowp {
namespace {

Level found_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // not every compiler's __builtin_cpu_supports knows f16c, whose registers the system saves if it supports AVX2
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (!avx2) return kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  return avx512 ? kAvx512 : kAvx2;
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
