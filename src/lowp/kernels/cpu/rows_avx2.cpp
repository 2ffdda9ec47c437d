#define LOWP_ISA avx2
#include "rows.hpp"

const lowp::Rows lowp::kAvx2Rows = lowp::avx2::multiply_rows;
