"""Histograms of binary exponents, and what fp16 and bf16 make of the same numbers, counted on the numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp import kernels
from lowp.kernels import Statistics

__all__ = ["Fp16Counts", "Histogram", "LostUpdates", "ratios"]

_BIAS = 127  # bin e + 127 of `Statistics` counts floor(log2 |x|) = e
_SMALLEST, _SMALLEST_NORMAL = -24, -14  # fp16's, as powers of two


class Histogram:
    """How many elements had which binary exponent floor(log2 |x|), over all tensors that were added."""

    def __init__(self) -> None:
        self._seen: Statistics | None = None

    def add(self, x: Tensor) -> None:
        """Count a tensor of any floating-point dtype."""
        seen = kernels.statistics(x.detach())
        self._seen = seen if self._seen is None else self._seen + seen

    @property
    def present(self) -> int:
        """How many were finite and not zero."""
        seen = self._seen
        return 0 if seen is None else seen.count - seen.zeros - seen.nonfinite

    def below(self, exponent: int) -> float:
        """Of the finite ones that are not zero, the share that is smaller than 2**exponent; 0 where there are none."""
        return sum(self._counts()[: exponent + _BIAS]) / max(1, self.present)

    def median(self) -> float | None:
        """log2 of the median magnitude of those that are not zero, by interpolation in its bin; None without any."""
        left = self.present / 2
        for place, count in enumerate(self._counts()):
            if count and count >= left:
                return place - _BIAS + left / count
            left -= count
        return None

    def document(self) -> dict[str, Any]:
        """As plain values: `counts` by exponent from `lowest` on, and what has no exponent: zeros, NaN and infinity.

        `lowest` is -127 where some were below 2**-126: that bin has all of them. `largest` is the largest magnitude.
        """
        counts = self._counts()
        filled = [place for place, count in enumerate(counts) if count] or [_BIAS]
        seen = self._seen
        return {
            "lowest": filled[0] - _BIAS,
            "counts": counts[filled[0] : filled[-1] + 1],
            "elements": 0 if seen is None else seen.count,
            "zeros": 0 if seen is None else seen.zeros,
            "nonfinite": 0 if seen is None else seen.nonfinite,
            "largest": 0.0 if seen is None else seen.maximum,
            "median": self.median(),
        }

    def _counts(self) -> list[int]:
        """By exponent from -127 to 127; the first bin without the zeros that `Statistics` has in it."""
        if self._seen is None:
            return [0]
        counts: list[int] = self._seen.exponent_histogram.tolist()[:255]
        counts[0] -= self._seen.zeros
        return counts


class Fp16Counts:
    """What becomes of numbers that are stored in fp16, rounded to nearest even: counted by rounding them."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self._zero = self._infinite = 0

    def add(self, x: Tensor) -> None:
        """Count a tensor; what is infinite or NaN before the rounding is left to the histogram."""
        x = x.detach()
        self.histogram.add(x)
        stored = x.half()
        self._zero += int(((stored == 0) & (x != 0)).sum())
        self._infinite += int((stored.isinf() & x.isfinite()).sum())

    def document(self) -> dict[str, Any]:
        """The histogram, and shares of what is not zero in it: below 2^-24, of them zero; subnormal; infinite."""
        present = max(1, self.histogram.present)
        below = self.histogram.below(_SMALLEST)
        return {
            "histogram": self.histogram.document(),
            "below": below,
            "zero": self._zero / present,
            "subnormal": self.histogram.below(_SMALLEST_NORMAL) - below,
            "infinite": self._infinite / present,
        }


class LostUpdates:
    """How many updates would leave a weight as it was, if it were stored in a format: counted by doing them."""

    def __init__(self, format: str) -> None:
        self.format = format
        self._lost = self._present = 0

    def add(self, weight: Tensor, change: Tensor) -> None:
        """Count the fp64 changes that are not zero of fp64 weights."""
        stored = kernels.quantize(weight, self.format)
        same = kernels.quantize(stored + change, self.format) == stored
        moving = change != 0
        self._lost += int((same & moving).sum())
        self._present += int(moving.sum())

    @property
    def share(self) -> float:
        """Of the changes that are not zero; 0 where there are none."""
        return self._lost / max(1, self._present)


def ratios(weight: Tensor, change: Tensor) -> Tensor:
    """|change| / |weight| [weights that are not zero], of fp64 tensors."""
    chosen = weight != 0
    return change[chosen].abs() / weight[chosen].abs()
