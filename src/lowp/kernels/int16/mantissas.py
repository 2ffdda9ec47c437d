"""Tensors as int16 mantissas under one shared power of two: what the integer products take; see kernels/README.md.

An exponent is an int32 tensor without dimensions on the device of its mantissas, which kernels read by its pointer, and
which a captured graph reads anew at each replay. Two numbers beyond all exponents stand for answers: `NOT_FINITE`, the
exponent of a tensor with an infinity or a NaN, is a scale of NaN, and so is its sum with any other; `NOTHING`, of a
second word that is not needed, is a scale of zero, at which products stop at once.

torch's operations define the bits, in fp32 and int32 where the rounding is to nearest, as Apple's GPUs have no fp64;
the C++ library and Triton's kernels give the same ones. Triton's take a launch for each look at a tensor, and one for
its mantissas.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.compat import has_fp64
from lowp.formats import IntFormat, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import answers_at_once, by_triton, uses_library
from lowp.kernels.int16 import cpu_int16
from lowp.kernels.int16.cpu_int16 import Seen, exponent_bounds, memory_of
from lowp.kernels.numbers import bitwise
from lowp.kernels.numbers.floats import two_to_the
from lowp.kernels.numbers.philox import Draw, Seed
from lowp.scaling import powers

NOT_FINITE, NOTHING = 1 << 15, -(1 << 14)
_BEYOND = 1 << 13
_INFINITY = 0x7F800000  # in the bits of fp32; NaN is above it
_HIDDEN = 1 << 23
_WIDE = IntFormat("wide", 32)  # rounds without saturating what int16 still has to be seen to saturate


class Mantissas(NamedTuple):
    """A tensor of integers under one power of two: value = payload * 2**exponent.

    The general type of integers under shared scales, of any width and scope, is `lowp.Quantized`, which `lowp.encode`
    makes. This is what the int16 kernels take of it: a product adds the exponents of its operands and shifts by them.
    Bytes of activations (`byte_rows.Bytes`) are another type on purpose. They have an fp32 scale and a zero point,
    which no power of two expresses; kernels of one kind would read the payload of the other as wrong numbers, and as
    it is a type checker refuses that.
    """

    payload: Tensor  # int16
    exponent: Tensor  # int32, 0-d

    @property
    def values(self) -> Tensor:
        """The values in fp32; see `values`."""
        return values(self.payload, self.exponent)


def has_mantissas(cast: Cast | None) -> bool:
    """Whether a cast's format is int16 under one power of two for the tensor (flex16+5, dfp16)."""
    format = None if cast is None else cast.format
    return isinstance(format, ScaledFormat) and format.element.bits == 16 and format.is_flex


def int16_element(cast: Cast) -> IntFormat:
    """Return the element format of a cast that has mantissas."""
    assert isinstance(cast.element, IntFormat)
    return cast.element


def _is_served(x: Tensor) -> bool:
    """Whether the C++ library computes on a tensor: on a CPU, where the host is told at once."""
    return answers_at_once(x) and uses_library()


def _is_direct(x: Tensor) -> bool:
    """Whether it can read the tensor's memory directly, too."""
    return answers_at_once(x) and memory_of(x) is not None


# -- exponents --------------------------------------------------------------------------------------------------------
def as_exponent(exponent: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return an exponent as a tensor, made on a device of a number."""
    if isinstance(exponent, Tensor):
        return exponent
    return torch.full((), exponent, dtype=torch.int32, device=device)


def times(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x, fp32, times 2**exponent, like `powers.times`; NaN for a non-finite exponent, 0 for an absent one."""
    return powers.times(x, exponent) * _told(torch.ones((), dtype=torch.float32, device=x.device), exponent)


def power(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp64; NaN for a non-finite exponent, 0 for an absent one."""
    return _told(two_to_the(exponent.clamp(-1022, 1023)), exponent)


def _told(scale: Tensor, exponent: Tensor) -> Tensor:
    return torch.where(exponent < -_BEYOND, 0.0, torch.where(exponent > _BEYOND, torch.nan, scale))


def own_exponent(x: Tensor, cast: Cast, only_finite: bool = False) -> Tensor:
    """Return the exponent of x's maximum: floor(log2 max|x|) - 14, plus the headroom, within the format's range.

    0 for zeros and empty tensors, `NOT_FINITE` where anything is infinite or NaN, or in fp64 beyond fp32; with
    `only_finite` that counts for nothing. Das et al. 2018, arXiv 1802.00930, sec. 2.
    """
    x = readable(x)
    if by_triton(x):
        from lowp.kernels.triton import mantissas as kernels

        found = kernels.look(x, cast, only_finite=only_finite)
        return found.exponent if only_finite else found.told
    scaling = cast.scaling
    assert scaling is not None
    if _is_direct(x) and scaling.exponent is None:
        known = cpu_int16.current_int16(x, cast, 0, None)
        if not only_finite or int(known) != NOT_FINITE:
            return known
    largest = _bits_of_largest(torch.where(x.isfinite(), x, 0.0) if only_finite else x)
    if scaling.exponent is not None:
        exponent = torch.full_like(largest, scaling.exponent)
    else:
        units = largest.to(torch.float32).view(torch.int32) >> 23  # of a subnormal number: how many of 2**-149
        floor_log2 = torch.where(largest < _HIDDEN, units - 127 - 149, (largest >> 23) - 127)
        offset, low, high = exponent_bounds(cast)
        exponent = torch.where(largest == 0, 0, (floor_log2 + offset).clamp(low, high))
    return torch.where(largest < _INFINITY, exponent, NOT_FINITE)


def _bits_of_largest(x: Tensor) -> Tensor:
    """Return the bits of the largest |x| in fp32, int32 and 0-d, in the same binade as in fp64."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.int32, device=x.device)
    low, high = torch.aminmax(x)  # one pass; a norm takes many times as long
    largest = torch.maximum(low.abs(), high.abs())
    if largest.dtype is torch.float64:  # with its first bits alone
        largest = (largest.view(torch.int64) & -(1 << 29)).view(torch.float64)
    return largest.float().view(torch.int32) & 0x7FFFFFFF


# -- mantissas --------------------------------------------------------------------------------------------------------
def current_mantissas(x: Tensor, cast: Cast, seed: Seed = 0, hint: Tensor | None = None) -> Mantissas:
    """Return x as mantissas under its own exponent, `own_exponent`; of what is not finite they are any.

    `hint`: the exponent under which x may be in the format already, to the bit; it counts where every element is.
    """
    x = readable(x)
    if by_triton(x) and not isinstance(seed, Draw):
        from lowp.kernels.triton import mantissas as kernels

        found = kernels.look(x, cast, hint)
        return Mantissas(kernels.convert(x, cast, found.exponent, seed), found.told)
    assert cast.scaling is not None
    if hint is None and _is_direct(x) and cast.scaling.exponent is None:
        out = x.new_empty(x.shape, dtype=torch.int16)
        return Mantissas(out, cpu_int16.current_int16(x, cast, int(seed), out))  # type: ignore[arg-type]
    exponent = own_exponent(x, cast)
    if hint is not None:
        exponent = torch.where(_is_under(x, hint, cast), hint, exponent)
    return to_mantissas(x, cast, exponent, seed)


def to_mantissas(x: Tensor, cast: Cast, exponent: int | Tensor, seed: Seed = 0) -> Mantissas:
    """Write x * 2**-exponent, rounded once and saturated, as int16; x of any float dtype, shape and layout."""
    x, exponent = readable(x), as_exponent(exponent, x.device)
    if _is_served(x) and not isinstance(seed, Draw):
        payload = torch.empty_like(x, dtype=torch.int16)
        cpu_int16.to_int16(x, cast, exponent, payload, seed=int(seed))
        return Mantissas(payload, exponent)
    return Mantissas(_units(x, cast, exponent, seed)[1].nan_to_num(nan=0.0).to(torch.int16), exponent)


def _units(x: Tensor, cast: Cast, exponent: Tensor, seed: Seed = 0) -> tuple[Tensor, Tensor]:
    """Return x in units of 2**exponent, rounded once: as they are, and saturated."""
    x = x if x.dtype is torch.float64 else x.float()
    if cast.rounding is Rounding.NEAREST_EVEN:
        rounded = powers.times(x, -exponent).round()
    else:
        wide = x.double() if has_fp64(x.device.type) else x
        rounded = bitwise.quantized(powers.times(wide, -exponent), wide_cast(cast.rounding, cast.random_bits), seed)
    return rounded, rounded.clamp(int16_element(cast).minimum, int16_element(cast).maximum) + 0.0  # no -0


@functools.cache
def wide_cast(rounding: Rounding, random_bits: int | None) -> Cast:
    """Return a cast to integers of 32 bits, which rounds as another one does and saturates later."""
    return Cast(_WIDE, rounding, None, None, random_bits)


def exact(x: Tensor, cast: Cast, hint: Tensor | None = None) -> tuple[bool | Tensor, Tensor]:
    """Return whether every element of x is in a cast's format, and under which exponent; any where not.

    A bool where the host is told at once, on CPUs; else a tensor of bools, 0-d. Looked at are the exponent of x's own
    maximum and `hint`, if one is given, which comes first where both serve. The cast's scaling counts for nothing.
    """
    if hint is None and answers_at_once(x):
        lying = x.detach() if x.is_contiguous() else as_it_lies(x.detach())[0]
        if memory_of(lying) is not None:
            return cpu_int16.is_exact_int16(lying, cast)
    plain = Cast(cast.format, cast.rounding, cast.overflow)
    if by_triton(x):
        from lowp.kernels.triton import mantissas as kernels

        return kernels.exact_under(readable(x), plain, hint)
    exponent = own_exponent(x, plain)
    is_exact = _is_under(x, exponent, plain)
    if hint is not None:
        is_hinted = _is_under(x, hint, plain)
        is_exact, exponent = is_exact | is_hinted, torch.where(is_hinted, hint, exponent)
    return bool(is_exact) if answers_at_once(x) else is_exact, exponent


def _is_under(x: Tensor, exponent: Tensor, cast: Cast) -> Tensor:
    """Whether every element of x is a mantissa * 2**exponent; of -0, too."""
    x = readable(x)
    units = powers.times(x if x.dtype is torch.float64 else x.float(), -exponent)
    inside = (units >= int16_element(cast).minimum) & (units <= 32767) & (units == units.round())
    return (inside & ((units != 0) | (x == 0))).all()


def exact_mantissas(x: Tensor, cast: Cast, hint: Tensor | None = None) -> Mantissas | None:
    """Return x, on a CPU, as mantissas that represent every bit of it, under the exponent `hint` if possible.

    None where x is not in the cast's format.
    """
    x, lowest = readable(x), int16_element(cast).minimum
    if not _is_direct(x):
        is_exact, exponent = exact(x, cast, hint)
        return to_mantissas(x, cast, exponent) if is_exact else None
    payload = torch.empty(x.shape, dtype=torch.int16, device="cpu")
    largest = None if hint is None else cpu_int16.exact_int16(x, hint, payload)
    if hint is not None and largest is not None and largest <= -lowest:
        return Mantissas(payload, hint)
    is_exact, exponent = exact(x, cast)
    return to_mantissas(x, cast, exponent) if is_exact else None


def values(payload: Tensor, exponent: int | Tensor) -> Tensor:
    """The values of mantissas in fp32, which holds them exactly unless they leave its range."""
    if not isinstance(exponent, Tensor):
        exponent = as_exponent(exponent, payload.device)
    if not _is_served(payload):
        return times(payload.float(), exponent)
    result = torch.empty_like(payload, dtype=torch.float32)
    if result.stride() != payload.stride():  # it has gaps, or lies on itself
        payload, result = payload.contiguous(), torch.empty(payload.shape, dtype=torch.float32, device="cpu")
    cpu_int16.from_int16(payload, exponent, result)
    return result


def sums(payload: Tensor, axis: int) -> Tensor:
    """The sums of mantissas over all dimensions but one, as int64: exact."""
    axis %= payload.dim()
    if not _is_served(payload):
        dims = [dim for dim in range(payload.dim()) if dim != axis]
        return payload.sum(dims, dtype=torch.int64) if dims else payload.to(torch.int64)
    payload = payload.contiguous()
    outer, count, inner = math.prod(payload.shape[:axis]), payload.shape[axis], math.prod(payload.shape[axis + 1 :])
    result = payload.new_empty(count, dtype=torch.int64)
    cpu.loaded().lowp_sum_int16(payload, outer, count, inner, result, torch.get_num_threads())
    return result


# -- a write under a shared exponent ----------------------------------------------------------------------------------
def mantissas_and_values(x: Tensor, cast: Cast, exponent: int | Tensor) -> tuple[Mantissas, Tensor, Seen]:
    """Return x, on a CPU, as mantissas, their values in fp32, and what was seen; infinities and NaNs stay unchanged.

    Both lie as `laid_out` has it.
    """
    x, exponent = laid_out(x, cast), as_exponent(exponent)
    if not uses_library():
        payload, result, record = written(x, cast, exponent)
        largest, overflowed, *_, elements, flags, _ = record.tolist()
        seen = Seen(largest, flags & 1 > 0, flags >> 16 > 0, overflowed, elements)
        return Mantissas(payload, exponent), result, seen
    payload, result = (torch.empty_like(x, dtype=dtype) for dtype in (torch.int16, torch.float32))
    return Mantissas(payload, exponent), result, cpu_int16.to_int16(x, cast, exponent, payload, result)


def written(x: Tensor, cast: Cast, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x as mantissas, their values in fp32, and what was seen as a row of `entries`, by torch's operations."""
    rounded, bounded = _units(x, cast, exponent)
    finite, limit = x.isfinite(), int(int16_element(cast).maximum)
    magnitude = torch.where(finite, bounded.abs(), 0.0)
    largest = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    all_finite = finite.all()
    vanished = (largest == 0) & (finite & (x != 0)).any() & all_finite
    flags = ~all_finite + x.isnan().any() * (1 << 8) + vanished * (1 << 16)
    counts = (finite & (bounded != rounded)).sum(), (magnitude > limit // 2).sum()
    nothing = torch.zeros_like(flags, dtype=torch.int64)
    parts = largest, *counts, nothing, nothing, torch.full((), x.numel(), device=x.device), flags, nothing
    record = torch.stack([one.to(torch.int64) for one in parts])
    result = torch.where(finite, powers.times(bounded, exponent), x)
    return bounded.nan_to_num(nan=0.0).to(torch.int16), result.float(), record


# -- how tensors lie --------------------------------------------------------------------------------------------------
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


def laid_out(x: Tensor, cast: Cast) -> Tensor:
    """Return x outside the graph, as it is written: contiguous, or in the order of its memory, in the same layout.

    It is the latter where that is dense but not contiguous and the last dimension is, as in the heads of an attention:
    the ops behind it often undo the transposition, and would have to copy a contiguous result. A stochastic cast draws
    by the logical order of elements.
    """
    if type(x) is Tensor and x.is_contiguous() and not (x.is_neg() or x._is_zerotensor()):
        return x.detach()
    if x.is_contiguous() or cast.is_stochastic or x.stride(-1) != 1 or x.is_neg() or not _is_dense(x):
        return readable(x)
    return x.detach()
