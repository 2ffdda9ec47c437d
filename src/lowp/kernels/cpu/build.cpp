// Checked first by lowp/kernels/cpu/__init__.py: "version digest", the version of lowp and the digest of the sources of the
// build, both set by CMakeLists.txt.
#include "export.hpp"

LOWP_EXPORT const char* lowp_build() { return LOWP_BUILD; }
