"""int16 mantissas by the C++ library: contiguous fp32 tensors on a CPU, or the layout that `Rows` describes.

`mantissas` chooses between these functions and torch operations that give the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.cpu.abi import TYPE_NUMBERS, parameters


class Seen(NamedTuple):
    """The observations of one write under a shared exponent: numbers on a CPU, 0-d tensors on an accelerator."""

    mantissa: Any  # the largest |mantissa| of what is finite, after saturation: 0 .. 32768
    nonfinite: Any  # whether anything is infinite, which saturates, or NaN, which becomes 0
    vanished: Any  # whether all nonzero values became zero
    overflowed: Any  # finite elements that did not fit
    crowded: Any  # elements that would not fit under half the unit; 0 on a CPU where they were not asked for
    elements: Any


def is_direct(*tensors: Tensor) -> bool:
    """Whether the C++ library can read the tensors' memory directly."""
    try:
        for x in tensors:
            if not (
                type(x) in cpu.PLAIN
                and x.dtype is torch.float32
                and x.is_cpu
                and x.layout is torch.strided
                and x.is_contiguous()
                and not (x.is_neg() or x.is_nested)
                and not x._is_zerotensor()
                and x.data_ptr() % 4 == 0
            ):
                return False
        return uses_library()
    except RuntimeError:  # what outlived its torch.func transform: a wrapper without storage, which torch opens
        return False


def to_int16(
    x: Tensor, cast: Cast, exponent: int, out: Tensor | None, result: Tensor | None = None, seed: int = 0
) -> Seen:
    """Write x * 2**-exponent, rounded by a cast and saturated, into the int16 tensor `out`, in one pass.

    `result`, in fp32, takes what the mantissas stand for, and what is not finite as it is; it may be x, and be asked
    for alone.
    """
    counts = array("q", (0,) * 4)
    cpu.loaded().lowp_write_int16(
        mantissa_block(cast),
        TYPE_NUMBERS[x.dtype],
        x,
        exponent,
        out,
        result,
        x.numel(),
        seed & cpu.MASK,
        torch.get_num_threads(),
        counts,
    )
    return seen_of(x.numel(), *counts)


_NOT_FINITE = 1 << 20  # no exponent


def current_int16(x: Tensor, cast: Cast, seed: int, out: Tensor) -> tuple[int, Seen] | None:
    """Write x, of fp32, into the int16 tensor `out` under the exponent of its maximum; return that, and what was seen.

    None, with nothing written, where x is not finite.
    """
    counts = array("q", (0,) * 4)
    block, offset, lowest, highest = own_exponent(cast)
    memory = out, None, x.numel(), seed & cpu.MASK, torch.get_num_threads(), counts
    given = block, x, offset, lowest, highest
    exponent: int = cpu.loaded().lowp_current_int16(*given, *memory)
    return None if exponent == _NOT_FINITE else (exponent, seen_of(x.numel(), *counts))


def current_values(x: Tensor, cast: Cast, seed: int, out: Tensor) -> bool:
    """Write the values of x, of fp32, under its own exponent into `out`, which may be x, by the C++ library.

    Returns False, with nothing written, where x is not finite.
    """
    counts = array("q", (0,) * 4)
    block, offset, lowest, highest = own_exponent(cast)
    memory = None, out, x.numel(), seed & cpu.MASK, torch.get_num_threads(), counts
    found: int = cpu.loaded().lowp_current_int16(block, x, offset, lowest, highest, *memory)
    return found != _NOT_FINITE


@remembered_by_identity
def own_exponent(cast: Cast) -> tuple[object, int, int, int]:
    """Return the parameters of a cast, what is added to the exponent of a maximum, and the bounds of the sum."""
    format = cast.format
    assert isinstance(format, ScaledFormat) and isinstance(format.element, IntFormat)
    assert isinstance(format.scale, PowerOfTwo)
    offset = (0 if cast.scaling is None else cast.scaling.headroom) - (format.element.bits - 2)
    return mantissa_block(cast), offset, format.scale.min_exponent, format.scale.max_exponent


def from_int16(mantissas: Tensor, exponent: int, out: Tensor) -> None:
    """Write mantissas * 2**exponent into `out`, fp32: exact unless it leaves the range."""
    cpu.loaded().lowp_from_int16(mantissas, exponent, out, mantissas.numel(), torch.get_num_threads())


def exact_int16(x: Tensor, exponent: int, out: Tensor) -> int | None:
    """Write x * 2**-exponent, of fp32, into the int16 tensor `out` and return the largest |mantissa|.

    None where some element is no int16 under this exponent; `out` is then half written. Exponents from -100 to 100.
    """
    largest: int = cpu.loaded().lowp_exact_int16(x, exponent, out, x.numel(), torch.get_num_threads())
    return None if largest < 0 else largest


class Rows(NamedTuple):
    """The memory layout of elements: rows of neighbours, one row every `stride` elements."""

    rows: int
    columns: int
    stride: int


def is_int16(x: Tensor, mantissas: Tensor, exponent: int, lie: Rows) -> bool:
    """Whether every element of x, of fp32, is its mantissa * 2**exponent; both lie alike. Exponents -100 to 100."""
    return _same_int16(x, mantissas, lie, exponent, False, 0) == 0


Kept = tuple[
    Tensor, Tensor, int, "Rows | tuple[int, int, int]"
]  # a tensor, its mantissas, their exponent, and how both lie


def are_int16(tensors: Sequence[Kept]) -> list[bool]:
    """Return `is_int16` of each tensor, from one call."""
    given: list[Any] = []
    for x, payload, exponent, lie in tensors:
        given += [x, payload, *lie, exponent]
    found = array("q", bytes(8 * len(tensors)))
    cpu.loaded().lowp_same_int16_list(given, len(tensors), torch.get_num_threads(), found)
    return [one == 0 for one in found]


def rounds_to_int16(x: Tensor, mantissas: Tensor, exponent: int, lie: Rows, symmetric: bool) -> float | None:
    """Return the largest |x| of an fp32 tensor if `to_int16` to nearest even would write these mantissas, or None.

    Both lie alike. Exponents from -100 to 100.
    """
    found = _same_int16(x, mantissas, lie, exponent, True, -32767 if symmetric else -32768)
    if found < 0:
        return None
    return cpu.fp32_of(found)


def _same_int16(x: Tensor, mantissas: Tensor, lie: Rows, exponent: int, rounded: bool, lowest: int) -> int:
    given = (
        x,
        mantissas,
        *lie,
        exponent,
        rounded,
        lowest,
        torch.get_num_threads(),
    )
    found: int = cpu.loaded().lowp_same_int16(*given)
    return found


def relu(x: Tensor, mantissas: Tensor, exponent: int) -> tuple[Tensor, Tensor] | None:
    """Return ReLU of mantissas, and of their values in fp32; None where they are not those of x, or there is no kernel.

    Both are contiguous. Exponents from -100 to 100.
    """
    if not is_direct(x):
        return None
    payload, result = torch.empty_like(mantissas), torch.empty_like(x)
    given = x, mantissas, exponent, payload, result
    wrong = cpu.loaded().lowp_relu_int16(*given, x.numel(), torch.get_num_threads())
    return None if wrong else (payload, result)


def seen_of(elements: int, largest: int, saturated: int, nonfinite: int, any_: int) -> Seen:
    """What the kernels count of a tensor; `any_` is whether anything in it was not zero before it was rounded."""
    vanished = largest == 0 and nonfinite == 0 and any_ != 0
    return Seen(largest, nonfinite > 0, vanished, saturated, 0, elements)


@remembered_by_identity
def mantissa_block(cast: Cast) -> object:
    """Return the parameters of a cast's rounding to int16."""
    assert isinstance(cast.element, IntFormat)
    element = IntFormat("int16", 16, cast.element.symmetric)
    return parameters(Cast(element, cast.rounding, random_bits=cast.random_bits))
