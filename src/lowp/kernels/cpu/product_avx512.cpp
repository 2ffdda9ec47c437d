#define LOWP_ISA avx512
#define LOWP_MULTIPLIER kAvx512Multiplier
#include "product_unit.hpp"
