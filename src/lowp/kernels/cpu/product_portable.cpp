#define LOWP_ISA portable
#define LOWP_MULTIPLIER kPortableMultiplier
#include "product_unit.hpp"
