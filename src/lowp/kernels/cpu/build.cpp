// Checked first by lowp/kernels/cpu/__init__.py: "version digest", the version of lowp and the digest of the sources of the
// build, both set by CMakeLists.txt.
extern "C" __attribute__((visibility("default"))) const char* lowp_build() { return LOWP_BUILD; }
