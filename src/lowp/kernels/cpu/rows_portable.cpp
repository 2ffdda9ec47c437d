#define LOWP_ISA portable
#include "rows.hpp"

const lowp::RowKernels lowp::kPortableRows = {lowp::portable::multiply_rows, lowp::portable::row_values};
