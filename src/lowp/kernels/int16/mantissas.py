"""Tensors as int16 mantissas under one shared power of two: what the integer products take; see kernels/README.md."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16 import cpu_int16
from lowp.kernels.int16.cpu_int16 import Seen, is_direct
from lowp.kernels.int16.device_exponents import times
from lowp.kernels.numbers import bitwise

_WIDE = IntFormat("wide", 32)  # rounds without saturating what int16 still has to be seen to saturate


class Mantissas(NamedTuple):
    """A tensor of integers under one power of two: value = payload * 2**exponent.

    The general type of integers under shared scales, of any width and scope, is `lowp.Quantized`: its scales are
    tensors, and `lowp.encode` makes it. This is what the int16 kernels take of it: the exponent is a number on the
    host, since a product adds the exponents of its operands and shifts by them, and a write knows at once what it saw;
    on a device it stays there, and nothing is waited for (`device_exponents`).
    Bytes of activations (`byte_rows.Bytes`) are another type on purpose. They have an fp32 scale and a zero point,
    which no power of two expresses; kernels of one kind would read the payload of the other as wrong numbers, and as
    it is a type checker refuses that.
    """

    payload: Tensor  # int16
    exponent: Any  # of the host; or an int32 0-d tensor of the payload's device, see `device_exponents`
    seen: Seen | None = None  # while the payload was written; None of one that was kept

    @property
    def values(self) -> Tensor:
        """The values in fp32; see `values`."""
        return values(self.payload, self.exponent)


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


def int16_element(cast: Cast) -> IntFormat:
    """Return the element format of a cast that has mantissas."""
    assert isinstance(cast.element, IntFormat)
    return cast.element


def current_exponent(x: Tensor, cast: Cast) -> int | None:
    """The exponent that DFP-16 gives a tensor: floor(log2 max|x|) - 14, plus the headroom, within the format's range.

    0 for zeros and empty tensors, None where the maximum is infinite or NaN. Das et al. 2018, arXiv 1802.00930, sec. 2.
    """
    return _current_exponent(x.detach(), cast, is_direct(x))


def _current_exponent(x: Tensor, cast: Cast, direct: bool) -> int | None:
    if cast.scaling is not None and cast.scaling.exponent is not None:
        return cast.scaling.exponent
    if x.numel() == 0:
        return 0
    if direct:
        maximum, _ = cpu.grid(x, lowest=False)
    else:
        low, high = torch.aminmax(x)  # one pass; a norm takes many times as long
        maximum = float(torch.maximum(low.abs(), high.abs()))
    return exponent_of(maximum, cast)


def current_mantissas(x: Tensor, cast: Cast, seed: int = 0) -> Mantissas | None:
    """Return x as mantissas under its own exponent, `current_exponent`; None where x is not finite."""
    is_free = cast.scaling is None or cast.scaling.exponent is None
    direct = is_direct(x)
    if not direct:
        x = readable(x)
        direct = is_direct(x)
    if direct and is_free:
        out = x.new_empty(x.shape, dtype=torch.int16)
        found = cpu_int16.current_int16(x, cast, seed, out)
        return None if found is None else Mantissas(out, *found)
    exponent = _current_exponent(x, cast, direct)
    if exponent is None:
        return None
    payload, seen = _converted(x, cast, exponent, seed, x.is_cpu and uses_library())
    return None if seen.nonfinite else Mantissas(payload, exponent, seen)


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
    if not is_direct(x):
        flat, _ = as_it_lies(x)
        if is_direct(flat):
            return exact_exponent(flat, plain)
        exponent = current_exponent(x, plain)
        if exponent is None:
            return None
        payload, seen = _converted(readable(x), plain, exponent, 0, x.is_cpu and uses_library())
        same = seen.mantissa <= 32767 and torch.equal(values(payload, exponent).to(x.dtype), x)
        return exponent if same else None
    maximum, lowest = cpu.grid(x, lowest=True)
    exponent = exponent_of(maximum, plain)
    if exponent is None or lowest is None:
        return exponent
    held = maximum <= math.ldexp(32767, exponent)
    return exponent if held and exponent <= lowest and lowest > -127 else None


def _is_special(cast: Cast) -> bool:
    scaling = cast.scaling
    return scaling is not None and (scaling.headroom != 0 or scaling.exponent is not None)


def readable(x: Tensor) -> Tensor:
    """Return x outside the graph with its elements side by side in memory, zeros that have none included.

    What tensor parallelism is still sending (torch's AsyncCollectiveTensor) is waited for.
    """
    x = x.detach()
    if type(x) is not Tensor and (wait := getattr(x, "trigger_wait", None)) is not None:
        x = wait()
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if x._is_zerotensor() else x.contiguous().resolve_neg()


def as_it_lies(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the numbers of x in memory order, and a function that gives such numbers the layout of x.

    x itself where it is contiguous, or has gaps or overlaps.
    """
    if x.is_contiguous() or not _is_dense(x):
        return x, lambda y: y
    flat = x.detach().as_strided((x.numel(),), (1,), x.storage_offset())
    return flat, lambda y: y.as_strided(x.shape, x.stride())


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order: torch then keeps the layout."""
    return not x._is_zerotensor() and torch.empty_like(x, device="meta").stride() == x.stride()


def exact_mantissas(x: Tensor, cast: Cast, hint: int) -> Mantissas | None:
    """Return x as mantissas that represent every bit of it, under the exponent `hint` if possible.

    None where x is not in the cast's format, or is not contiguous fp32 on a CPU with the C++ library.
    """
    if not is_direct(x):
        return None
    payload = torch.empty(x.shape, dtype=torch.int16, device="cpu")
    exponent: int | None = hint
    largest = cpu_int16.exact_int16(x, hint, payload)
    if largest is None:
        exponent = exact_exponent(x, cast)
        largest = None if exponent is None else cpu_int16.exact_int16(x, exponent, payload)
    if largest is None or exponent is None:
        return None
    return Mantissas(payload, exponent, Seen(largest, False, False, 0, 0, x.numel()))


def to_mantissas(x: Tensor, cast: Cast, exponent: int, seed: int = 0) -> Mantissas:
    """Write x * 2**-exponent, rounded once and saturated, as int16; x of any float dtype, shape and layout."""
    payload, seen = _converted(readable(x), cast, exponent, seed, x.is_cpu and uses_library())
    return Mantissas(payload, exponent, seen)


def _converted(x: Tensor, cast: Cast, exponent: int, seed: int, by_library: bool) -> tuple[Tensor, Seen]:
    payload = torch.empty_like(x, dtype=torch.int16)
    if by_library:
        return payload, cpu_int16.to_int16(x, cast, exponent, payload, seed=seed)
    scaled = torch.ldexp(x.double(), torch.full((), -exponent, device=x.device))
    if cast.rounding is Rounding.NEAREST_EVEN:
        rounded = scaled.round()
    else:
        rounded = bitwise.quantized(scaled, wide_cast(cast.rounding, cast.random_bits), seed)
    bounded = rounded.nan_to_num(nan=0.0).clamp(-32767 if int16_element(cast).symmetric else -32768, 32767)
    payload.copy_(bounded)
    finite = scaled.isfinite()
    largest = int(torch.where(finite, bounded.abs(), 0.0).max()) if x.numel() else 0
    cut, nonfinite = int((finite & (bounded != rounded)).sum()), not bool(finite.all())
    vanished = largest == 0 and not nonfinite and bool(x.any())
    return payload, Seen(largest, nonfinite, vanished, cut, 0, x.numel())


def values(payload: Tensor, exponent: int | Tensor) -> Tensor:
    """The values of mantissas in fp32, which holds them exactly unless they leave its range."""
    if isinstance(exponent, Tensor):
        return times(payload.float(), exponent)
    if not (payload.is_cpu and uses_library()):
        return _defined_values(payload, exponent)
    result = torch.empty_like(payload, dtype=torch.float32)
    if result.stride() != payload.stride():  # it has gaps, or lies on itself
        payload, result = payload.contiguous(), torch.empty(payload.shape, dtype=torch.float32, device="cpu")
    cpu_int16.from_int16(payload, exponent, result)
    return result


def sums(payload: Tensor, axis: int) -> Tensor:
    """The sums of mantissas over all dimensions but one, as int64: exact."""
    axis %= payload.dim()
    if not (payload.is_cpu and uses_library()):
        dims = [dim for dim in range(payload.dim()) if dim != axis]
        return payload.sum(dims, dtype=torch.int64) if dims else payload.to(torch.int64)
    payload = payload.contiguous()
    outer, count, inner = math.prod(payload.shape[:axis]), payload.shape[axis], math.prod(payload.shape[axis + 1 :])
    result = payload.new_empty(count, dtype=torch.int64)
    cpu.loaded().lowp_sum_int16(payload, outer, count, inner, result, torch.get_num_threads())
    return result


def _defined_values(payload: Tensor, exponent: int) -> Tensor:
    if -100 <= exponent <= 100:
        return payload.to(torch.float32) * 2.0**exponent
    return torch.ldexp(payload.double(), torch.full((), exponent, device=payload.device)).float()


def mantissas_and_values(x: Tensor, cast: Cast, exponent: int, in_place: bool = False) -> tuple[Mantissas, Tensor]:
    """Return x as mantissas, and their values in fp32; infinities and NaNs stay unchanged.

    `in_place`: x is no longer needed, and the values may overwrite it. Both lie as `laid_out`
    has it.
    """
    x = laid_out(x, cast)
    if not (x.is_cpu and uses_library()):
        payload, seen = _converted(x, cast, exponent, 0, False)
        result = _defined_values(payload, exponent)
        result = torch.where(x.isfinite(), result, x.float()) if seen.nonfinite else result
        return Mantissas(payload, exponent, seen), result
    payload = torch.empty_like(x, dtype=torch.int16)
    result = x if in_place and x.dtype is torch.float32 else torch.empty_like(x, dtype=torch.float32)
    return Mantissas(payload, exponent, cpu_int16.to_int16(x, cast, exponent, payload, result)), result


def laid_out(x: Tensor, cast: Cast) -> Tensor:
    """Return x outside the graph, as it is written: contiguous, or in the order of its memory, in the same layout.

    It is the latter where that is dense but not contiguous and the last dimension is, as in the heads of an attention:
    the ops behind it often undo the transposition, and would have to copy a contiguous result. A stochastic cast draws
    by the logical order of elements.
    """
    if x.is_contiguous() or cast.is_stochastic or x.stride(-1) != 1 or x.is_neg() or not _is_dense(x):
        return readable(x)
    return x.detach()


@functools.cache
def wide_cast(rounding: Rounding, random_bits: int | None) -> Cast:
    """Return a cast to integers of 32 bits, which rounds as another one does and saturates later."""
    return Cast(_WIDE, rounding, None, None, random_bits)
