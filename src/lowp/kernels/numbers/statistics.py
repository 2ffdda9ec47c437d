"""Statistics of a tensor's range from one pass: mergeable, and on the tensor's device until read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Statistics:
    """Exponents, extremes and counts of a tensor. ``a + b`` are the statistics of both tensors together.

    The three tensors are on the device of the data: addition needs no transfer, but reading a number (`maximum`,
    `zeros` ...) does.

    `exponent_histogram`: int64 [256], by the exponent field of fp32: bin e + 127 counts the finite numbers with
    floor(log2 |x|) = e, bin 0 zeros and everything below 2**-126, bin 254 everything from 2**127 on, bin 255 NaNs and
    infinities. `extremes`: fp64 [2] (fp32 on devices without fp64), the largest finite |x| and the sum of squares
    of the finite numbers.
    `counts`: int64 [3], zeros, NaNs, infinities. `count`: the number of elements.
    """

    exponent_histogram: Tensor
    extremes: Tensor
    counts: Tensor
    count: int

    @property
    def maximum(self) -> float:
        """The largest finite |x|; 0 if there is none."""
        return float(self.extremes[0])

    @property
    def sum_squares(self) -> float:
        """The sum of the squares of the finite numbers, in fp64."""
        return float(self.extremes[1])

    @property
    def zeros(self) -> int:
        """The number of zeros, +0 and -0."""
        return int(self.counts[0])

    @property
    def nan(self) -> int:
        """The number of NaNs."""
        return int(self.counts[1])

    @property
    def inf(self) -> int:
        """The number of infinities of either sign."""
        return int(self.counts[2])

    @property
    def nonfinite(self) -> int:
        """The number of NaNs and infinities."""
        return self.nan + self.inf

    def __add__(self, other: Statistics) -> Statistics:
        if not isinstance(other, Statistics):
            return NotImplemented
        extremes = torch.stack(
            (torch.maximum(self.extremes[0], other.extremes[0]), self.extremes[1] + other.extremes[1])
        )
        histogram = self.exponent_histogram + other.exponent_histogram
        return Statistics(histogram, extremes, self.counts + other.counts, self.count + other.count)

    def __repr__(self) -> str:
        return (
            f"Statistics(count={self.count}, maximum={self.maximum:g}, sum_squares={self.sum_squares:g}, "
            f"zeros={self.zeros}, nan={self.nan}, inf={self.inf})"
        )
