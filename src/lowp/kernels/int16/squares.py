"""Means of squares whose roots are written in int16: all small tensors of a step in one pass of torch operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast as cast_to

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import private
from lowp.kernels.int16.cpu_int16 import Seen, is_direct, to_int16

__all__ = ["TOGETHER", "serves", "write_"]

LARGEST = 1 << 11  # elements: of more, the work takes longer than the calls do
TOGETHER = 1 << 14  # elements whose fp64 roots stay in the nearest caches
_foreach_sqrt_ = cast_to(Callable[[Sequence[Tensor]], None], private("torch._foreach_sqrt_"))
_foreach_add_ = cast_to(Callable[[Sequence[Tensor], Sequence[float]], None], private("torch._foreach_add_"))
_foreach_copy_ = cast_to(Callable[[Sequence[Tensor], Sequence[Tensor]], None], private("torch._foreach_copy_"))


def serves(x: Tensor, exponent: int) -> bool:
    """Whether `write_` takes a tensor under an exponent."""
    return 0 < x.numel() <= LARGEST and abs(exponent) <= 100 and is_direct(x)


def write_(tensors: Sequence[Tensor], cast: Cast, exponents: Sequence[int]) -> list[Seen]:
    """Round the roots of fp32 tensors that `serves` accepts to values of the format, and write their squares in place.

    A nonzero root that would become zero becomes one unit, 2**exponent. What is infinite or NaN stays so, and NaN also
    stands for a root of a negative number. Each element gets the bits that it would get alone. `cast` rounds to nearest
    even. Returns what was seen of the roots of each tensor.
    """
    flat = [x.detach().view(-1) for x in tensors]
    sizes = [x.numel() for x in flat]
    root = torch.cat(flat).double()
    roots = torch.split(root, sizes)
    _foreach_sqrt_(roots)  # alone, most take one thread: a root of them all would wait for others
    rounded, unit = torch.empty_like(root, dtype=torch.float32), torch.zeros_like(root, dtype=torch.float32)
    seen = [
        to_int16(one, cast, exponent, None, values)
        for one, values, exponent in zip(roots, torch.split(rounded, sizes), exponents, strict=True)
    ]
    _foreach_add_(torch.split(unit, sizes), [2.0**exponent for exponent in exponents])
    squares = torch.where((root > 0) & (rounded == 0), unit, rounded).square_()
    _foreach_copy_(flat, torch.split(squares, sizes))
    return seen
