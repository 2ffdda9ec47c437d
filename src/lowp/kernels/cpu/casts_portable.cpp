#define LOWP_ISA portable
#define LOWP_KERNELS kPortableKernels
#include "kernels.inc"
