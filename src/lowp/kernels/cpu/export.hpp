// What makes a function one of the library's own.
#pragma once

#define LOWP_EXPORT extern "C" __attribute__((visibility("default")))
