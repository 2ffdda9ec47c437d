"""Every recipe is made of the numbers that `described.txt` lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recipes.described import CASES, described

LISTED = dict(
    part.split("\n", 1)
    for part in (Path(__file__).parent / "described.txt").read_text(encoding="utf-8").split("## ")[1:]
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w.])")


def numbers(line: str) -> list[float]:
    return [float(one) for one in NUMBER.findall(line)]


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_has_the_data_the_model_and_the_training_that_are_listed(name: str) -> None:
    lines, listed = list(described(name)), LISTED[name].splitlines()
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in listed]
    for line, wanted in zip(lines, listed, strict=True):
        assert numbers(line) == pytest.approx(numbers(wanted), **tolerance(line)), f"{line!r} is not {wanted!r}"


def tolerance(line: str) -> dict[str, float]:
    """Return how far numbers may be apart: pictures are decoded, and weights drawn, a little differently elsewhere."""
    if line.startswith("starts"):
        return {"rel": 0.1, "abs": 1e-6}
    if "int64" in line:
        return {"rel": 1e-8, "abs": 1e-4}
    if "x3x" in line or "x28x28" in line:
        return {"rel": 1e-4, "abs": 10.0}
    return {"rel": 2e-5, "abs": 1e-3} if "as it is" in line or "at random" in line else {"rel": 2e-3, "abs": 2e-3}


def test_every_recipe_is_listed() -> None:
    assert list(LISTED) == list(CASES)
