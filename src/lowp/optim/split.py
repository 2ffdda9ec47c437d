"""An fp32 number as a bf16 half and a 16-bit remainder, so that the half is a weight and both together its master.

    fp32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
           └──── half ──────┘└── remainder ──┘     fp32 bits = half * 2**16 + remainder, remainder in -32768 .. 32767

The half is the fp32 number rounded to the nearest bf16, ties away from zero: with ties to even the remainder would need
65,537 values (Zamirai et al. 2020 keep the plain upper half instead, which is a truncated weight).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowp.kernels.dispatch import answers_at_once

_ROUND_HALF = 1 << 15
_QUIET_BIT = 1 << 6
_EXPONENT_ONES = 0x7F80_0000


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 `value` into its bf16 half and int16 remainder, of the same shape.

    `join` restores every number that is not NaN bit for bit; a NaN becomes some NaN, and its half is NaN.
    Values above the largest bf16 by half an ulp or more have an infinite half, as rounding to bf16 gives.
    """
    if value.dtype != torch.float32:
        raise TypeError(f"split takes fp32, not {value.dtype}: convert with .float() first")
    bits = value.contiguous().view(torch.int32)
    upper = (bits + _ROUND_HALF) >> 16
    remainder = (bits - (upper << 16)).to(torch.int16)
    is_nan = (bits & 0x7FFF_FFFF) > _EXPONENT_ONES
    upper = torch.where(is_nan, (bits >> 16) | _QUIET_BIT, upper)
    remainder = remainder.masked_fill(is_nan, 0)
    return upper.to(torch.int16).view(torch.bfloat16).view(value.shape), remainder.view(value.shape)


def join(half: Tensor, remainder: Tensor) -> Tensor:
    """Combine a bf16 half and an int16 remainder of the same shape to the fp32 numbers that `split` was given.

    Where the half was written since, the result rounds to the new half: the old remainder is at most half an ulp of it.
    `split` gives no negative remainder to a half of 0, whose bits less one are a NaN: there the result is that 0.
    """
    if half.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise TypeError(f"join takes a bf16 half and an int16 remainder, not {half.dtype} and {remainder.dtype}")
    bits = half.contiguous().view(torch.int16).to(torch.int32)
    joined = bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)
    if answers_at_once(half) and math.isfinite(float(joined.sum())):  # a sum of numbers with a NaN is NaN
        return joined
    return torch.where((half == 0) & (remainder < 0), half.to(torch.float32), joined)
