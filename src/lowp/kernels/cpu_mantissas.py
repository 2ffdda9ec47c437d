"""The C++ kernels of int16 mantissas under one exponent: written, read, compared, and moved by a step.

Tensors are contiguous and on the CPU, but where `Rows` says how they lie; what is computed is in kernels/README.md.
"""

from __future__ import annotations

import functools
import struct
from array import array
from typing import NamedTuple

from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.formats import IntFormat
from lowp.kernels import cpu

_FP32, _WORD = struct.Struct("=f"), struct.Struct("=I")


class Written(NamedTuple):
    """What was seen while mantissas were written."""

    largest: int  # the largest |mantissa| of what is finite
    saturated: int  # finite elements that did not fit
    nonfinite: int  # infinities, which saturate, and NaNs, which become 0
    any: bool  # whether anything was not zero before it was rounded


def to_int16(
    x: Tensor,
    exponent: int,
    symmetric: bool,
    rounding: Rounding,
    seed: int,
    out: Tensor | None,
    random_bits: int | None = None,
    values: Tensor | None = None,
) -> Written:
    """Write x * 2**-exponent, rounded and saturated, into the int16 tensor `out`, in one pass.

    `symmetric` leaves out -32768. `values`, in fp32, takes what the mantissas stand for, and what is not
    finite as it is; it may be x, and be asked for alone.
    """
    counts = array("q", (0,) * 4)
    cpu.loaded().lowp_write_int16(
        _mantissa_parameters(symmetric, rounding, random_bits),
        cpu.CARRIERS[x.dtype],
        cpu.address(x),
        exponent,
        None if out is None else cpu.address(out),
        None if values is None else cpu.address(values),
        x.numel(),
        seed & cpu.MASK,
        cpu.threads(),
        _address(counts),
    )
    return _written(*counts)


def from_int16(mantissas: Tensor, exponent: int, out: Tensor) -> None:
    """Write mantissas * 2**exponent into `out`, fp32: exact unless it leaves the range."""
    cpu.loaded().lowp_from_int16(cpu.address(mantissas), exponent, cpu.address(out), mantissas.numel(), cpu.threads())


def grid(x: Tensor, lowest: bool) -> tuple[float, int | None]:
    """Return the largest |x| of an fp32 tensor, and with `lowest` the exponent of the lowest bit that is set in it.

    The largest is infinite or NaN if one is. Bits below 2**-126 count as 2**-127; zeros have none, nor have tensors
    whose lowest bit was not asked for. The search for it ends where the bits are seen not to fit a mantissa of 16: then
    neither is final.
    """
    found = array("q", (0,) * 2)
    cpu.loaded().lowp_grid(cpu.address(x), x.numel(), lowest, cpu.threads(), _address(found))
    (maximum,) = _FP32.unpack(_WORD.pack(found[0]))
    return maximum, None if found[1] == 1000 else found[1] - 127


def exact_int16(x: Tensor, exponent: int, out: Tensor) -> int | None:
    """Write x * 2**-exponent, of fp32, into the int16 tensor `out` and return the largest |mantissa|.

    None where some element is no int16 under this exponent; `out` is then half written. Exponents from -100 to 100.
    """
    largest: int = cpu.loaded().lowp_exact_int16(cpu.address(x), exponent, cpu.address(out), x.numel(), cpu.threads())
    return None if largest < 0 else largest


class Rows(NamedTuple):
    """How elements lie in memory: rows of neighbours, one every `stride` elements."""

    rows: int
    columns: int
    stride: int


def is_int16(x: Tensor, mantissas: Tensor, exponent: int, lie: Rows) -> bool:
    """Whether every element of x, of fp32, is its mantissa * 2**exponent; both lie alike. Exponents -100 to 100."""
    return _same_int16(x, mantissas, lie, exponent, False, 0) == 0


def rounds_to_int16(x: Tensor, mantissas: Tensor, exponent: int, lie: Rows, symmetric: bool) -> float | None:
    """Return the largest |x| of an fp32 tensor if `to_int16` to nearest even would write these mantissas, or None.

    Both lie alike. Exponents from -100 to 100.
    """
    found = _same_int16(x, mantissas, lie, exponent, True, -32767 if symmetric else -32768)
    if found < 0:
        return None
    (maximum,) = _FP32.unpack(_WORD.pack(found))
    return float(maximum)


def _same_int16(x: Tensor, mantissas: Tensor, lie: Rows, exponent: int, rounded: bool, lowest: int) -> int:
    given = (cpu.address(x), cpu.address(mantissas), *lie, exponent, rounded, lowest, cpu.threads())
    found: int = cpu.loaded().lowp_same_int16(*given)
    return found


def step_int16(
    weight: Tensor, mantissas: Tensor, exponents: tuple[int, int, int], symmetric: bool
) -> tuple[Written, Written]:
    """Write what a step has changed of an fp32 weight, and the weight as the sum: each rounded once, to nearest even.

    `mantissas` are those of the weight before the step, and take the new ones; the weight takes their values. The
    exponents are those of the old mantissas, the update and the new weight. Returns what was seen of update and weight.
    """
    counts, given = array("q", (0,) * 8), array("i", exponents)
    lowest = -32767 if symmetric else -32768
    sizes = (lowest, weight.numel(), cpu.threads())
    cpu.loaded().lowp_step_int16(cpu.address(weight), cpu.address(mantissas), _address(given), *sizes, _address(counts))
    return _written(*counts[:4]), _written(*counts[4:])


def _written(largest: int, saturated: int, nonfinite: int, any_: int) -> Written:
    return Written(largest, saturated, nonfinite, bool(any_))


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


@functools.cache
def _mantissa_parameters(symmetric: bool, rounding: Rounding, random_bits: int | None) -> object:
    return cpu.parameters(Cast(IntFormat("int16", 16, symmetric), rounding, random_bits=random_bits))
