#define LOWP_ISA avx2
#define LOWP_KERNELS kAvx2Kernels
#include "kernels.inc"
