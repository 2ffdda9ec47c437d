"""Updates of weights: how large each one is beside its weight, which decides in any format whether it is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.kernels.steps.spectra import LOWEST_UPDATE, LOWEST_WEIGHT, ROWS, count_updates

__all__ = ["GROWS", "LOWEST_UPDATE", "LOWEST_WEIGHT", "SHRINKS", "SHRINKS_FROM_POWER", "Updates"]

GROWS, SHRINKS, SHRINKS_FROM_POWER = range(3)
_SHAPE = (ROWS, ROWS, 3)


@dataclass(frozen=True, eq=False)
class Updates:
    """Applied updates of a tensor of weights: learning rate, momentum and decay included. ``a + b`` is both together.

    `joint`: int64 [96, 96, 3]; how many weights with exponent `LOWEST_WEIGHT` + i (the first row: smaller ones, and
    zeros) had an update with exponent `LOWEST_UPDATE` + j that made them grow, shrink, or shrink from a power of two,
    below which numbers lie twice as close. `none` counts weights whose update was zero although their gradient was not;
    `gradient_energy`: fp64 [96], the squares of the gradients of the weights in each row.
    """

    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros(_SHAPE, np.int64))
    gradient_energy: NDArray[np.float64] = field(default_factory=lambda: np.zeros(ROWS))
    none: int = 0
    count: int = 0

    @classmethod
    def of(cls, weight: Tensor, update: Tensor, gradient: Tensor | None) -> Updates:
        """The updates of one step; `weight` is what it was before."""
        joint, energy, none = count_updates(weight, update, gradient)
        return cls(joint, energy, none, weight.numel())

    def __add__(self, other: Updates) -> Updates:
        if not isinstance(other, Updates):
            return NotImplemented
        return Updates(
            self.joint + other.joint,
            self.gradient_energy + other.gradient_energy,
            self.none + other.none,
            self.count + other.count,
        )

    @property
    def present(self) -> int:
        """How many updates were not zero."""
        return int(self.joint.sum())

    def largest(self) -> int | None:
        """The exponent of the largest update; None where all were zero."""
        columns = np.flatnonzero(self.joint.sum((0, 2)))
        return int(columns[-1]) + LOWEST_UPDATE if len(columns) else None

    def ratios(self) -> dict[int, int]:
        """How many updates are 2^-k times their weight, by k, both sizes rounded down to powers of two."""
        rows, columns = np.indices(_SHAPE[:2])
        ratio = (rows + LOWEST_WEIGHT) - (columns + LOWEST_UPDATE)
        counts = self.joint.sum(2)
        return {int(k): int(counts[ratio == k].sum()) for k in np.unique(ratio[counts > 0])}

    def document(self) -> dict[str, Any]:
        """The updates as plain data: [row, column, kind, count] of each cell that is not empty, in one list."""
        places = np.argwhere(self.joint)
        cells = np.column_stack((places, self.joint[tuple(places.T)])) if len(places) else places
        return {
            "cells": cells.reshape(-1).tolist(),
            "gradient_energy": self.gradient_energy.tolist(),
            "none": self.none,
            "count": self.count,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Updates:
        """The updates that `document` wrote; raises InvalidInput for anything else."""
        try:
            joint = np.zeros(_SHAPE, np.int64)
            cells = np.asarray(document["cells"], np.int64).reshape(-1, 4)
            joint[tuple(cells[:, :3].T)] = cells[:, 3]
            energy = np.asarray(document["gradient_energy"], np.float64)
            none, count = int(document["none"]), int(document["count"])
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise InvalidInput(f"it contains invalid updates: {error!r}") from None
        if energy.shape != (ROWS,) or np.min(joint) < 0:
            raise InvalidInput("it contains invalid updates: their counts are not those of numbers")
        return cls(joint, energy, none, count)
