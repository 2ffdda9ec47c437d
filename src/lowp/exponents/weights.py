"""The steps of weights that hold values of the format: written all at once, statistics in the same pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lowp.exponents.table import ExponentTable
from lowp.kernels.int16.cpu_int16 import is_direct
from lowp.kernels.int16.lists import OpenSteps
from lowp.kernels.int16.mantissas import Mantissas

__all__ = ["WeightSteps"]


class WeightSteps(NamedTuple):
    """Weights before a step, and the entries of their updates and of themselves."""

    table: ExponentTable
    steps: OpenSteps
    entries: list[tuple[int, int]]

    @classmethod
    def begin(
        cls, table: ExponentTable, weights: Sequence[Tensor], sites: Sequence[tuple[str, str]]
    ) -> WeightSteps | None:
        """Return the steps to come of those weights that can be written so; None if there are none.

        `sites` are those of update and weight. Others have to be looked at first: at a first write, after another write
        in this step, and where a weight is not in the format under its exponent, or may not fit.
        """
        if not table.is_plain or len({site for pair in sites for site in pair}) < 2 * len(sites):
            return None
        ready: list[tuple[Tensor, tuple[int, int]]] = []
        for weight, (update_site, weight_site) in zip(weights, sites, strict=True):
            update, own = table.names.get(update_site), table.names.get(weight_site)
            if update is None or own is None or not (table.started[update] and table.started[own]):
                continue
            if not (update in table.pending or own in table.pending) and is_direct(weight):
                ready.append((weight, (update, own)))
        found = cls._of(table, ready)
        if found is None or all(fits := found.steps.fits(table.scaling.limit)):
            return found
        return cls._of(table, [one for one, does_fit in zip(ready, fits, strict=True) if does_fit])

    @classmethod
    def _of(cls, table: ExponentTable, ready: Sequence[tuple[Tensor, tuple[int, int]]]) -> WeightSteps | None:
        entries = [pair for _, pair in ready]
        steps = OpenSteps([one for one, _ in ready], [table.exponents[own] for _, own in entries]) if ready else None
        return None if steps is None else cls(table, steps, entries)

    def write(self) -> list[int] | None:
        """Write updates and weights in place; return the entries of those that are not finite.

        None, with nothing done, where the step has moved a weight to other memory.
        """
        table, exponents = self.table, self.table.exponents
        seen = self.steps.write([(exponents[update], exponents[weight]) for update, weight in self.entries], table.cast)
        if seen is None:
            return None
        bad = []
        for pair, both in zip(self.entries, seen, strict=True):
            for index, one in zip(pair, both, strict=True):
                table.note(index, one)
                if one.nonfinite:
                    bad.append(index)
        return bad

    @property
    def weights(self) -> Sequence[Tensor]:
        """The weights that are written."""
        return self.steps.weights

    @property
    def mantissas(self) -> list[Mantissas]:
        """The mantissas of each weight before the step."""
        return self.steps.mantissas
