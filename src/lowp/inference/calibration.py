"""The range that activations are quantised over: found once from data, or anew for every tensor."""

import math

import torch
from torch import Tensor

from lowp.errors import InvalidInput, check_name
from lowp.kernels.packed.byte_rows import Range, range_of

METHODS = ("maximum", "percentile", "error")
# With 7 bits the sum of two products of an activation and an int8 weight always fits 16 bits (2 * 127 * 127 < 2**15):
# AVX2's byte product then saturates nowhere, here and in onnxruntime.
BITS = 7
PERCENTILE = 99.99
_KEPT = 1 << 16  # elements that are kept of what was seen
_TRIED = 64  # shares of the range whose error is compared


def check_bits(bits: int) -> int:
    """The largest byte of activations of so many bits: 127 of 7, 255 of 8."""
    if bits not in (7, 8):
        raise InvalidInput(f"activations must have 7 or 8 bits, not {bits}")
    return (1 << bits) - 1


class ActivationRange:
    """What passed a place of the model: the extremes, and a sample of the elements."""

    def __init__(self, method: str) -> None:
        check_name("calibration", method, METHODS)
        self._method = method
        self._low, self._high = math.inf, -math.inf
        self._sample: list[Tensor] = []
        self._stride = 1

    @property
    def anything(self) -> bool:
        """Whether anything passed."""
        return self._low <= self._high

    def add(self, x: Tensor) -> None:
        """Look at a tensor. Raises InvalidInput for NaN and infinities: no range holds them."""
        x = x.detach().float().flatten()
        if not x.numel():
            return
        low, high = (float(one) for one in torch.aminmax(x))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise InvalidInput("calibration found NaN or infinite activations: give data for which the model is finite")
        self._low, self._high = min(self._low, low), max(self._high, high)
        if self._method != "maximum":
            self._sample.append(x[:: self._stride].clone())
            while sum(one.numel() for one in self._sample) > _KEPT:
                self._stride *= 2
                self._sample = [torch.cat(self._sample)[::2].clone()]

    def range(self, highest: int) -> Range:
        """The range by the method: the extremes, the middle 99.99 % of the sample, or the least squared error."""
        whole = range_of(self._low, self._high, highest)
        if self._method == "maximum" or not self._sample:
            return whole
        sample = torch.cat(self._sample)
        if self._method == "percentile":
            outside = (1 - PERCENTILE / 100) / 2
            low, high = torch.quantile(
                sample, torch.tensor([outside, 1 - outside], dtype=sample.dtype, device="cpu")
            ).tolist()
            return range_of(low, high, highest)
        shares = torch.linspace(1 / _TRIED, 1, _TRIED, dtype=torch.float32, device="cpu").tolist()
        tried = [range_of(self._low * share, self._high * share, highest) for share in shares]
        return min(tried, key=lambda one: _squared_error(sample, one))


def _squared_error(x: Tensor, over: Range) -> float:
    found = (x / over.scale).round().clamp(-over.zero, over.highest - over.zero) * over.scale
    return float((found - x).square().sum())
