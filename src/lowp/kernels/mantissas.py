"""Tensors as int16 mantissas under one shared power of two: what the integer products take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import cpu


class Mantissas(NamedTuple):
    """value = payload * 2**exponent, and what was seen while the payload was written."""

    payload: Tensor  # int16
    exponent: int
    largest: int  # the largest |mantissa| after saturation: 0 .. 32768
    saturated: int  # finite elements that did not fit
    nonfinite: int  # infinities, which saturate, and NaNs, which become 0


def has_mantissas(cast: Cast | None) -> bool:
    """Whether a cast's format is int16 under one power of two for the tensor (flex16+5, dfp16)."""
    format = None if cast is None else cast.format
    return (
        isinstance(format, ScaledFormat)
        and isinstance(format.element, IntFormat)
        and format.element.bits == 16
        and isinstance(format.scale, PowerOfTwo)
        and format.scope.kind == "tensor"
    )


def current_exponent(x: Tensor, cast: Cast) -> int | None:
    """The exponent that DFP-16 gives a tensor: floor(log2 max|x|) - 14, plus the headroom, within the format's range.

    0 for zeros and empty tensors, None where the maximum is infinite or NaN. Das et al. 2018, arXiv 1802.00930, sec. 2.
    """
    assert isinstance(cast.format, ScaledFormat)
    assert isinstance(cast.format.scale, PowerOfTwo)
    if cast.scaling is not None and cast.scaling.exponent is not None:
        return cast.scaling.exponent
    if x.numel() == 0:
        return 0
    low, high = torch.aminmax(x.detach())  # one pass; a norm takes many times as long
    maximum = float(torch.maximum(low.abs(), high.abs()))
    if not math.isfinite(maximum):
        return None
    if maximum == 0:
        return 0
    headroom = 0 if cast.scaling is None else cast.scaling.headroom
    exponent = math.frexp(maximum)[1] - 1 - (cast.format.element.bits - 2) + headroom
    return min(max(exponent, cast.format.scale.min_exponent), cast.format.scale.max_exponent)


def to_mantissas(x: Tensor, cast: Cast, exponent: int, seed: int = 0) -> Mantissas:
    """Write x * 2**-exponent, rounded once and saturated, as int16; x of any float dtype, shape and layout."""
    assert isinstance(cast.format, ScaledFormat)
    assert isinstance(cast.format.element, IntFormat)
    x = x.detach().contiguous()
    payload = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    symmetric = cast.format.element.symmetric
    if x.device.type == "cpu" and cpu.library() is not None:
        seen = cpu.to_int16(x, exponent, symmetric, cast.rounding, seed, payload, cast.random_bits)
        return Mantissas(payload, exponent, *seen)
    scaled = torch.ldexp(x.double(), torch.tensor(-exponent, device=x.device))
    rounded = _ROUNDINGS[cast.rounding](scaled)
    bounded = rounded.nan_to_num(nan=0.0).clamp(cast.format.element.minimum, cast.format.element.maximum)
    payload.copy_(bounded)
    finite = scaled.isfinite()
    largest = int(bounded.abs().max()) if x.numel() else 0
    return Mantissas(payload, exponent, largest, int((finite & (bounded != rounded)).sum()), int((~finite).sum()))


def values(payload: Tensor, exponent: int) -> Tensor:
    """The values of mantissas in fp32, which holds them exactly unless they leave its range."""
    if -100 <= exponent <= 100:
        return payload.to(torch.float32) * 2.0**exponent
    return torch.ldexp(payload.double(), torch.tensor(exponent, device=payload.device)).float()


_ROUNDINGS: dict[Rounding, Callable[[Tensor], Tensor]] = {
    Rounding.NEAREST_EVEN: torch.round,
    Rounding.TOWARD_ZERO: torch.trunc,
    Rounding.UP: torch.ceil,
    Rounding.DOWN: torch.floor,
    Rounding.NEAREST_AWAY: lambda x: torch.where(x < 0, (x - 0.5).ceil(), (x + 0.5).floor()),
}
