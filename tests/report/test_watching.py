"""The board that shows a running training: its curves, its table of groups, and what a narrow terminal leaves out."""

from __future__ import annotations

import io

import pytest
from report.looks import record
from rich.console import Console

from lowp.report.watching import Board, Curve, sparkline


def shown(board: Board, width: int, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, file=io.TextIOWrapper(io.BytesIO(), "utf-8"))
    with console.capture() as capture:
        console.print(board.shown(console))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_sparkline_goes_from_the_least_to_the_largest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, False) == "▁▂▃▄▅▆▇█"
    assert sparkline([1e-4, 1e-2, 1.0], 8, True) == "▁▅█"
    assert sparkline([0.0, 4.0, 2.0, 2.0], 2, False) == "▅▅"
    assert sparkline([1.0, float("nan"), 2.0], 3, False) == "▁ █"
    assert sparkline([float("nan")], 3, True) == ""


def test_a_curve_of_a_long_run_keeps_its_shape_in_few_points() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(float(step))
    assert len(curve.values) <= 240 and curve.latest == 9999
    assert curve.values == sorted(curve.values) and curve.values[-1] > 9000


def test_a_board_fits_the_terminal() -> None:
    board = Board("run.jsonl")
    board.take([record(step, groups=60) for step in range(4)])
    for width in (60, 80, 160):
        lines = shown(board, width, height=24)
        assert len(lines) <= 24 and max(map(len, lines)) <= width
        assert any("blocks.1" in line for line in lines) and any(line.endswith("more") for line in lines)
        assert any("N101 step 2: blocks.1.norm" in line for line in lines)
    assert "update / weight" in "".join(shown(board, 80)) and "activation" not in "".join(shown(board, 60))


def test_a_resumed_run_begins_anew() -> None:
    board = Board("run.jsonl")
    board.take([record(step) for step in range(4)])
    board.take([{"kind": "lowp monitor", "model": "Network"}, record(0)])
    assert board.step == 0 and not board.alarms


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (100, "group gradient update / weight activation updates lost"),
        (60, "group gradient update / weight updates lost"),
        (45, "group gradient updates lost"),
        (30, "group gradient"),
        (20, "group gradient"),
    ],
)
def test_a_narrow_terminal_leaves_out_curves_before_the_share_of_lost_updates(width: int, headings: str) -> None:
    board = Board("run.jsonl")
    board.take([record(step) for step in range(4)])
    assert headings in [" ".join(line.split()) for line in shown(board, width)]


def test_a_board_says_how_a_run_has_ended() -> None:
    board = Board("run.jsonl")
    board.take([record(0), {"ended": 1200}, {"of a later version": 1}])
    assert shown(board, 80)[0] == "run.jsonl  step 0, ended after 1,200 steps, no alarm"
