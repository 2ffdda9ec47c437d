#define LOWP_ISA portable
#include "rows.hpp"

const lowp::Rows lowp::kPortableRows = lowp::portable::multiply_rows;
