"""`lowp figure`: pictures from a real run, and their numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowp.cli.figure import FIGURES

Lowp = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_autoflex_draws_three_tensors_step_by_step(lowp: Lowp, folder: Path) -> None:
    result = lowp("figure", "autoflex", "--steps", "30", "--out", "a.svg")
    assert (result.code, result.out) == (0, "written: a.json, a.svg\n")
    assert (folder / "a.svg").read_text().count("<path") > 20
    document = json.loads((folder / "a.json").read_text())
    assert document["kind"] == "figure-autoflex" and document["layer"] == "0"
    assert {name: one["place"] for name, one in document["series"].items()} == {
        "weights": "weight of 0.weight",
        "activations": "output of 0 linear",
        "updates": "update of 0.weight",
    }
    for series in document["series"].values():
        assert len(series["step"]) >= 30
        assert all(0 < mantissa <= 32768 for mantissa in series["mantissa"])
        assert all(-31 <= exponent <= 0 for exponent in series["exponent"])
        # after the first writes the prediction is above what is written, nearly always
        known = [row for row in zip(series["predicted"], series["mantissa"], series["exponent"], strict=True) if row[0]]
        assert sum(chi >= mantissa * 2.0**exponent for chi, mantissa, exponent in known) > 0.9 * len(known)


def test_flex_window_draws_histograms_of_two_moments(lowp: Lowp, folder: Path) -> None:
    result = lowp("figure", "flex-window", "--steps", "20", "--layer", "2", "--out", "w.png")
    assert (result.code, result.out) == (0, "written: w.json, w.png\n")
    assert (folder / "w.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "w.json").read_text())
    for window in document["windows"].values():
        for moment in ("first", "last"):
            found = window[moment]
            assert sum(found["counts"]) == found["elements"] - found["zeros"] > 0
            assert 0 <= found["below_unit"] < 0.2 and 0 <= found["below_maximum"] < 0.2
            assert found["exponents"][0] <= found["exponents"][1]
    assert document["windows"]["weights"]["first"]["elements"] == 2 * 128 * 10


def test_the_figures_are_listed(lowp: Lowp) -> None:
    out = lowp("figure", "--list").out
    assert all(name in out for name in FIGURES)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("autoflx",), "unknown figure 'autoflx'; did you mean autoflex?"),
        (("autoflex", "--steps", "0"), "--steps 0: give 1 or more"),
        (("autoflex", "--precision", "bf16"), "bf16 has no shared exponents that are predicted: use flex16+5"),
        (("autoflex", "--steps", "1", "--layer", "7"), "unknown layer '7'; allowed: 0, 2"),
        (("autoflex", "--out", "a.bmp"), "unknown kind of picture '.bmp'"),
    ],
)
def test_what_cannot_be_drawn_is_said(lowp: Lowp, folder: Path, arguments: tuple[str, ...], text: str) -> None:
    result = lowp("figure", *arguments)
    assert (result.code, result.out) == (2, "") and text in result.err
    assert list(folder.iterdir()) == []
