"""Tensors as int16 mantissas under one shared power of two: what the integer products take."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import bitwise, cpu_mantissas
from lowp.kernels.dispatch import uses_library

_WIDE = IntFormat("wide", 32)  # rounds without saturating what int16 still has to be seen to saturate


class Mantissas(NamedTuple):
    """value = payload * 2**exponent, and what was seen while the payload was written."""

    payload: Tensor  # int16
    exponent: int
    largest: int  # the largest |mantissa| of what is finite, after saturation: 0 .. 32768
    saturated: int  # finite elements that did not fit
    nonfinite: int  # infinities, which saturate, and NaNs, which become 0
    any: bool = True  # whether any element was not zero before it was rounded


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
    if cast.scaling is not None and cast.scaling.exponent is not None:
        return cast.scaling.exponent
    if x.numel() == 0:
        return 0
    x = x.detach()
    if _is_direct(x):
        maximum, _ = cpu_mantissas.grid(x, lowest=False)
    else:
        low, high = torch.aminmax(x)  # one pass; a norm takes many times as long
        maximum = float(torch.maximum(low.abs(), high.abs()))
    return exponent_of(maximum, cast)


def exponent_of(maximum: float, cast: Cast) -> int | None:
    """The exponent that a tensor of this largest magnitude has by a cast; None where that is infinite or NaN."""
    assert isinstance(cast.format, ScaledFormat)
    assert isinstance(cast.format.scale, PowerOfTwo)
    if cast.scaling is not None and cast.scaling.exponent is not None:
        return cast.scaling.exponent
    if not math.isfinite(maximum):
        return None
    if maximum == 0:
        return 0
    headroom = 0 if cast.scaling is None else cast.scaling.headroom
    exponent = math.frexp(maximum)[1] - 1 - (cast.format.element.bits - 2) + headroom
    return min(max(exponent, cast.format.scale.min_exponent), cast.format.scale.max_exponent)


def exact_exponent(x: Tensor, cast: Cast) -> int | None:
    """The exponent of x's own maximum if every element is a mantissa under it, or None.

    The cast's scaling counts for nothing: this is whether x is in the format.
    """
    plain = Cast(cast.format, cast.rounding, cast.overflow) if _is_special(cast) else cast
    x = x.detach()
    if x.numel() == 0:
        return 0
    if not _is_direct(x):
        exponent = current_exponent(x, plain)
        if exponent is None:
            return None
        found = to_mantissas(x, plain, exponent)
        same = found.largest <= 32767 and torch.equal(values(found.payload, exponent).to(x.dtype), x)
        return exponent if same else None
    maximum, lowest = cpu_mantissas.grid(x, lowest=True)
    exponent = exponent_of(maximum, plain)
    if exponent is None or lowest is None:
        return exponent
    held = maximum <= math.ldexp(32767, exponent)
    return exponent if held and exponent <= lowest and lowest > -127 else None


def _is_special(cast: Cast) -> bool:
    scaling = cast.scaling
    return scaling is not None and (scaling.headroom != 0 or scaling.exponent is not None)


def _is_direct(x: Tensor) -> bool:
    """Whether the C++ library reads the tensor as it lies."""
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and x.is_contiguous()
        and not x.is_neg()
        and not x._is_zerotensor()
        and x.data_ptr() % 4 == 0
        and uses_library()
    )


def _readable(x: Tensor) -> Tensor:
    """Return x outside the graph with its elements side by side in memory, zeros that have none included."""
    x = x.detach()
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if x._is_zerotensor() else x.contiguous().resolve_neg()


def exact_mantissas(x: Tensor, cast: Cast, hint: int) -> Mantissas | None:
    """Return x as mantissas that stand for every bit of it, under the exponent `hint` where that serves.

    None where x is not in the cast's format, or is not contiguous fp32 on a CPU with the C++ library.
    """
    if not _is_direct(x):
        return None
    payload = torch.empty(x.shape, dtype=torch.int16, device="cpu")
    exponent: int | None = hint
    largest = cpu_mantissas.exact_int16(x, hint, payload)
    if largest is None:
        exponent = exact_exponent(x, cast)
        largest = None if exponent is None else cpu_mantissas.exact_int16(x, exponent, payload)
    return None if largest is None or exponent is None else Mantissas(payload, exponent, largest, 0, 0)


def to_mantissas(x: Tensor, cast: Cast, exponent: int, seed: int = 0) -> Mantissas:
    """Write x * 2**-exponent, rounded once and saturated, as int16; x of any float dtype, shape and layout."""
    assert isinstance(cast.format, ScaledFormat)
    assert isinstance(cast.format.element, IntFormat)
    x = _readable(x)
    payload = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    if x.device.type == "cpu" and uses_library():
        symmetric = cast.format.element.symmetric
        seen = cpu_mantissas.to_int16(x, exponent, symmetric, cast.rounding, seed, payload, cast.random_bits)
        return Mantissas(payload, exponent, *seen)
    scaled = torch.ldexp(x.double(), torch.tensor(-exponent, device=x.device))
    rounded = bitwise.quantized(scaled, Cast(_WIDE, cast.rounding, None, None, cast.random_bits), seed)
    bounded = rounded.nan_to_num(nan=0.0).clamp(cast.format.element.minimum, cast.format.element.maximum)
    payload.copy_(bounded)
    finite = scaled.isfinite()
    largest = int(torch.where(finite, bounded.abs(), 0.0).max()) if x.numel() else 0
    cut, nonfinite = int((finite & (bounded != rounded)).sum()), int((~finite).sum())
    return Mantissas(payload, exponent, largest, cut, nonfinite, largest > 0 or bool(x.any()))


def written(x: Tensor, cast: Cast, exponent: int) -> tuple[Mantissas, Tensor]:
    """Return x as mantissas, and the values they stand for in fp32; what is not finite stays as it is."""
    if x.device.type != "cpu" or not uses_library():
        found = to_mantissas(x, cast, exponent)
        result = values(found.payload, exponent)
        return found, torch.where(x.isfinite(), result, x.float()) if found.nonfinite else result
    payload = torch.empty(x.shape, dtype=torch.int16, device="cpu")
    result = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    return Mantissas(payload, exponent, *_write(x, cast, exponent, payload, result)), result


class Seen(NamedTuple):
    """What one write under a shared exponent saw: numbers on a CPU, 0-d tensors on an accelerator."""

    mantissa: Any  # the largest |mantissa| of what is finite
    nonfinite: Any  # whether anything is infinite or NaN
    vanished: Any  # whether all that was not zero became zero
    overflowed: Any  # elements that did not fit
    crowded: Any  # elements that would not fit under half the unit; 0 on a CPU where they were not asked for
    elements: Any


def write(x: Tensor, cast: Cast, exponent: int | Tensor, crowded: bool = False) -> tuple[Tensor, Seen, Tensor | None]:
    """Return x as values of the format in fp32 under an exponent, what was seen, and the mantissas if there are some.

    What is not finite stays as it is. An exponent that is a tensor on an accelerator is not waited for; there are no
    mantissas then.
    """
    if isinstance(exponent, Tensor):
        return *_write_without_waiting(x, cast, exponent), None
    found, result = written(x, cast, exponent)
    limit = _limit(cast)
    close = int((found.payload.abs() > limit // 2).sum()) if crowded else 0
    return result, seen_of(found, x.numel(), close), None if found.nonfinite else found.payload


def seen_of(found: Mantissas | cpu_mantissas.Written, elements: int, crowded: int = 0) -> Seen:
    """Return what was seen while mantissas were written, as all writes tell it."""
    vanished = found.largest == 0 and found.nonfinite == 0 and found.any
    return Seen(found.largest, found.nonfinite > 0, vanished, found.saturated, crowded, elements)


def _limit(cast: Cast) -> int:
    assert isinstance(cast.format, ScaledFormat) and isinstance(cast.format.element, IntFormat)
    return int(cast.format.element.maximum)


def _write_without_waiting(x: Tensor, cast: Cast, exponent: Tensor) -> tuple[Tensor, Seen]:
    limit = _limit(cast)
    scaled = torch.ldexp(x.double(), -exponent)
    finite = scaled.isfinite()
    rounded = torch.round(scaled)
    bounded = rounded.clamp(-limit - 1, limit)
    magnitude = torch.where(finite, bounded.abs(), 0.0)
    largest = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    seen = Seen(
        largest,
        ~finite.all(),
        (largest == 0) & (finite & (x != 0)).any() & finite.all(),
        (finite & (bounded != rounded)).sum(),
        (magnitude > limit // 2).sum(),
        torch.full_like(largest, x.numel()),
    )
    return torch.where(finite, torch.ldexp(bounded, exponent), x.double()).float(), seen


def write_(x: Tensor, cast: Cast, exponent: int) -> cpu_mantissas.Written:
    """Round x, of fp32, in place to values of the format, but for what is not finite; return what was seen."""
    if _is_direct(x):
        seen = _write(x, cast, exponent, None, x)
        torch.autograd.graph.increment_version(x)
        return seen
    found, result = written(x, cast, exponent)
    x.copy_(result)
    return cpu_mantissas.Written(*found[2:])


def _write(x: Tensor, cast: Cast, exponent: int, payload: Tensor | None, result: Tensor) -> cpu_mantissas.Written:
    assert isinstance(cast.format, ScaledFormat)
    assert isinstance(cast.format.element, IntFormat)
    symmetric = cast.format.element.symmetric
    x = _readable(x)
    return cpu_mantissas.to_int16(x, exponent, symmetric, cast.rounding, 0, payload, cast.random_bits, result)


def write_step(
    weight: Tensor, old: Mantissas, exponents: tuple[int, int], cast: Cast
) -> tuple[cpu_mantissas.Written, cpu_mantissas.Written] | None:
    """Write what a step has changed of a weight since it had mantissas, and the weight as the sum, in place.

    `old` takes the new mantissas; `exponents` are those of the update and of the weight. Returns what was seen of both;
    None, with nothing done, where one is to be written after the other.
    """
    assert isinstance(cast.format, ScaledFormat) and isinstance(cast.format.element, IntFormat)
    if not _is_direct(weight):
        return None
    seen = cpu_mantissas.step_int16(weight, old.payload, (old.exponent, *exponents), cast.format.element.symmetric)
    torch.autograd.graph.increment_version(weight)
    return seen


def values(payload: Tensor, exponent: int) -> Tensor:
    """The values of mantissas in fp32, which holds them exactly unless they leave its range."""
    if payload.device.type == "cpu" and uses_library():
        result = torch.empty_like(payload, dtype=torch.float32)
        if result.stride() != payload.stride():  # it has gaps, or lies on itself
            payload, result = payload.contiguous(), torch.empty(payload.shape, dtype=torch.float32, device="cpu")
        cpu_mantissas.from_int16(payload, exponent, result)
        return result
    if -100 <= exponent <= 100:
        return payload.to(torch.float32) * 2.0**exponent
    return torch.ldexp(payload.double(), torch.tensor(exponent, device=payload.device)).float()
