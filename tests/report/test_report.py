"""The format of numbers, progress on a stream that is not a terminal, and heat maps."""

from __future__ import annotations

import importlib.util
import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lowp.errors import InvalidInput
from lowp.report import can_show, palette, plots, terminal
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


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = io.StringIO(), list[str]()
    monkeypatch.setattr(stream, "flush", lambda: seen.append(stream.getvalue()))
    with Bar("training", 3, "epochs", stream) as bar:
        bar.line("begins")
        bar.advance()
        bar.line("ends")
    assert stream.getvalue() == "begins\nends\n" and "begins\n" in seen and "begins\nends\n" in seen


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


@pytest.mark.parametrize(
    ("environment", "is_terminal", "width", "colours"),
    [
        ({"COLUMNS": "77", "TERM": "xterm"}, True, 77, True),
        ({"COLUMNS": "77", "TERM": "dumb"}, True, 80, False),
        ({"COLUMNS": "77", "TERM": "xterm", "NO_COLOR": "1"}, True, 77, False),
        ({"COLUMNS": "77", "TERM": "xterm", "NO_COLOR": ""}, True, 77, True),
        ({"COLUMNS": "39", "TERM": "xterm"}, False, 40, False),
        ({"COLUMNS": "41", "TERM": "xterm"}, False, 41, False),
        ({"COLUMNS": "", "TERM": "xterm"}, False, 110, False),
        ({"COLUMNS": "-5", "TERM": "xterm"}, False, 110, False),
    ],
)
def test_a_console_is_as_wide_as_asked_and_has_colours_where_they_are_seen(
    environment: dict[str, str], is_terminal: bool, width: int, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    found = console(stream)
    assert (found.width, found.color_system is not None) == (width, colours)
    found.print("123 [red]word")
    assert stream.getvalue() == ("123 \x1b[31mword\x1b[0m\n" if colours else "123 word\n")


def test_columns_of_words_alone_are_wrapped_and_aligned_left() -> None:
    columns = ["size", "count", "size", "verdict", "other"]
    table = terminal.plain_table("title", columns, left=("other",))
    looks = [(column.justify, column.no_wrap) for column in table.columns]
    left, right = ("left", False), ("right", True)
    assert looks == [left, right, left, left, ("left", True)]
    table.add_row("1", "22", "a b", "some words that need more than one line", "x")
    terminal.show(Console(file=(stream := io.StringIO()), width=60), table)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "title" and lines[-2:] == [f"{'':22}one line", ""], lines


def test_a_bar_moves_by_units_and_by_parts() -> None:
    bar = Bar("comparing", 4, "epochs", io.StringIO())
    (task,) = bar._progress.tasks
    bar.advance()
    assert (task.completed, task.total, task.description) == (1, 4, "comparing")
    bar.advance(2, "more")
    assert (task.completed, task.total, task.description) == (3, 4, "more")
    bar.move(1.5, total=8.0)
    assert (task.completed, task.total, task.description) == (1.5, 8.0, "more")
    for name, done, of_all in (("a", 0.5, 0.5), ("b", 1.0, 1.5), ("a", 2.0, 3.0)):
        bar.move_part(name, done)
        assert (task.completed, task.total, task.description) == (of_all, 8.0, name)


def test_what_an_encoding_has_can_be_shown() -> None:
    assert can_show("▁", "utf-8") is True and can_show("▁", "ascii") is False and can_show("a", "ascii") is True


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plots.can_plot() is True
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plots.can_plot() is False


def test_a_precision_has_its_colour_everywhere_and_others_that_of_their_place() -> None:
    colours = [palette.series(name) for name in ("fp16", "bf16", "e4m3fn", "fp8", "int8", "dfp16", "flex16+5", "fp32")]
    p = palette
    assert colours == [p.PURPLE, p.BLUE, p.RED, p.RED, p.CYAN, p.GREEN, p.AMBER, p.GREY]
    assert [p.series("x", place) for place in range(8)] == [*p.SERIES, p.SERIES[0]] and p.series("x") == p.SERIES[0]


def test_a_style_sheet_has_the_light_colours_and_the_dark_ones() -> None:
    light, dark = palette.css().split("@media (prefers-color-scheme:dark)")
    for name, grade in palette.GRADES.items():
        assert f"--{name.replace(' ', '-')}:{grade.light};" in light
        assert f"--{name.replace(' ', '-')}:{grade.dark};" in dark
    assert "--back:#ffffff;" in light and "--back:#14161a;" in dark


# -- pictures ---------------------------------------------------------------------------------------------------------
def by_epoch() -> dict[str, Any]:
    def run(seed: int, *records: tuple[int, float, float], failure: str | None = None) -> dict[str, Any]:
        history = [dict(zip(("epoch", "accuracy", "loss"), record, strict=True)) for record in records]
        return {"seed": seed, "history": history, "failure": failure}

    first, second = run(0, (0, 0.1, 9.0), (1, 0.5, 1.0), (2, 0.75, 0.5)), run(1, (1, 0.5, 1.5), (2, 0.875, 0.25))
    worse = [run(0, (1, 0.375, 1.5), (2, 0.75, 0.75)), run(1, (1, 0.5, 2.0), (2, 0.75, 0.5)), run(7, (1, 0.0, 9.0))]
    runs = {"fp32": [first, second], "fp16": worse[:2], "bf16": [second, first], "int8": [run(0), run(1)]}
    runs["e4m3"] = [run(0, (1, 0.5, math.nan), failure="nan"), run(1, (1, 0.25, 1.0))]
    return {
        "recipe": {"name": "toy", "metric": "accuracy", "metric_is_share": True, "higher_is_better": True},
        "variants": [{"label": name, "runs": found} for name, found in runs.items()],
        "seeds": [0, 1],
    }


def drawn(draw: Any, document: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    draw(document, Path("none.png"))
    return made[0]


def test_curves_are_differences_from_fp32_of_runs_with_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    document = by_epoch()
    figure = drawn(curves.curves, document, monkeypatch)
    assert " ".join(figure._suptitle.get_text().split()) == (
        "toy, top-1 error: fp16 ends 6.25 points above fp32, bf16 ends as fp32, e4m3 failed in 1 of 2 runs (2 seeds)"
    )
    errors, losses = figure.axes
    assert errors.get_title("left") == "top-1 error, difference from fp32 (18.8% at the end), grey: its seeds"
    assert losses.get_title("left") == "validation loss, difference from fp32 (0.375 at the end), grey: its seeds"
    lines = [[*map(list, line.get_data())] for line in errors.lines[1:]]
    assert lines == [[[1, 2], [6.25, 6.25]], [[1, 2], [0.0, 0.0]], [[1], [12.5]]]
    fp16, bf16 = ([*map(list, line.get_data())] for line in losses.lines[1:3])
    assert fp16 == [[1, 2], [0.5, 0.25]] and bf16 == [[1, 2], [0.0, 0.0]]
    ends = sorted(text.get_text() for text in errors.texts)
    assert ends == ["bf16 as fp32", "e4m3 +12.50", "fp16 +6.25", "fp32"]
    assert curves.curves_words(document) == [
        "fp32: top-1 error 18.8% (12.5 to 25); validation loss 0.375 (0.25 to 0.5).",
        "fp16: top-1 error 25% (25 to 25); validation loss 0.625 (0.5 to 0.75).",
        "bf16: top-1 error 18.8% (12.5 to 25); validation loss 0.375 (0.25 to 0.5).",
        "int8: no run.",
        "e4m3: top-1 error 62.5% (50 to 75); 1 of 2 runs failed: nan.",
    ]
    document["recipe"].update(metric="loss", metric_is_share=False, higher_is_better=False)
    document["variants"] = [document["variants"][place] for place in (0, 1)]
    for row in document["variants"]:
        row["runs"] = row["runs"][:1]
    document["seeds"] = [0]
    (losses,) = (figure := drawn(curves.curves, document, monkeypatch)).axes
    assert figure._suptitle.get_text() == "toy, loss: fp16 ends 0.25 above fp32 (1 seed)"
    assert losses.get_title("left") == "loss, difference from fp32 (0.5 at the end)"
    document["variants"][0]["runs"][0]["history"] = []
    figure = drawn(curves.curves, document, monkeypatch)
    assert figure._suptitle.get_text() == "toy, loss: no run ended (1 seed)"


def test_the_title_of_a_grid_says_which_width_matters_more(monkeypatch: pytest.MonkeyPatch) -> None:
    document: dict[str, Any] = grid_document([[0.125, 0.5], [0.875, None]])

    def title() -> str:
        return " ".join(drawn(curves.grid, document, monkeypatch)._suptitle.get_text().split())

    assert title() == "toy: accuracy from 12.5% to 87.5%; mantissa bits matter more"
    document["grid"]["effect_of_exponent"]["spread"] = 0.7
    document["grid"]["subnormals"] = False
    assert title() == "toy, without subnormals: accuracy from 12.5% to 87.5%; exponent bits matter more"
    del document["grid"]["effect_of_mantissa"]
    assert title() == "toy, without subnormals: accuracy from 12.5% to 87.5%"
    document["recipe"].update(metric_is_share=False, higher_is_better=False)
    figure = drawn(curves.grid, document, monkeypatch)
    assert {text.get_text(): text.get_color() for text in figure.axes[0].texts} == {
        **{"0.125": "k", "0.5": "w", "0.875": "w"},  # where less is better, it is the light end
    }
    document["grid"]["values"] = [[None, None], [None, None]]
    assert title() == "toy, without subnormals: accuracy no run ended"


def test_parts_of_figures_are_placed_by_their_numbers() -> None:
    values = [None, 0, 9e-7, 1e-6, 9.99e-4, 1e-3, 0.00999, 0.01, 1.0]
    shown = ["unknown", "0%", "less than 0.0001%", "0.0001%", "0.0999%", "0.10%", "1.00%", "1.0%", "100.0%"]
    assert [style.share(value) for value in values] == shown
    assert style.bars({"counts": [1, 0, 3], "lowest": -2}) == ([25.0, 0.0, 75.0], [-2, -1, 0, 1])
    assert style.bars({"counts": [], "lowest": 0}) == ([], [0])
    assert style.bars({"counts": [1], "lowest": 3}) == ([100.0], [3, 4])
    many = {"counts": [1, 5, 4995, 4], "lowest": -3}  # of 5005 numbers 5 are less than a thousandth
    assert style._range_of([many], []) == (-2.0, 1.0) == (-2, 1)
    assert style._range_of([many], [-8, 3.5]) == (-9, 4.5) and style._range_of([], []) == (-1.0, 1.0)
    assert style._spread([0.1, 0.5, 0.9], 0.2) == pytest.approx([0.1, 0.5, 0.9])
    assert style._spread([0.5, 0.5], 0.2) == pytest.approx([0.4, 0.6])
    assert style._spread([0.1, 0.4, 0.5, 0.6], 0.2) == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert style._spread([0.3, 0.4, 0.5, 0.6], 0.2) == pytest.approx([0.15, 0.35, 0.55, 0.75])
    assert style.powered("2^-24 and 2^3, x2^4") == "$2^{-24}$ and $2^{3}$, x2^4"
