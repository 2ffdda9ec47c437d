"""lowp formats: the list, one format in full, the drawings, and their width on a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowp.casts import parse
from lowp.cli import format_facts
from lowp.cli.formats import draw, reach
from lowp.formats import FORMATS, ScaledFormat

LIGHT = {"torch", "numpy", "jinja2", "matplotlib"}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def cells(out: str, name: str) -> list[str]:
    """Return the words after a format's name in every table that lists it."""
    return [word for line in out.splitlines() if line.split()[:1] == [name] for word in line.split()[1:]]


def test_every_row_is_listed_with_its_numbers(lowp: Callable[..., Any]) -> None:
    result = lowp("formats")
    assert (result.code, result.err) == (0, "")
    for name in FORMATS:
        assert cells(result.out, name)
    assert cells(result.out, "fp16") == [
        *("16", "e5m10", "5.96e-8", "0.0000610", "65504", "0.000977"),
        *("2^-11", "0.049%", "3.3", "2", "0.21", "1.1", "pJ"),
    ]
    assert "0.0000060%" in cells(result.out, "fp32")
    assert cells(result.out, "flex16+5")[-6:] == ["unit", "4.5", "2", "0.444", "~0.78", "pJ"]
    assert "bf16-trunc = bf16:toward-zero" in result.out
    assert "Horowitz" in result.out and "estimate" in result.out


def test_formats_stand_under_the_title_of_their_kind(lowp: Callable[..., Any]) -> None:
    own, shared = lowp("formats").out.split("numbers under a shared scale")
    assert own.startswith("numbers with an exponent of their own")
    for name, format in FORMATS.items():
        is_scaled = isinstance(format, ScaledFormat)
        assert (bool(cells(own, name)), bool(cells(shared, name))) == (not is_scaled, is_scaled), name


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_list_fits_the_terminal(lowp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = lowp("formats").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert sum(line.startswith("fp16 ") for line in lines) == (1 if columns == 200 else 2)


def test_one_format_is_shown_in_full(lowp: Callable[..., Any]) -> None:
    out = lowp("formats", "bf16").out
    for shown in (
        "16: 1 sign, 8 exponent, 7 mantissa (e8m7)",
        "127; exponents -126 .. 127",
        "338953138925153547590470800371487866880 = (2 - 2^-7) x 2^127",
        "2^-133 = 9.18355e-41, the smallest",
        "2^-7 = 0.0078125",
        "inf, saturate, nan; here inf",
        "0 11111111 1000000   nan",
        "8^2 = 64 by the square of the significand",
        "0.111 of fp32's 24^2 = 576",
        "arXiv 1905.12322",
        "│s│   e8   │   m7  │ = 16",
    ):
        assert shown in out


@pytest.mark.parametrize("name", [*FORMATS, "e5m7", "e4m3b11fnuz", "i6s", "ue5m3", "e2m1@e8m0/32", "e4m3fn:saturate"])
def test_any_format_can_be_shown_and_drawn(lowp: Callable[..., Any], name: str) -> None:
    result = lowp("formats", name)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0].startswith(name.partition(":")[0])
    assert max(map(len, result.out.splitlines())) <= 80
    assert lowp("formats", "--layout", name).code == 0


def test_a_cast_with_a_name_of_its_own_is_shown_as_its_format(lowp: Callable[..., Any]) -> None:
    assert lowp("formats", "bf16-trunc").out.startswith("bf16, cast as bf16:toward-zero\n")


LAYOUT = """\
bits: s sign, e exponent, m mantissa, i integer; one column per bit
          ┌─┬────────┬───────────────────────┐
fp32      │s│   e8   │          m23          │ = 32
          └─┴────────┴───────────────────────┘
             ┌─┬─────┬──────────┐
fp16         │s│  e5 │   m10    │ = 16
             └─┴─────┴──────────┘
          ┌─┬────────┬───────┐
bf16      │s│   e8   │   m7  │ = 16
          └─┴────────┴───────┘
                   ┌─┬───────────────┐   ┌─────┐
flex16+5           │s│      i15      │ x │  e5 │
                   └─┴───────────────┘   └─────┘
              x 2^e, shared by the tensor
"""


def test_layouts_are_drawn_with_their_exponents_above_each_other(lowp: Callable[..., Any]) -> None:
    out = lowp("formats", "--layout", "fp32", "fp16", "bf16", "flex16+5").out
    assert out.startswith(LAYOUT)
    ranges = out[len(LAYOUT) :].splitlines()
    assert ranges[1] == "range, log2 from -149 to 128"
    assert [line.rpartition("  ")[2] for line in ranges[3:]] == [
        *("2^-149 .. 2^128", "2^-24 .. 2^16", "2^-133 .. 2^128", "2^-31 .. 2^15")
    ]
    # fp16's numbers begin right of bf16's and end left of them
    fp16, bf16 = ranges[4], ranges[5]
    assert bf16.index("█") < fp16.index("█") and fp16.rindex("█") < bf16.rindex("█")
    assert max(map(len, ranges)) <= 80


SHARED = """\
bits: s sign, e exponent, m mantissa, i integer; one column per bit
          ┌─┬────┬───┐   ┌────────┐
mxfp8     │s│ e4 │ m3│ x │   e8   │
          └─┴────┴───┘   └────────┘
            x 2^e, shared by a block of 32
            ┌─┬──┬─┐   ┌─┬────┬───┐
nvfp4       │s│e2│1│ x │s│ e4 │ m3│
            └─┴──┴─┘   └─┴────┴───┘
            x e4m3fn, shared by a block of 16, and fp32 for the tensor
          ┌─┬────┬───┐
e4m3fn    │s│ e4 │ m3│ = 8
          └─┴────┴───┘
               ┌─┬───────┐   ┌─┬────────┬───────────────────────┐
int8           │s│   i7  │ x │s│   e8   │          m23          │
               └─┴───────┘   └─┴────────┴───────────────────────┘
            x fp32, shared by a row (last dimension)
        ┌────────┐
e8m0    │   e8   │ = 8
        └────────┘

range, log2 from -159 to 140
"""


def test_a_scale_is_drawn_as_the_format_that_it_is_with_who_shares_it(lowp: Callable[..., Any]) -> None:
    assert lowp("formats", "--layout", "mxfp8", "nvfp4", "e4m3fn", "int8", "e8m0").out.startswith(SHARED)


def test_layouts_without_names_draw_the_common_formats(lowp: Callable[..., Any]) -> None:
    out = lowp("formats", "--layout").out
    assert "e4m3fn" in out and "flex16+5" in out


def test_a_terminal_without_box_characters_gets_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.cli.formats import draw

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    drawn = draw([FORMATS["fp16"]], 80)
    assert drawn.isascii()
    assert "|s|  e5 |   m10    | = 16" in drawn


def test_machines_get_exact_numbers(lowp: Callable[..., Any]) -> None:
    rows = {row["name"]: row for row in json.loads(lowp("formats", "--json").out)}
    assert list(rows) == list(FORMATS)
    assert rows["fp64"]["limits"]["smallest"] == 5e-324 and rows["fp64"]["limits"]["maximum"] == sys.float_info.max
    assert Fraction(rows["fp16"]["limits"]["smallest_subnormal"]) == Fraction(1, 1 << 24)
    assert rows["bf16-tpu"]["limits"]["smallest_subnormal"] is None
    assert repr(rows["flex16+5"]["limits"]["maximum"]) == "32767"
    (wide,) = json.loads(lowp("formats", "e11m52@fp32/row", "--json").out)
    assert wide["limits"]["smallest"] == "2^-1223", "which fp64 does not hold"
    assert rows["fp32"]["cost"]["multiply_energy"] == {"value": 3.7, "unit": "pJ", "how": "table"}
    assert [row["name"] for row in json.loads(lowp("formats", "e5m7", "--json").out)] == ["e5m7"]


def test_a_table_in_markdown_has_a_row_for_every_format(lowp: Callable[..., Any]) -> None:
    head, rule, *rows = [line for line in lowp("formats", "--markdown").out.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in FORMATS]
    assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")}


def test_an_unknown_format_lists_the_near_ones(lowp: Callable[..., Any]) -> None:
    result = lowp("formats", "bf61")
    assert result.code == 2
    assert "unknown format 'bf61'; did you mean bf16" in result.err
    assert lowp("formats", "e12m3").err.startswith("lowp: error: e12m3: 12 exponent and 3 mantissa bits are not")
    assert "--layout cannot be combined with --json" in lowp("formats", "--layout", "--json").err


def test_a_pipe_gets_no_escape_codes_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from lowp.cli import main; main(['formats']); main(['explain', '0.1', '--to', 'fp16']); "
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in out
    loaded = set(out.splitlines()[-1].split()[1:])
    assert "lowp" in loaded and not loaded & LIGHT


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "arguments", "coloured"),
    [
        ({}, (), True),
        ({"NO_COLOR": "1"}, (), False),
        ({}, ("--plain",), False),
        ({"TERM": "dumb"}, (), False),
        ({"NO_COLOR": ""}, ("--plain",), False),
    ],
)
def test_a_terminal_gets_colour_unless_it_asks_not_to(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: tuple[str, ...], coloured: bool
) -> None:
    from lowp.cli import main

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["formats", "bf16", *arguments]) == 0
    out = terminal.getvalue()
    assert ("\x1b[" in out) == coloured
    assert "bf16" in out and "exponents -126 .. 127" in out
    assert os.environ.get("NO_COLOR") == environment.get("NO_COLOR")


SHOWN = (Path(__file__).parent / "formats.txt").read_text(encoding="utf-8").split("$ lowp ")[1:]


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.partition("\n")[0])
def test_formats_of_each_kind_are_shown_as_a_whole(
    lowp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    command, _, text = shown.partition("\n")
    monkeypatch.setenv("COLUMNS", "60" if "--layout" in command else "80")
    assert lowp(*command.split()).out == text


def test_a_row_in_markdown_has_every_number(lowp: Callable[..., Any]) -> None:
    names = ("fp64", "fp16", "bf16-tpu", "mxfp8", "int8-affine", "binary")
    rows = [line for line in lowp("formats", "--markdown", *names).out.splitlines() if line.startswith("|")]
    assert rows[1:] == [
        "|" + " --- |" * 13,
        "| fp64 | 64 | e11m52 | 4.94e-324 | 2.23e-308 | 1.80e308 | 2.22e-16 | 2^-53 1.1e-14% | 16.0 | 8 | 4.88 | "
        "~16.5 pJ | IEEE 754-2019 |",
        "| fp16 | 16 | e5m10 | 5.96e-8 | 0.0000610 | 65504 | 0.000977 | 2^-11 0.049% | 3.3 | 2 | 0.21 | 1.1 pJ | "
        "IEEE 754-2019 |",
        "| bf16-tpu | 16 | e8m7ftz | 1.18e-38 | 1.18e-38 | 3.39e38 | 0.00781 | 2^-8 0.39% | 2.4 | 2 | 0.111 | "
        "~0.774 pJ | Google Cloud TPU documentation |",
        "| mxfp8 | 8 | e4m3fn@e8m0/32 | 1.15e-41 | 9.18e-41 | 7.62e40 | by scale | 2^-4 6.25% | 1.2 | 1.03125 | "
        "0.0278 | ~0.5 pJ | OCP MX 1.0 |",
        "| int8-affine | 8 | i8@fp32/row/affine | 1.40e-45 | - | 4.32e40 | by scale | half unit | 2.1 | 1 | 0.111 | "
        "0.2 pJ | Jacob et al. 2018, arXiv 1712.05877 |",
        "| binary | 1 | i1@fp32/row | 1.40e-45 | - | 3.40e38 | by scale | sign only | 0.3 | 0.125 | 0.00174 | "
        "~0.00969 pJ | Rastegari et al. 2016, arXiv 1603.05279 |",
    ]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.5, "50%"),
        (0.0100001, "1%"),
        (0.01, "1%"),
        (0.00390625, "0.39%"),
        (1.1e-6, "0.00011%"),
        (0.9e-6, "0.0000900%"),
        (2.0**-24, "0.0000060%"),
        (1e-8, "1e-06%"),
        (1.01e-8, "0.0000010%"),
        (2.0**-53, "1.1e-14%"),
    ],
)
def test_an_error_in_percent_has_two_digits(error: float, text: str) -> None:
    assert format_facts.percent(SimpleNamespace(relative_error=error)) == text  # type: ignore[arg-type]


def test_a_limit_is_told_in_few_characters() -> None:
    values = [None, "word", Fraction(999999), Fraction(10**6), Fraction(1, 3), Fraction(65504)]
    assert [format_facts.brief(value) for value in values] == ["-", "word", "999999", "1.00e6", "0.333", "65504"]


@pytest.mark.parametrize(
    ("spelling", "ends", "room"),
    [(("e5m10", "e2m1"), ((-24, 16), (-1, 3)), 20), (("i2s",), ((0, 1),), 20)],
)
def test_ranges_are_drawn_in_at_least_twenty_columns(
    spelling: tuple[str, ...], ends: tuple[tuple[int, int], ...], room: int
) -> None:
    found = [parse(name).format for name in spelling]
    lines = draw(found, 30).splitlines()[-len(found) :]
    assert [line.rpartition("  ")[2] for line in lines] == [f"2^{low} .. 2^{high}" for low, high in ends]
    assert [reach(one)[::2] for one in found] == list(ends)
    assert [len(line.rpartition("  2^")[0]) for line in lines] == [max(map(len, spelling)) + 2 + room] * len(found)
