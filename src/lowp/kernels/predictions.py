"""Autoflex by the C++ library: all that the writes of a step teach the entries of a table, in one call.

`lowp.scaling.Autoflex.observe` and `lowp.exponents.ExponentTable` define it, in some sixty operations of torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeGuard

from torch import Tensor

from lowp.kernels import cpu
from lowp.kernels.abi import autoflex_parameters
from lowp.kernels.cpu_int16 import Seen
from lowp.kernels.dispatch import uses_library
from lowp.scaling import Autoflex

__all__ = ["observe", "observes"]

_MOST_WINDOW = 256  # kMostWindow in cpu/predictions.cpp


def observes(scaling: object) -> TypeGuard[Autoflex]:
    """Whether `observe` does what a scaling asks for."""
    return isinstance(scaling, Autoflex) and scaling.window <= _MOST_WINDOW and uses_library()


def observe(scaling: Autoflex, columns: Sequence[Tensor], written: Iterable[tuple[int, Seen]]) -> None:
    """Observe writes, by entry, and predict anew, in place.

    `columns` are contiguous CPU tensors, a row an entry: those of `AutoflexState` in their order, the exponent of the
    write before (int32), and the counts raises_needed, raises_in_time, headroom_sum and measured (fp64).
    """
    numbers = array("i")
    for entry, seen in written:
        numbers.extend((entry, seen.mantissa, bool(seen.nonfinite) + 2 * bool(seen.vanished)))
    table = array("Q", [column.data_ptr() for column in columns])
    given = table.buffer_info()[0], numbers.buffer_info()[0], len(numbers) // 3
    cpu.loaded().lowp_autoflex_observe(autoflex_parameters(scaling), *given)
