"""Histograms of binary exponents, and counts of the losses of the same numbers in fp16 and bf16."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowp import kernels
from lowp.kernels import Statistics

__all__ = ["Fp16Counts", "Histogram", "LostUpdates", "ratios"]

_BIAS = 127  # bin e + 127 of `Statistics` counts floor(log2 |x|) = e
_SMALLEST, _SMALLEST_NORMAL = -24, -14  # fp16's, as powers of two


class Histogram:
    """Counts of elements by binary exponent floor(log2 |x|), over all added tensors."""

    def __init__(self) -> None:
        self._seen: Statistics | None = None

    def add(self, x: Tensor) -> None:
        """Count a tensor of any floating-point dtype."""
        seen = kernels.statistics(x.detach())
        self._seen = seen if self._seen is None else self._seen + seen

    @property
    def present(self) -> int:
        """The number of finite nonzero elements."""
        seen = self._seen
        return 0 if seen is None else seen.count - seen.zeros - seen.nonfinite

    def below(self, exponent: int) -> float:
        """Return the share of the finite nonzero elements below 2**exponent; 0 without such elements."""
        return sum(self._counts()[: exponent + _BIAS]) / max(1, self.present)

    def median(self) -> float | None:
        """Return log2 of the median magnitude of nonzero elements, interpolated in its bin; None without any."""
        left = self.present / 2
        for place, count in enumerate(self._counts()):
            if count and count >= left:
                return place - _BIAS + left / count
            left -= count
        return None

    def document(self) -> dict[str, Any]:
        """Return plain values: `counts` by exponent from `lowest` on, and the numbers of zeros, NaNs and infinities.

        `lowest` is -127 if some elements are below 2**-126: that bin has all of them. `largest`: the largest magnitude.
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
        """Return counts by exponent from -127 to 127; the first bin excludes the zeros that `Statistics` includes."""
        if self._seen is None:
            return [0]
        counts: list[int] = self._seen.exponent_histogram.tolist()[:255]
        counts[0] -= self._seen.zeros
        return counts


class Fp16Counts:
    """Counts of the effects of rounding numbers to fp16, to nearest even."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self._zero = self._infinite = 0

    def add(self, x: Tensor) -> None:
        """Count a tensor; elements that are infinite or NaN before rounding are counted only by the histogram."""
        x = x.detach()
        self.histogram.add(x)
        stored = x.half()
        self._zero += int(((stored == 0) & (x != 0)).sum())
        self._infinite += int((stored.isinf() & x.isfinite()).sum())

    def document(self) -> dict[str, Any]:
        """Return the histogram, and shares of its nonzero elements: below 2^-24; zero, subnormal, infinite in fp16."""
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
    """Counts updates that would not change a weight stored in a format."""

    def __init__(self, format: str) -> None:
        self.format = format
        self._lost = self._present = 0

    def add(self, weight: Tensor, change: Tensor) -> None:
        """Count the nonzero fp64 changes of fp64 weights."""
        stored = kernels.quantize(weight, self.format)
        same = kernels.quantize(stored + change, self.format) == stored
        moving = change != 0
        self._lost += int((same & moving).sum())
        self._present += int(moving.sum())

    @property
    def share(self) -> float:
        """The share of the nonzero changes; 0 without any."""
        return self._lost / max(1, self._present)


def ratios(weight: Tensor, change: Tensor) -> Tensor:
    """Return |change| / |weight| of the nonzero weights, for fp64 tensors."""
    chosen = weight != 0
    return change[chosen].abs() / weight[chosen].abs()
