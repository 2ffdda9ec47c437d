// GCC 12's own header for AVX-512 reads a variable that it leaves undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define LOWP_ISA avx512
#define LOWP_KERNELS kAvx512Kernels
#include "kernels.inc"
