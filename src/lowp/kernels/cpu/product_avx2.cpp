#define LOWP_ISA avx2
#define LOWP_MULTIPLIER kAvx2Multiplier
#include "product_unit.hpp"
