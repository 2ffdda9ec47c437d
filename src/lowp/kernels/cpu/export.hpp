// The prefix of exported functions.
#pragma once

#if defined(_WIN32)
#define LOWP_EXPORT extern "C" __declspec(dllexport)
#else
#define LOWP_EXPORT extern "C" __attribute__((visibility("default")))
#endif
