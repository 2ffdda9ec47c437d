"""Powers of two on a device that may have no fp64, and no frexp and ldexp, as Apple's GPUs have none."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["floor_log2", "fp32_power", "times"]

_SIDE = 126  # of powers of two that are normal numbers of fp32: two of them reach every result


def times(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x, fp32 or fp64, times 2**exponent, for integers of any shape that broadcasts.

    Rounded once, but to a subnormal number of fp32, of which a device may make a zero: numbers below 2**-126 on the
    way, which are rounded twice, are what is left of numbers that have a fraction.
    """
    if x.dtype is torch.float64:
        return torch.ldexp(x, exponent)
    half = exponent.clamp(-2 * _SIDE, 2 * _SIDE) >> 1
    return x * fp32_power(half) * fp32_power((exponent - half).clamp(-_SIDE, _SIDE + 1))


def fp32_power(exponent: Tensor) -> Tensor:
    """Return 2**exponent of -126 to 127 in fp32."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def floor_log2(x: Tensor) -> Tensor:
    """Return floor(log2 x) of positive normal numbers of fp32 or fp64 as int32; of 0 a number below 0."""
    if x.dtype is torch.float64:
        return torch.frexp(x)[1].to(torch.int32) - 1
    return (x.view(torch.int32) >> 23) - 127
