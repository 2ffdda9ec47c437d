"""Autoflex in the C++ library: all entries of a table updated from the writes of a step, in one call.

It is defined by `lowp.scaling.Autoflex.observe` and `lowp.exponents.ExponentTable`, in about sixty torch operations.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from torch import Tensor

from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.cpu.abi import autoflex_parameters
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.scaling import Autoflex

__all__ = ["MOST_WINDOW", "observe", "observes"]

MOST_WINDOW = 256  # kMostWindow in cpu/predictions.cpp


def observes(scaling: object) -> TypeGuard[Autoflex]:
    """Whether `observe` supports a scaling."""
    return isinstance(scaling, Autoflex) and scaling.window <= MOST_WINDOW and uses_library()


def observe(scaling: Autoflex, columns: Sequence[Tensor], written: Iterable[tuple[int, Seen]]) -> None:
    """Observe writes, by entry, and update the predictions in place.

    `columns` are contiguous CPU tensors with one row per entry: those of `AutoflexState` in order, the exponent of the
    previous write (int32), and the counts raises_needed, raises_in_time, headroom_sum and measured (fp64).
    """
    numbers = array("i")
    for entry, (mantissa, nonfinite, vanished, *_) in written:
        numbers.extend((entry, mantissa, bool(nonfinite) + 2 * bool(vanished)))
    cpu.loaded().lowp_autoflex_observe(autoflex_parameters(scaling), [*columns], numbers, len(numbers) // 3)
