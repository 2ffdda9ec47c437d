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
from lowp.report.tables import amount, bytes_of, heat_map, number, points, seconds, sweep_words
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


@pytest.mark.parametrize(
    ("values", "higher", "colours"),
    [
        ([0.25, 0.5, 0.75], True, ["white on #440154", "white on #a0743c", "black on #fde725"]),
        ([0.25, 0.5, 0.75], False, ["black on #fde725", "white on #a0743c", "white on #440154"]),
        ([0.25, 0.75, 0.625], True, ["white on #440154", "black on #fde725", "black on #cfae31"]),
        ([0.5, 0.5, math.nan], True, ["black on #fde725", "black on #fde725", ""]),
    ],
)
def test_a_heat_map_is_dark_where_the_metric_is_worst(values: list[float], higher: bool, colours: list[str]) -> None:
    document: dict[str, Any] = grid_document([[values[0], None], values[1:]])
    document["recipe"].update(metric_is_share=False, higher_is_better=higher)
    table = heat_map(document)
    cells = [cell for column in list(table.columns)[1:] for cell in column.cells]
    shown = {str(cell): str(cell.style) for cell in cells}
    known = [one for one in values if not math.isnan(one)]
    assert shown == {"-": "", **{f" {one:.4g} ": colour for one, colour in zip(known, colours, strict=False)}}
    assert str(table.title) == "toy: accuracy of eXmY (fp32: 0.9)"
    assert [column.header for column in table.columns] == ["", "m2", "m3"]


def test_a_sweep_is_told_in_sentences() -> None:
    document: dict[str, Any] = grid_document([[0.1, 0.5], [0.9, 0.9]])
    between = "Between 3 and 4 exponent bits the mean accuracy moves by {}, between 2 and 3 mantissa bits by {}: {}."
    each = "Each number is the accuracy after the last epoch ({}), loss scale none."
    more = "A mantissa bit also halves the smallest subnormal number: ,subnormals=no excludes this effect."
    mantissa = "mantissa bits matter more than exponent bits here"
    told = between.format("10.0 points", "60.0 points", mantissa)
    assert sweep_words(document, 1000) == f"{told} {each.format('1 seed')} {more}"
    document["recipe"]["metric_is_share"], document["seeds"] = False, [0, 1]
    document["grid"].update(subnormals=False, effect_of_mantissa={"spread": 0.1})
    told = between.format("0.1", "0.1", "neither matters more here")
    assert sweep_words(document, 1000) == f"{told} {each.format('2 seeds')}"
    assert str(heat_map(document).title) == "toy: accuracy of eXmY without subnormals (fp32: 0.9)"
    document["grid"]["effect_of_exponent"]["spread"] = 0.2
    assert "exponent bits matter more than mantissa bits here" in sweep_words(document, 1000)
    del document["grid"]["effect_of_exponent"]
    assert sweep_words(document) == "The grid is not complete: --resume continues it."


@pytest.mark.parametrize(
    ("value", "shown"),
    [(999, "999 B"), (1000, "0.977 KiB"), (1024**2, "1 MiB"), (1000 * 1024, "0.977 MiB"), (1000 * 2**30, "1e+03 GiB")],
)
def test_a_size_has_three_digits(value: int, shown: str) -> None:
    assert bytes_of(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(99.94, "99.9"), (100, "100"), (99.96, "100"), (12345.6, "12,346")])
def test_an_amount_is_whole_from_a_hundred_on(value: float, shown: str) -> None:
    assert amount(value) == shown
    assert seconds(1.0) == "1 s" and seconds(0.9994) == "999 ms" and seconds(1e-3) == "1 ms"
