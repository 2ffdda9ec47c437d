"""Exponents of mantissas that stay on their device: 0-d int32 tensors, and what the host would ask about told by them.

Two numbers beyond all exponents stand for answers: `NOT_FINITE`, the exponent of a tensor with an infinity or a NaN, is
a scale of NaN, and so is its sum with any other; `NOTHING`, of a second word that is not needed, is a scale of zero, at
which products stop at once. In fp32 and int32 alone, but for `power`: Apple's GPUs have no fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.kernels.numbers.floats import two_to_the
from lowp.scaling import powers

NOT_FINITE, NOTHING = 1 << 15, -(1 << 14)
_BEYOND = 1 << 13


def times(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x, fp32, times 2**exponent, like `powers.times`; NaN for a non-finite exponent, 0 for an absent one."""
    return powers.times(x, exponent) * _told(torch.ones((), dtype=torch.float32, device=x.device), exponent)


def power(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64; NaN for a non-finite exponent, 0 for an absent one."""
    return _told(two_to_the(exponent.clamp(-1022, 1023)), exponent)


def _told(scale: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(exponent < -_BEYOND, 0.0, torch.where(exponent > _BEYOND, torch.nan, scale))
