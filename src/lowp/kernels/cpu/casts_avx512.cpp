#define LOWP_ISA avx512
#define LOWP_KERNELS kAvx512Kernels
#include "kernels.inc"
