"""Means of squares of an optimizer under shared exponents: small ones are collected and written together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from lowp.casts import Cast
from lowp.exponents import SharedExponents
from lowp.exponents.table import SumEntry
from lowp.kernels.int16 import squares
from lowp.kernels.int16.cpu_int16 import Seen

__all__ = ["Squares"]

Site = TypeVar("Site")


class _Taken(NamedTuple, Generic[Site]):
    """A tensor to be written at a site, and its entry if it is written together with others."""

    tensor: Tensor
    site: Site
    entry: SumEntry | None


class Squares(Generic[Site]):
    """Collects tensors until `write`, which does what `alone` does to each in turn, with the same observations.

    The name of a site is its `str()`.
    """

    def __init__(self, exponents: SharedExponents, alone: Callable[[Tensor, Site], object]) -> None:
        self._exponents, self._alone = exponents, alone
        self._taken: dict[str, _Taken[Site]] = {}
        self._memory: set[int] = set()

    def take(self, x: Tensor, cast: Cast, site: Site) -> bool:
        """Take a tensor; False, with nothing done, at a second write of a step, which ends the step at all sites."""
        name = str(site)
        if name in self._taken or self._exponents.latest_exponent(cast, name) is not None:
            return False
        entry = self._exponents.square_entry(x, cast, name)
        if entry is not None:
            if x.data_ptr() in self._memory:
                self.write()
            self._memory.add(x.data_ptr())
        self._taken[name] = _Taken(x, site, entry)
        return True

    def write(self) -> None:
        """Write what was taken."""
        taken, self._taken, self._memory = self._taken, {}, set()
        seen = _written_together([(one.tensor, one.entry) for one in taken.values() if one.entry is not None])
        for name, (x, site, entry) in taken.items():  # noted in turn: the first fault is the one that is told
            if entry is None:
                self._alone(x, site)
            else:
                self._exponents.note(name, entry, seen.pop(0))


def _written_together(given: Sequence[tuple[Tensor, SumEntry]]) -> list[Seen]:
    """Write tensors under their entries, as many at once as caches hold; return what was seen of each."""
    parts: list[list[tuple[Tensor, SumEntry]]] = []
    elements = squares.TOGETHER
    for x, entry in given:
        if elements + x.numel() > squares.TOGETHER:
            parts.append([])
            elements = 0
        parts[-1].append((x, entry))
        elements += x.numel()
    seen: list[Seen] = []
    for part in parts:
        exponents = [entry.exponent for _, entry in part]
        seen += squares.write_([x for x, _ in part], part[0][1].table.cast, exponents)
    return seen
