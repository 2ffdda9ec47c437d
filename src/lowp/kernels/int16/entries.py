"""Entries of a table of shared exponents: tensors written under them, and what was seen of each, on every device.

A table is columns with one number an entry, tensors of a device, which the C++ library and Triton's kernels read by
their pointers: the host is told what it asks for, and keeps no copy. What was seen of an entry since the last step is a
row of `WORDS` int64: the largest |mantissa| of what is finite, 0 .. 32768; finite elements that did not fit; elements
that would not fit under half the unit, where a scaling counts them; the elements; and flags, in bytes: whether anything
is not finite, whether anything is NaN, and whether all nonzero values became zero. `lowp.exponents` owns tables.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import by_triton
from lowp.kernels.cpu.abi import TYPE_NUMBERS, table_block
from lowp.kernels.int16.cpu_int16 import Seen, mantissa_block
from lowp.kernels.int16.mantissas import values, written
from lowp.scaling import Autoflex, WritesSeen

WORDS = 8  # of a row, int64; kWords in cpu/exponents.hpp, and in triton/mantissas
LARGEST, OVERFLOWED, CROWDED, ELEMENTS, FLAGS = 0, 1, 2, 5, 6
_NONFINITE, _NAN, _VANISHED = (8 * FLAGS + place for place in range(3))  # bytes
MOST_MANTISSA = 1 << 29  # that is noted of a single number beyond the entry's exponent, in its units
MOST_WINDOW = 256  # kMostWindow in cpu/exponents.cpp
VALUES, TWO_WORDS, ROOTS, UNLESS_EXACT = 0, 1, 2, 3  # how a tensor is written: `How` in cpu/exponents.cpp
_LOW_BITS = 14  # of a second word, as in `low_words`
_ROW = Struct("9q")  # of `lowp_write_entries`
_APART = 32  # elements: each payload of a block begins at a multiple of 64 bytes


# -- by the C++ library -----------------------------------------------------------------------------------------------


def block_of(scaling: Autoflex, crowds: bool, columns: Sequence[Tensor | None]) -> object:
    """Return a pointer to the description of a table on a CPU, to be made anew when its columns are others.

    The columns are in the order of `lowp_table` in cpu/exponents.hpp. `crowds`: crowded elements are counted.
    """
    return table_block(scaling, crowds, cpu.numbers_of(columns), columns)


def write(
    table: object, cast: Cast, index: int, x: Tensor, payload: Tensor, values: Tensor, how: int = VALUES
) -> tuple[Tensor, int]:
    """Write x under an entry, which begins with it if it has not: its mantissas and its values, which may overwrite it.

    All lie alike, dense. What is not finite stays as it is. Returns the exponent, which of a single number is one that
    holds it, and whether anything is not finite: 1. Mantissas and values are those of `mantissas_and_values`.
    UNLESS_EXACT leaves fp32 that is in the format under its own exponent: returned are that, and -1.
    """
    exponent = torch.empty((), dtype=torch.int32, device="cpu")
    at, to, under, mantissas = cpu.addresses_of((x, values, exponent, payload))
    row = _ROW.pack(index, how, TYPE_NUMBERS[x.dtype], at, mantissas, to, x.numel(), 0, under)
    call = cpu.loaded().lowp_write_entries.unguarded  # type: ignore[attr-defined]
    return exponent, call(table, mantissa_block(cast), row, 1, torch.get_num_threads())


def write_in_place(
    table: object, cast: Cast, given: Sequence[tuple[Tensor, int, int]], steps: Steps | None = None
) -> Sequence[int]:
    """Write `steps`, and fp32 tensors that `memory_of` finds, in place, each under its entry: all in one call.

    `given`: each tensor, its entry and how it is written. VALUES: as values of the format. TWO_WORDS: as the sum of two
    words, the second 14 places lower; what is not finite becomes NaN. ROOTS: as squares of values of the format, of
    which none but those of zeros vanishes; NaN also stands for the root of a negative number. Returns the entries.
    """
    rows, tensors, places = array("q"), [x for x, *_ in given], [index for _, index, _ in given]
    for (x, index, how), at in zip(given, cpu.addresses_of(tensors), strict=True):
        rows.extend((index, how, 0, at, 0, at, x.numel(), _LOW_BITS, 0))
    held = (None, 0, None) if steps is None else (steps.rows, len(steps.weights), steps.told)
    cpu.loaded().lowp_end_entries(table, mantissa_block(cast), *held, rows or None, len(given), torch.get_num_threads())
    if steps is not None:
        tensors += steps.weights
        places += steps.rows[::5] + steps.rows[1::5]
    torch.autograd.graph.increment_version(tensors)
    return places


def observe(table: object, entries: Iterable[int]) -> None:
    """Observe what was seen of entries of Autoflex, predict their exponents and forget it: `Autoflex.observe`."""
    numbers = array("q", entries)
    cpu.loaded().lowp_observe_entries(table, numbers, len(numbers))


def met(table: object, count: int) -> tuple[bool, bool]:
    """Whether anything that was written in this step is not finite, and whether a finite number did not fit."""
    found = cpu.loaded().lowp_met_in_entries(table, count)
    return found & 1 != 0, found & 2 != 0


class Steps:
    """Weights in the format before an optimizer's step, as mantissas, for `write_in_place` after it.

    `entries` are those of update and weight: what the step has changed is written under the first, the weight, as the
    sum, under the second. Weights that have to be looked at first are left out: where an entry has not begun, or a
    weight is not in the format under its exponent, or may not fit.
    """

    def __init__(self, table: object, weights: Sequence[Tensor], entries: Sequence[int]) -> None:
        begins = [0]
        for one in weights:
            begins.append(begins[-1] + -(-one.numel() // _APART) * _APART)
        memory = torch.empty(begins[-1], dtype=torch.int16, device="cpu")
        start, given, told = memory.data_ptr(), array("q"), array("q", bytes(16 * len(weights)))
        for place, (one, at) in enumerate(zip(weights, cpu.addresses_of(weights), strict=True)):
            payload = start + memory.element_size() * begins[place]
            given.extend((*entries[2 * place : 2 * place + 2], at, payload, one.numel()))
        cpu.loaded().lowp_hold_entries(table, given, len(weights), torch.get_num_threads(), told)
        if not all(told[1::2]):
            kept = [place for place, fits in enumerate(told[1::2]) if fits]
            told = array("q", [number for place in kept for number in told[2 * place : 2 * place + 2]])
            given = array("q", [number for place in kept for number in given[5 * place : 5 * place + 5]])
            weights, begins = [weights[place] for place in kept], [begins[place] for place in kept]
        self.weights, self._begins = weights, begins
        self.rows, self.told, self._memory = given, told, memory

    def have_moved(self) -> bool:
        """Whether a weight lies elsewhere in memory than before the step."""
        return [one.data_ptr() for one in self.weights] != list(self.rows[2::5])

    @property
    def before(self) -> list[Tensor]:
        """The values of each weight before the step."""
        return [
            values(self._memory[begin : begin + weight.numel()].view(weight.shape), exponent)
            for weight, begin, exponent in zip(self.weights, self._begins, self.told[::2], strict=False)
        ]


# -- anywhere ---------------------------------------------------------------------------------------------------------


class Write(NamedTuple):
    """A write of which the host knows nothing: values in fp32, what was seen, and the exponent of the values."""

    values: Tensor
    record: Tensor
    exponent: Tensor


def write_unread(
    x: Tensor, cast: Cast, exponents: Tensor, index: int, when: Tensor | None = None, otherwise: Tensor | None = None,
    row: Tensor | None = None,
) -> Write:  # fmt: skip
    """Return x as values of the format in fp32 under `exponents[index]`, int32, without waiting for a device.

    Where `when`, 0-d bool, does not hold, the values are those of x, the exponent is `otherwise`, if one is given, and
    what was seen is nothing. What is not finite stays as it is. `row`, zeros, takes what was seen. `write` does this
    by the C++ library.
    """
    if by_triton(x):
        from lowp.kernels.triton import mantissas as kernels

        return Write(*kernels.write(x, cast, exponents, index, when, otherwise, row))
    exponent = exponents[index].clone()
    _, values, record = written(x, cast, exponent)
    if when is not None:
        values = torch.where(when, values, x.float())
        record = record * when
        exponent = exponent if otherwise is None else torch.where(when, exponent, otherwise)
    return Write(values, record if row is None else row.copy_(record), exponent)


def record_of(seen: Seen, has_nan: bool = False) -> Tensor:
    """Return what the host has seen of a write, as a row."""
    flags = bool(seen.nonfinite) + (has_nan << 8) + (bool(seen.vanished) << 16)
    row = [seen.mantissa, seen.overflowed, 0, 0, 0, seen.elements, flags, 0]
    return torch.tensor(row, dtype=torch.int64, device="cpu")


def joined(row: Tensor, more: Tensor) -> Tensor:
    """Return the row of two writes of a step at one entry: the larger maximum counts."""
    return torch.cat((torch.maximum(row[:1], more[:1]), row[1:FLAGS] + more[1:FLAGS], row[FLAGS:] | more[FLAGS:]))


def nonfinite_of(rows: Tensor) -> Tensor:
    """Whether anything that was written at each entry is not finite: bool[n]."""
    return rows.view(torch.int8)[:, _NONFINITE] != 0


def counts_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many elements of each entry did not fit, and how many there were: int64[n]."""
    return rows[:, OVERFLOWED], rows[:, ELEMENTS]


def observed(rows: Tensor, is_result: Tensor, written: Tensor | None) -> WritesSeen:
    """Return what was seen, by entry; of results, where infinities are ordinary values, only NaN is not finite."""
    flags = rows.view(torch.int8)
    nonfinite = torch.where(is_result, flags[:, _NAN], flags[:, _NONFINITE]) != 0
    mantissa = rows[:, LARGEST].to(torch.int32)
    seen = rows[:, OVERFLOWED], rows[:, CROWDED], rows[:, ELEMENTS]
    return WritesSeen(mantissa, written, nonfinite, flags[:, _VANISHED] != 0, *seen)
