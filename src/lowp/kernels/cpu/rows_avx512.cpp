#define LOWP_ISA avx512
#include "rows.hpp"

const lowp::Rows lowp::kAvx512Rows = lowp::avx512::multiply_rows;
