// What lowp/kernels/cpu.py asks of the library before anything else: "version digest", the version of lowp and the
// digest of the sources that it was built from, both given by CMakeLists.txt.
extern "C" __attribute__((visibility("default"))) const char* lowp_build() { return LOWP_BUILD; }
