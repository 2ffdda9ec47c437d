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
        # pictures are decoded, and weights drawn, a little differently elsewhere
        rel, least = (0.1, 1e-6) if line.startswith("starts") else (1e-4, 10.0) if "x3x" in line else (2e-3, 2e-3)
        rel, least = (1e-8, 1e-4) if "int64" in line else (rel, least)
        assert numbers(line) == pytest.approx(numbers(wanted), rel=rel, abs=least), f"{line!r} is not {wanted!r}"


def test_every_recipe_is_listed() -> None:
    assert list(LISTED) == list(CASES)
