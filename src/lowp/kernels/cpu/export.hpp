// The prefix of exported functions.
#pragma once

#define LOWP_EXPORT extern "C" __attribute__((visibility("default")))
