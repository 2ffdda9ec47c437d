"""Exponents of mantissas that stay on their device: 0-d int32 tensors, and what the host would ask about told by them.

Two numbers beyond all exponents stand for answers: `NOT_FINITE`, the exponent of a tensor with an infinity or a NaN, is
a scale of NaN, and so is its sum with any other; `NOTHING`, of a second word that is not needed, is a scale of zero, at
which products stop at once. In fp32 and int32 alone, but for `power`: Apple's GPUs have no fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowp.kernels.floats import two_to_the

__all__ = ["NOTHING", "NOT_FINITE", "apart", "power", "times", "together"]

NOT_FINITE, NOTHING = 1 << 15, -(1 << 14)
_BEYOND = 1 << 13
_SIDE = 126  # of powers of two that are normal numbers of fp32: two of them reach every result


def times(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x, fp32, times 2**exponent; rounded once, but to a subnormal number of which a device may make a zero.

    Numbers below 2**-126 on the way, which are rounded twice, are what is left of numbers that have a fraction.
    """
    half = exponent.clamp(-2 * _SIDE, 2 * _SIDE) >> 1
    rest = (exponent - half).clamp(-_SIDE, _SIDE + 1)
    return x * _fp32_power(half) * _told(_fp32_power(rest), exponent)


def _fp32_power(exponent: Tensor) -> Tensor:
    """Return 2**exponent of -126 to 127 in fp32."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def power(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64: NaN of what is not finite, 0 of nothing."""
    return _told(two_to_the(exponent.clamp(-1022, 1023)), exponent)


def _told(scale: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(exponent < -_BEYOND, 0.0, torch.where(exponent > _BEYOND, torch.nan, scale))


def together(exponents: list[Any]) -> Tensor:
    """Return exponents as one tensor, as it is saved for backward: on the host, or where they are."""
    if isinstance(exponents[0], Tensor):
        return torch.stack(exponents)
    return torch.tensor(exponents, device="cpu")


def apart(saved: Tensor) -> list[Any]:
    """Return what was put together: numbers of the host are in int64, those of a device in int32."""
    return list(saved.unbind()) if saved.dtype is torch.int32 else saved.tolist()
