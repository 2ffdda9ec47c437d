"""Writes under shared exponents: values of the format, their mantissas, and statistics of the write."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.kernels.choose.dispatch import by_triton
from lowp.kernels.int16.cpu_int16 import Seen, is_direct, to_int16, words_int16
from lowp.kernels.int16.mantissas import int16_element, mantissas_and_values, wide_cast
from lowp.kernels.numbers import bitwise
from lowp.scaling.powers import times

__all__ = ["There", "write_", "write_there", "write_words_"]


class There(NamedTuple):
    """A write on a device, of which the host knows nothing."""

    values: Tensor
    seen: Seen
    has_nan: Tensor
    exponent: Any  # under which the values are in the format


def write_there(
    x: Tensor, cast: Cast, exponents: Tensor, index: int, when: Tensor | None = None, otherwise: Any = None
) -> There:
    """Return x as values of the format in fp32 under `exponents[index]`, int32, without waiting for the device.

    Where `when`, 0-d bool, does not hold, the values are those of x, the exponent is `otherwise`, if one is given, and
    what was seen is nothing. What is not finite stays as it is. On a CPU `mantissas_and_values` does this.
    """
    if by_triton(x):
        from lowp.kernels.triton import mantissas as kernels

        return There(*kernels.write(x, cast, exponents, index, when, otherwise))
    exponent = exponents[index].clone()
    values, seen = _written_there(x, cast, exponent)
    has_nan = x.isnan().any()
    if when is not None:
        values = torch.where(when, values, x.float())
        seen = Seen(*[*(one * when for one in seen[:-1]), when])
        exponent, has_nan = exponent if otherwise is None else torch.where(when, exponent, otherwise), has_nan & when
    return There(values, seen, has_nan, exponent)


def _written_there(x: Tensor, cast: Cast, exponent: Tensor) -> tuple[Tensor, Seen]:
    limit = int(int16_element(cast).maximum)
    x = x if x.dtype is torch.float64 else x.float()
    scaled = times(x, -exponent)
    finite = x.isfinite()
    if cast.rounding is Rounding.NEAREST_EVEN:
        rounded = scaled.round()
    else:
        rounded = bitwise.quantized(scaled, wide_cast(cast.rounding, cast.random_bits), 0)
    bounded = rounded.clamp(int16_element(cast).minimum, limit) + 0.0  # no -0, as of integers
    magnitude = torch.where(finite, bounded.abs(), 0.0)
    largest = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    seen = Seen(
        largest.to(torch.int32),
        ~finite.all(),
        (largest == 0) & (finite & (x != 0)).any() & finite.all(),
        (finite & (bounded != rounded)).sum(),
        (magnitude > limit // 2).sum(),
        torch.full((), x.numel(), dtype=torch.int64, device=x.device),
    )
    return torch.where(finite, times(bounded, exponent), x).float(), seen


def write_(x: Tensor, cast: Cast, exponent: int) -> Seen:
    """Round the finite elements of x, fp32, in place to values of the format; return the statistics."""
    if is_direct(x):
        y = x.detach()
        seen = to_int16(y, cast, exponent, None, y)
        torch.autograd.graph.increment_version(x)
        return seen
    (_, _, found), result = mantissas_and_values(x, cast, exponent)
    assert found is not None
    x.copy_(result)
    return found


def write_words_(x: Tensor, cast: Cast, exponent: int, low_bits: int) -> Seen | None:
    """Write x, fp32, in place as two words, the second `low_bits` lower, in one pass; return the statistics.

    Returns None and writes nothing if there is no kernel. Defined by `mantissas_and_values` followed by
    `low_words.low_value`.
    """
    if cast.rounding is not Rounding.NEAREST_EVEN or abs(exponent) > 100 or not is_direct(x):
        return None
    seen = words_int16(x, exponent, low_bits, int16_element(cast).symmetric)
    torch.autograd.graph.increment_version(x)
    return seen
