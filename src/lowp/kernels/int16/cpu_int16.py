"""int16 mantissas by the C++ library: contiguous fp32 tensors on a CPU, or the layout that `Rows` describes.

`mantissas` chooses between these functions and torch operations that give the same bits. An exponent is a tensor, int32
and 0-d, which the library reads, and tells, by its pointer.
"""

from __future__ import annotations

import struct
from array import array
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.cpu.abi import TYPE_NUMBERS, parameters

_FP32 = (torch.float32,)


class Seen(NamedTuple):
    """What the host has seen of one write under a shared exponent."""

    mantissa: int  # the largest |mantissa| of what is finite, after saturation: 0 .. 32768
    nonfinite: bool  # whether anything is infinite, which saturates, or NaN, which becomes 0
    vanished: bool  # whether all nonzero values became zero
    overflowed: int  # finite elements that did not fit
    elements: int


def memory_of(*tensors: Tensor, as_they_lie: bool = False) -> list[int] | None:
    """Return where tensors of fp32 lie; None if the C++ library cannot read one of them directly.

    They are contiguous, or may lie otherwise.
    """
    if chosen() not in (None, "cpu") or cpu.library() is None:
        return None
    if (found := cpu.addresses(tensors, _FP32)) is not None:
        for x, pointer in zip(tensors, found, strict=True):
            if pointer & 3 or not (as_they_lie or x.is_contiguous()):
                return None
    return found


def to_int16(
    x: Tensor, cast: Cast, exponent: Tensor, out: Tensor | None, result: Tensor | None = None, seed: int = 0
) -> Seen:
    """Write x * 2**-exponent, rounded by a cast and saturated, into the int16 tensor `out`, in one pass.

    `result`, in fp32, takes what the mantissas stand for, and what is not finite as it is; it may be x, and be asked
    for alone.
    """
    counts = array("q", (0,) * 4)
    given = x, exponent, out, result, x.numel(), seed & cpu.MASK, torch.get_num_threads(), counts
    cpu.loaded().lowp_write_int16(mantissa_block(cast), TYPE_NUMBERS[x.dtype], *given)
    largest, saturated, nonfinite, has_any = counts  # whether anything was not zero before it was rounded
    vanished = largest == 0 and nonfinite == 0 and has_any != 0
    return Seen(largest, nonfinite > 0, vanished, saturated, x.numel())


def current_int16(x: Tensor, cast: Cast, seed: int, out: Tensor | None) -> Tensor:
    """Write x, of fp32, as int16 under the exponent of its maximum, which is returned; None writes nothing.

    Where x is not finite, nothing is written, and no exponent of int16 is returned.
    """
    exponent = torch.empty((), dtype=torch.int32, device="cpu")
    memory = out, x.numel(), seed & cpu.MASK, torch.get_num_threads(), exponent
    block, *bounds = own_bounds(cast)
    cpu.loaded().lowp_current_int16(block, x, *bounds, *memory)
    return exponent


def is_exact_int16(x: Tensor, cast: Cast) -> tuple[bool, Tensor]:
    """Return whether all of x, of fp32, is a mantissa under the exponent of its maximum, and that exponent.

    The cast's scaling counts for nothing.
    """
    exponent = torch.empty((), dtype=torch.int32, device="cpu")
    block, offset, *bounds = own_bounds(cast)
    assert cast.scaling is not None
    offset -= cast.scaling.headroom
    found = cpu.loaded().lowp_is_exact_int16(block, x, offset, *bounds, x.numel(), torch.get_num_threads(), exponent)
    return found != 0, exponent


@remembered_by_identity
def own_bounds(cast: Cast) -> tuple[object, int, int, int]:
    """Return the parameters of a cast, and its `exponent_bounds`."""
    return mantissa_block(cast), *exponent_bounds(cast)


def exponent_bounds(cast: Cast) -> tuple[int, int, int]:
    """Return what is added to floor(log2) of a maximum, and the bounds of the sum, for the exponent of a tensor."""
    format = cast.format
    assert isinstance(format, ScaledFormat) and isinstance(format.scale, PowerOfTwo) and cast.scaling is not None
    offset = cast.scaling.headroom - (format.element.bits - 2)
    return offset, format.scale.min_exponent, format.scale.max_exponent


def from_int16(mantissas: Tensor, exponent: Tensor, out: Tensor) -> None:
    """Write mantissas * 2**exponent into `out`, fp32: exact unless it leaves the range."""
    cpu.loaded().lowp_from_int16(mantissas, exponent, out, mantissas.numel(), torch.get_num_threads())


def exact_int16(x: Tensor, exponent: Tensor, out: Tensor) -> int | None:
    """Write x * 2**-exponent, of fp32, into the int16 tensor `out` and return the largest |mantissa|.

    None where some element is no int16 under this exponent, or that is beyond 100; `out` is then half written.
    """
    largest: int = cpu.loaded().lowp_exact_int16(x, exponent, out, x.numel(), torch.get_num_threads())
    return None if largest < 0 else largest


class Rows(NamedTuple):
    """The memory layout of elements: rows of neighbours, one row every `stride` elements."""

    rows: int
    columns: int
    stride: int


def is_int16(x: Tensor, mantissas: Tensor, exponent: Tensor, lie: Rows) -> bool | None:
    """Whether every element of x, of fp32, is its mantissa * 2**exponent; both lie alike.

    None under exponents beyond 100, whose units fp32 may not hold.
    """
    given = *lie, exponent, False, 0, torch.get_num_threads()
    found = cpu.loaded().lowp_same_int16(x, mantissas, *given)
    return None if found == -2 else found == 0


def are_int16(given: array[int]) -> list[bool]:
    """Return `is_int16` of each tensor, from one call; not so under exponents beyond 100.

    Six numbers of each: the addresses of the tensor and of its mantissas, how both lie, the address of their exponent.
    """
    count = len(given) // 6
    found = array("q", bytes(8 * count))
    cpu.loaded().lowp_same_int16_list(given, count, torch.get_num_threads(), found)
    return list(map(not_, found))


def rounds_to_int16(x: Tensor, mantissas: Tensor, exponent: Tensor, lie: Rows, symmetric: bool) -> float | None:
    """Return the largest |x| of an fp32 tensor if `to_int16` to nearest even would write these mantissas, or None.

    Both lie alike. None under exponents beyond 100.
    """
    given = *lie, exponent, True, -32767 if symmetric else -32768, torch.get_num_threads()
    found = cpu.loaded().lowp_same_int16(x, mantissas, *given)
    return None if found < 0 else float(struct.unpack("=f", struct.pack("=I", found))[0])  # its bits


def relu(x: Tensor, mantissas: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return ReLU of mantissas, and of their values in fp32; None where they are not those of x, or there is no kernel.

    Both are contiguous. None under exponents beyond 100.
    """
    if memory_of(x) is None:
        return None
    payload, result = torch.empty_like(mantissas), torch.empty_like(x)
    given = x, mantissas, exponent, payload, result
    wrong = cpu.loaded().lowp_relu_int16(*given, x.numel(), torch.get_num_threads())
    return None if wrong else (payload, result)


@remembered_by_identity
def mantissa_block(cast: Cast) -> object:
    """Return the parameters of a cast's rounding to int16."""
    assert isinstance(cast.element, IntFormat)
    element = IntFormat("int16", 16, cast.element.symmetric)
    return parameters(Cast(element, cast.rounding, random_bits=cast.random_bits))
