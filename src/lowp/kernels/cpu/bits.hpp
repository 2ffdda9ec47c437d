// The bits of a value as another type. `static`, so that the linker does not merge code across instruction sets.
#pragma once
#include <cstring>

namespace lowp {

template <class To, class From>
static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a value has as many bits as what it is read as");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace lowp
