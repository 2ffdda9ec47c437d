"""Operands of int16 products: sums that are hard to prove safe, and convolutions of every kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowp.kernels.int16.integer_reference import ConvolutionShape

Fill = Callable[..., Tensor]


def random_int16(*shape: int) -> Tensor:
    return torch.randint(-32768, 32768, shape).to(torch.int16)


def normal(deviation: float) -> Fill:
    return lambda *shape: (torch.randn(shape) * deviation).round().clamp(-32767, 32767).to(torch.int16)


FILLS: dict[str, Fill] = {
    "random": random_int16,
    "all largest": lambda *shape: torch.full(shape, 32767, dtype=torch.int16),
    "all smallest": lambda *shape: torch.full(shape, -32768, dtype=torch.int16),
    "mixed signs": lambda *shape: torch.where(torch.rand(shape) < 0.5, 32767, -32768).to(torch.int16),
}


def int64_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product, exact for a depth below 2^23: every partial sum is an integer that fp64 represents."""
    return (a.double() @ b.double()).to(torch.int64)


# channels, out channels, kernel, stride, padding, dilation, groups
CONVOLUTIONS = (
    (6, 4, 3, 1, 1, 1, 1),
    (4, 6, 3, 2, 1, 1, 2),
    (3, 5, 2, 3, 0, 2, 1),
    (40, 33, 3, 1, 1, 1, 1),
    (4, 4, 1, 2, 0, 1, 4),
    (2, 3, 3, 1, 3, 1, 1),
)


def convolution_shape(dims: int, case: tuple[int, ...]) -> ConvolutionShape:
    """Return the shape of one of CONVOLUTIONS in 1 to 3 dimensions."""
    channels, out_channels, size, stride, padding, dilation, groups = case
    given, weight = (2, channels, *(9, 8, 7)[:dims]), (out_channels, channels // groups, *(size,) * dims)
    return ConvolutionShape.of(given, weight, stride, padding, dilation, groups)
