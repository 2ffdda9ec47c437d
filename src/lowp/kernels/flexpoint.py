"""Element-wise arithmetic of tensors that are mantissas under one power of two: products, sums, other exponents.

On integers throughout: mantissas multiply and add in int64, exponents add and compare; nothing passes through a float.
One number at a time, with its bits drawn, it is in `lowp.explain`.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat
from lowp.quantized import Quantized

__all__ = ["Moved", "add", "multiply", "rescale"]


class Moved(NamedTuple):
    """A tensor at another exponent, and how many of its elements saturated: a 0-d int64 tensor."""

    values: Quantized
    saturated: Tensor


def rescale(x: Quantized, exponent: int | Tensor) -> Moved:
    """Return x at another exponent: mantissas are shifted, rounded to nearest even, and saturated.

    `exponent` is an integer or a 0-d tensor, in the format's range. Raises InvalidInput for another format.
    """
    format = _format(x)
    wanted = torch.as_tensor(exponent, dtype=torch.int32, device=x.device)
    payload, saturated = _moved(x.payload.to(torch.int64), wanted - x.scale, format)
    return Moved(replace(x, payload=payload, scale=wanted), saturated)


def multiply(a: Quantized, b: Quantized, exponent: int | Tensor | None = None) -> Moved:
    """Return a * b: mantissas multiplied, exponents added, and the exact products written once at `exponent`.

    Without one it is the smallest under which the largest product fits. Shapes broadcast.
    """
    format = _format(a, b)
    exact = a.payload.to(torch.int64) * b.payload.to(torch.int64)
    summed = a.scale + b.scale
    wanted = _fitting(exact, summed, format) if exponent is None else torch.as_tensor(exponent, device=a.device)
    wanted = wanted.to(torch.int32)
    payload, saturated = _moved(exact, wanted - summed, format)
    return Moved(replace(a, payload=payload, scale=wanted), saturated)


def add(a: Quantized, b: Quantized) -> Moved:
    """Return a + b under the larger exponent; the other's mantissas are shifted to the right, their last bits lost.

    Where any sum carries out of the mantissa the whole tensor takes the next exponent, rounded to nearest even; under
    the format's largest exponent it saturates. Shapes broadcast.
    """
    format = _format(a, b)
    assert isinstance(format.element, IntFormat) and isinstance(format.scale, PowerOfTwo)
    exponent = torch.maximum(a.scale, b.scale)
    total = sum(
        (one.payload.to(torch.int64) >> (exponent - one.scale).clamp(max=63) for one in (a, b)),
        torch.zeros((), dtype=torch.int64, device=a.device),
    )
    outside = (total > format.element.maximum) | (total < format.element.minimum)
    carries = outside.any() & (exponent < format.scale.max_exponent)
    wanted = (exponent + carries).to(torch.int32)
    payload, saturated = _moved(total, wanted - exponent, format)
    return Moved(replace(a, payload=payload, scale=wanted), saturated)


def _format(*tensors: Quantized) -> ScaledFormat:
    """The format that all tensors have, integers of up to 16 bits under one power of two."""
    formats = {one.cast.format for one in tensors}
    format = next(iter(formats))
    if len(formats) > 1:
        raise InvalidInput(f"{' and '.join(sorted(map(str, formats)))} are two formats: encode both tensors in one")
    if not (
        isinstance(format, ScaledFormat)
        and isinstance(format.element, IntFormat)
        and isinstance(format.scale, PowerOfTwo)
        and format.scope.kind == "tensor"
        and format.element.bits in (8, 16)
    ):
        raise InvalidInput(f"{format} is not integers under one power of two: possible are flex16+5 and dfp16")
    return format


def _moved(mantissas: Tensor, shift: Tensor, format: ScaledFormat) -> tuple[Tensor, Tensor]:
    """Shift int64 mantissas to the right (to the left where negative), round, saturate; count what did not fit."""
    assert isinstance(format.element, IntFormat)
    right, left = shift.to(torch.int64).clamp(0, 62), (-shift.to(torch.int64)).clamp(0, 31)
    floor = mantissas >> right
    rest = mantissas - (floor << right)
    half = (torch.ones_like(right) << right) >> 1
    up = (rest > half) | ((rest == half) & (floor & 1 == 1))
    rounded = torch.where(right > 0, floor + up, mantissas << left)
    bounded = rounded.clamp(format.element.minimum, format.element.maximum)
    dtype = torch.int16 if format.element.bits == 16 else torch.int8
    return bounded.to(dtype), (bounded != rounded).sum()


def _fitting(mantissas: Tensor, exponent: Tensor, format: ScaledFormat) -> Tensor:
    """The smallest exponent of the format under which the largest mantissa, once rounded, fits."""
    assert isinstance(format.element, IntFormat) and isinstance(format.scale, PowerOfTwo)
    largest = mantissas.abs().amax() if mantissas.numel() else mantissas.new_zeros(())
    bits = torch.frexp(largest.double())[1]  # exact: below 2^31
    lowest = format.scale.min_exponent
    wanted = torch.where(largest > 0, exponent + bits - (format.element.bits - 1), lowest)
    wanted = wanted.clamp(lowest, format.scale.max_exponent).to(torch.int32)
    shifted, _ = _moved(largest, wanted - exponent, format)
    unsaturated = torch.ldexp(largest.double(), exponent - wanted).round()
    grows = (unsaturated > shifted.double()) & (wanted < format.scale.max_exponent)
    return wanted + grows
