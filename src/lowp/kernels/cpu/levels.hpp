// The instruction sets of the processor among those that sources are compiled for. For sources of the platform's baseline,
// and for others that run only after a check.
#pragma once

namespace lowp {

// In increasing order: each includes the previous ones.
enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// The best level. It needs all instruction sets for which CMakeLists.txt compiles sources of the level.
Level best_level();

// The level of a call: the requested one, limited to the processor's, or the best for -1.
Level usable_level(int asked);

}  // namespace lowp
