#define LOWP_ISA avx512
#include "rows.hpp"

const lowp::RowKernels lowp::kAvx512Rows = {lowp::avx512::multiply_rows, lowp::avx512::row_values};
