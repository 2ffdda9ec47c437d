#define LOWP_ISA avx2
#include "rows.hpp"

const lowp::RowKernels lowp::kAvx2Rows = {lowp::avx2::multiply_rows, lowp::avx2::row_values};
