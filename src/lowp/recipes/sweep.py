"""A sweep over a grid of floating-point formats eXmY, which shows the effects of exponent bits and mantissa bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lowp import formats
from lowp.errors import InvalidInput
from lowp.recipes.comparison import Study, mean, variants_of
from lowp.recipes.training import Settings

_EXAMPLE = "exponent=3..8,mantissa=2..10"


class Grid(NamedTuple):
    """The numbers of exponent bits and mantissa bits of a grid of formats, and whether these have subnormal numbers.

    With subnormal numbers a mantissa bit extends the range too: it halves the smallest number.
    """

    exponents: tuple[int, ...]
    mantissas: tuple[int, ...]
    subnormals: bool = True

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Parse ``exponent=3..8,mantissa=2..10``; a range can be one number, and ``,subnormals=no`` can follow.

        Raises InvalidInput for other text, and for formats that do not exist.
        """
        ranges: dict[str, tuple[int, ...]] = {}
        subnormals = True
        for part in text.split(","):
            name, _, value = part.partition("=")
            name = name.strip().lower()
            if name == "subnormals" and value.strip().lower() in ("yes", "no"):
                subnormals = value.strip().lower() == "yes"
                continue
            match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", value)
            if name not in ("exponent", "mantissa") or match is None or name in ranges:
                raise InvalidInput(f"sweep {text!r}: {part!r} is not understood; give both ranges, as in {_EXAMPLE}")
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last:
                raise InvalidInput(
                    f"sweep {text!r}: {part.strip()} has its larger end first; did you mean {name}={last}..{first}?"
                )
            ranges[name] = tuple(range(first, last + 1)) if last - first < 100 else (first, last)
        missing = [name for name in ("exponent", "mantissa") if name not in ranges]
        if missing:
            raise InvalidInput(f"sweep {text!r}: {missing[0]} is missing; give both ranges, as in {_EXAMPLE}")
        grid = cls(ranges["exponent"], ranges["mantissa"], subnormals)
        if grid.exponents[0] < 2 or grid.exponents[-1] > 8:
            raise InvalidInput(f"sweep {text!r}: a sweep takes 2 to 8 exponent bits, as in {_EXAMPLE}")
        if grid.mantissas[-1] > 23:
            raise InvalidInput(f"sweep {text!r}: a sweep takes at most 23 mantissa bits, as fp32 has, as in {_EXAMPLE}")
        for exponent in grid.exponents:
            for mantissa in grid.mantissas:
                try:
                    formats.parse(grid.name(exponent, mantissa))
                except InvalidInput as error:
                    raise InvalidInput(f"sweep {text!r}: {error}") from None
        return grid

    def name(self, exponent: int, mantissa: int) -> str:
        """Return the name of the format with these numbers of bits."""
        return f"e{exponent}m{mantissa}{'' if self.subnormals else 'ftz'}"


class Sweep(Study):
    """A study of fp32 and the formats of a grid, without a loss scale unless the settings have one.

    A dynamic loss scale would compensate for missing exponent bits, whose effect the grid shows.
    """

    def __init__(self, settings: Settings, grid: Grid, seeds: Sequence[int]) -> None:
        self.grid = grid
        names = [grid.name(exponent, mantissa) for exponent in grid.exponents for mantissa in grid.mantissas]
        rows = variants_of(replace(settings, loss_scale=settings.loss_scale or "none"), names)
        super().__init__(rows, seeds, kind="sweep", samples=0)

    def document(self) -> dict[str, Any]:
        """Return the study's document with the grid and, if it is complete, the effect of each axis on the metric."""
        document = super().document()
        cells = {row["label"]: row for row in document["variants"]}
        metric = self.recipe.metric.name

        def value(exponent: int, mantissa: int) -> float | None:
            statistics = cells[self.grid.name(exponent, mantissa)].get("statistics")
            return None if statistics is None else statistics[metric]["mean"]

        rows = [[value(exponent, mantissa) for mantissa in self.grid.mantissas] for exponent in self.grid.exponents]
        document["grid"] = {
            "exponent_bits": self.grid.exponents,
            "mantissa_bits": self.grid.mantissas,
            "subnormals": self.grid.subnormals,
            "values": rows,
        }
        if document["complete"]:
            columns = list(zip(*rows, strict=True))
            document["grid"]["effect_of_exponent"] = _effect(rows)
            document["grid"]["effect_of_mantissa"] = _effect(columns)
        return document


def _effect(lines: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return the mean of each line, and the difference of the largest and the smallest mean."""
    means = [mean([value for value in line if value is not None]) for line in lines]
    return {"means": means, "spread": max(means) - min(means)}
