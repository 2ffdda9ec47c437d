// Which of the instruction sets that sources are compiled for the processor has. For sources of the platform's baseline
// and, of the others, for those that run only after asking.
#pragma once

namespace lowp {

// By number, in their order: each has the ones before it.
enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best of them. What counts are all flags that CMakeLists.txt compiles a source of the level with.
Level best_level();

// The level of a call: that which is asked for as far as the processor has it, the best for -1.
Level usable_level(int asked);

}  // namespace lowp
