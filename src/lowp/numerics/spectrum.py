"""Spectra of tensors and of updates: where numbers are, and how many bits they need. Mergeable, and plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.kernels.steps.spectra import (
    LONGEST,
    LOWEST_UPDATE,
    LOWEST_WEIGHT,
    PARTS,
    ROWS,
    TensorCounts,
    count_tensor,
    count_updates,
)

__all__ = ["LOWEST_UPDATE", "LOWEST_WEIGHT", "PARTS", "ROWS", "Spectrum", "Updates", "place_of"]
_BINS = 256 * PARTS
_BIAS = 127

Counts = NDArray[np.int64]


def _zeros(length: int) -> Counts:
    return np.zeros(length, np.int64)


def place_of(size: float) -> float:
    """The bins below a size of 0 or more, with the part of the one that it lies in; in the last are no numbers."""
    if size < 2.0**-126:  # where the bins are equally wide
        return math.ldexp(size, 126) * PARTS
    fraction, exponent = math.frexp(size)
    return min((exponent + 125 + 2 * fraction) * PARTS, _BINS - PARTS)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """How many numbers of a tensor are in each 32nd of an octave. ``a + b`` is that of both together.

    `bins`: int64 [8192]; bin 32 (e + 127) + i counts the numbers with 2^e (1 + i/32) <= |x| < 2^e (1 + (i + 1)/32), the
    first 32 everything below 2^-126 but zeros, the last 32 nothing. `significant`: int64 [25]; how many numbers need so
    many bits of significand, the leading one included. `powers`: int64 [256]; bin e + 127 counts the numbers that are
    2^e, down to 2^-126. `maximum` is the largest finite |x|, `sum_squares` the energy of the finite numbers, `tensors`
    how many were added up.
    """

    bins: Counts = field(default_factory=lambda: _zeros(_BINS))
    significant: Counts = field(default_factory=lambda: _zeros(LONGEST + 1))
    powers: Counts = field(default_factory=lambda: _zeros(256))
    count: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    maximum: float = 0.0
    sum_squares: float = 0.0
    tensors: int = 0

    @classmethod
    def of(cls, x: Tensor, scale: float = 1.0) -> Spectrum:
        """The spectrum of a floating-point tensor divided by `scale`, as fp32 holds its numbers."""
        return cls.from_counts(count_tensor(x, scale), x.numel())

    @classmethod
    def from_counts(cls, seen: TensorCounts, count: int) -> Spectrum:
        """The spectrum of a tensor of `count` numbers that has been counted."""
        numbers = (seen.zeros, seen.nan, seen.inf, seen.maximum, seen.sum_squares)
        return cls(seen.bins, seen.significant, seen.powers, count, *numbers, 1)

    def __add__(self, other: Spectrum) -> Spectrum:
        sums = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        return Spectrum(**{**sums, "maximum": max(self.maximum, other.maximum)})

    # -- what can be asked ------------------------------------------------------------------------------------------
    @cached_property
    def octaves(self) -> Counts:
        """int64 [256]: bin e + 127 counts the numbers with floor(log2 |x|) = e."""
        counts: Counts = self.bins.reshape(256, PARTS).sum(1)
        return counts

    @property
    def nonzero(self) -> int:
        """How many numbers are finite and not zero."""
        return int(self.bins.sum())

    @property
    def nonfinite(self) -> int:
        """How many are infinite or NaN."""
        return self.nan + self.inf

    @property
    def lowest(self) -> int | None:
        """The exponent of the smallest number that is not zero; None where there is none."""
        present = np.flatnonzero(self.octaves)
        return int(present[0]) - _BIAS if len(present) else None

    @property
    def highest(self) -> int | None:
        """The exponent of the largest finite number; None where all are zero."""
        return math.frexp(self.maximum)[1] - 1 if self.maximum else None

    @property
    def root_mean_square(self) -> float:
        """The root of the mean square of the finite numbers; 0 where there is none."""
        finite = self.count - self.nonfinite
        return math.sqrt(self.sum_squares / finite) if finite else 0.0

    def below(self, exponent: int) -> int:
        """How many numbers that are not zero are below 2^exponent."""
        return int(self.octaves[: max(exponent + _BIAS, 0)].sum())

    def from_size(self, size: float) -> Spectrum:
        """The same without the numbers below `size`, to the bin: they count as zeros, and `significant` as it was."""
        if not size > 0:
            return self
        place, bins, powers = place_of(size), self.bins.copy(), self.powers.copy()
        bins[: int(place)] = 0
        powers[: math.ceil(place / PARTS)] = 0
        zeros = self.zeros + self.nonzero - int(bins.sum())
        return replace(self, bins=bins, powers=powers, zeros=zeros, maximum=self.maximum if bins.any() else 0.0)

    def scaled(self, scale: float) -> Spectrum:
        """The spectrum of the tensor times `scale`, which is above zero: exact for a power of two, else to the bin."""
        filled = slice(_BINS - PARTS)  # a bin has the first 14 bits of fp32 in common; in the last are none
        centres = ((np.arange(_BINS, dtype=np.int32)[filled] << 18) + (1 << 17)).view(np.float32)
        with np.errstate(over="ignore"):
            places = np.minimum(centres * np.float32(scale), np.finfo(np.float32).max).view(np.int32) >> 18
        bins, powers = _zeros(_BINS), _zeros(256)
        np.add.at(bins, places, self.bins[filled])
        if math.frexp(scale)[0] == 0.5:
            np.add.at(powers, places[::PARTS] // PARTS, self.powers[:-1])
        largest, energy = self.maximum * scale, self.sum_squares * scale * scale
        return replace(self, bins=bins, powers=powers, maximum=largest, sum_squares=energy)

    # -- JSON -------------------------------------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        """The spectrum as plain data: the bins from the first that is not empty to the last."""
        return {
            "first_bin": int((self.bins != 0).argmax()),
            "bins": np.trim_zeros(self.bins).tolist(),
            "significant": self.significant.tolist(),
            "powers": [[int(place), int(self.powers[place])] for place in np.flatnonzero(self.powers)],
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Spectrum:
        """The spectrum that `document` wrote; raises InvalidInput for anything else."""
        try:
            bins, first = _zeros(_BINS), document["first_bin"]
            given = np.asarray(document["bins"], np.int64).flatten()
            bins[first : first + len(given)] = given
            if not 0 <= first <= _BINS - len(given):
                raise ValueError("its bins lie outside")
            significant = np.asarray(document["significant"], np.int64)
            powers = _zeros(256)
            for place, number in document["powers"]:
                powers[place] = number
            numbers = {name: float(document[name]) if name in _REALS else int(document[name]) for name in _NUMBERS}
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"it contains an invalid spectrum: {error!r}") from None
        counts = (*numbers.values(), np.min(bins), np.min(powers))
        if significant.shape != (LONGEST + 1,) or any(not number >= 0 for number in counts):
            raise InvalidInput("it contains an invalid spectrum: its counts are not those of numbers")
        return cls(bins, significant, powers, **numbers)  # type: ignore[arg-type]


# -- updates -----------------------------------------------------------------------------------------------------------
_REALS = ("maximum", "sum_squares")
_NUMBERS = ("count", "zeros", "nan", "inf", *_REALS, "tensors")


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
        return Updates(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def present(self) -> int:
        """How many updates were not zero."""
        return int(self.joint.sum())

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
            "cells": cells.flatten().tolist(),
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
