"""The format of numbers, progress on a stream that is not a terminal, and heat maps."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

from lowp.errors import InvalidInput
from lowp.report import plots
from lowp.report.figures import curves, style
from lowp.report.tables import bytes_of, heat_map, number, points, seconds, sweep_words
from lowp.report.terminal import Bar, console


@pytest.mark.parametrize(("value", "shown"), [(2.5, "2.5 s"), (0.00425, "4.25 ms"), (4.2e-7, "0.42 µs")])
def test_a_time_has_its_unit(value: float, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**42, "4.1e+03 GiB")]
)
def test_a_size_has_its_unit(value: int, shown: str) -> None:
    assert bytes_of(value) == shown


def test_a_metric_that_is_a_share_is_in_percent() -> None:
    assert number(0.978, True) == "97.8%" and number(0.978, False) == "0.978"
    assert number(None, True) == number(math.nan, False) == "-"
    assert points(0.294, True) == "29.4 points" and points(0.294, False) == "0.294"


def grid_document(values: list[list[float | None]]) -> dict[str, object]:
    spreads = {"effect_of_exponent": {"spread": 0.1}, "effect_of_mantissa": {"spread": 0.6}}
    return {
        "recipe": {"name": "toy", "metric": "accuracy", "metric_is_share": True, "higher_is_better": True},
        "seeds": [0],
        "variants": [{"statistics": {"accuracy": {"mean": 0.9}}, "loss_scaling": "none"}],
        "grid": {"exponent_bits": [3, 4], "mantissa_bits": [2, 3], "subnormals": True, "values": values, **spreads},
    }


def test_a_heat_map_shows_each_cell_and_a_dash_where_nothing_is_known() -> None:
    stream = io.StringIO()
    console(stream).print(heat_map(grid_document([[0.1, 0.5], [0.9, None]])))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert ["e3", "10.0%", "50.0%"] in lines and ["e4", "90.0%", "-"] in lines


def test_the_conclusion_follows_the_numbers() -> None:
    words = sweep_words(grid_document([[0.1, 0.5], [0.9, 0.9]])).replace("\n", " ")
    assert "mantissa bits matter more than exponent bits here" in words and "60.0 points" in words


def test_a_picture_of_a_grid_has_shares_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    for is_share in (True, False):
        document: dict[str, Any] = grid_document([[0.125, 0.5], [0.875, None]])
        document["recipe"]["metric_is_share"] = is_share
        curves.grid(document, Path("none.png"))
    texts = [[text.get_text() for text in figure.axes[0].texts] for figure in made]
    assert texts == [["12.5", "50", "87.5"], ["0.125", "0.5", "0.875"]]
    titles = [" ".join(figure._suptitle.get_text().split()) for figure in made]
    assert "from 12.5% to 87.5%" in titles[0] and "from 0.125 to 0.875" in titles[1]


def test_a_picture_of_a_grid_is_made_and_unknown_kinds_are_named(tmp_path: Path) -> None:
    curves.grid(grid_document([[0.1, 0.5], [0.9, None]]), tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        InvalidInput, match=r"unknown kind of picture '\.jpeg'; did you mean \.png\? Also allowed: \.svg, \.pdf"
    ):
        plots.check_suffix(tmp_path / "grid.jpeg")


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Bar("training", 3, "epochs", stream) as bar:
        bar.line("begins")
        bar.advance()
        bar.line("ends")
    assert stream.getvalue() == "begins\nends\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    with Bar("training", 4, "epochs", stream) as bar:
        bar.advance(3, "still training")
        bar._progress.refresh()  # type: ignore[union-attr]
        bar.line("a line above")
    assert "still training" in stream.getvalue() and "3/4" in stream.getvalue() and "a line above" in stream.getvalue()
