"""The lines that a profile prints."""

from __future__ import annotations

import pytest

from lowp.numerics.record import Record
from lowp.report.profile import headline


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"max_overhead": 0.03, "overhead": 0.025, "own_seconds": 9.0, "allowance": 0.25}, "overhead 2.5 %"),
        (
            {"max_overhead": 0.03, "overhead": 0.858, "own_seconds": 0.271, "allowance": 0.25, "looks": 5.0},
            "overhead 0.27 s, above 0.25 s and 3 % of the run",
        ),
        (
            {"max_overhead": 0.03, "overhead": 1.341, "own_seconds": 0.182, "allowance": 0.25, "looks": 5.0},
            "overhead 0.18 s, of 0.25 s allowed",
        ),
        (
            {"max_overhead": 0.03, "overhead": 0.5, "own_seconds": 2.0, "allowance": 0.0, "looks": 1.0},
            "overhead 50.0 %, above 3 %: a single recording costs that much here",
        ),
        (
            {"max_overhead": 0.03, "overhead": 0.04, "own_seconds": 2.0, "allowance": 0.0, "looks": 2.5},
            "overhead 4.0 %, above 3 %",
        ),
        ({"max_overhead": None, "overhead": 0.4, "own_seconds": 2.0}, "overhead 40.0 %"),
    ],
)
def test_an_overhead_above_the_share_is_told_beside_the_budget(sampling: dict[str, float], told: str) -> None:
    assert headline(Record({"title": "a model"}, sampling=dict(sampling))).split(" · ")[-1] == told
