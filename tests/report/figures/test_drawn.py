"""Every figure has its lines, bars and words at their places, as `drawn.txt` lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.figures.drawn import CASES, picture

LISTED = dict(
    part.split("\n", 1) for part in (Path(__file__).parent / "drawn.txt").read_text(encoding="utf-8").split("## ")[1:]
)


@pytest.mark.parametrize("name", CASES)
def test_a_picture_has_each_number_at_its_place(name: str) -> None:
    assert picture(name).splitlines() == LISTED[name].splitlines()


def test_every_picture_is_listed() -> None:
    assert list(LISTED) == list(CASES)
