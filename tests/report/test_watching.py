"""The board that shows a running training: its curves, its table of groups, and what a narrow terminal leaves out."""

from __future__ import annotations

import io
import os
import platform
import re
from types import SimpleNamespace
from typing import Any

import pytest
from report.looks import record
from rich.console import Console

from lowp.monitoring import Alarm
from lowp.report import watching
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
    assert sparkline([float("nan")], 3, True) == sparkline([], 3, True) == sparkline([1.0], 0, True) == ""
    assert sparkline([2.0, float("nan"), 2.0], 3, False) == sparkline([1.0, 0.0, 1.0], 3, True) == "▅ ▅"
    assert sparkline([0.0, 0.0, 7.0, 1.0, 1.0, 1.0, 7.0], 3, False, "01234567") == "075"


def test_a_curve_of_a_long_run_keeps_its_shape_in_few_points() -> None:
    curve = Curve()
    for step in range(10_000):
        curve.add(float(step))
    assert len(curve.values) <= 240 and curve.latest == 9999
    assert curve.values == sorted(curve.values) and curve.values[-1] > 9000


def test_a_curve_halves_its_points_where_there_is_one_too_many() -> None:
    curve = Curve()
    for step in range(240):
        curve.add(float(step))
    assert curve.values == [float(step) for step in range(240)]
    curve.add(240.0)
    halved = [step + 0.5 for step in range(0, 240, 2)]
    assert curve.values == [*halved, 240.0]
    for step in range(241, 245):  # of which two are one point
        curve.add(float(step))
    assert curve.values == [*halved, 240.0, 241.5, 243.5]
    for step in range(245, 481):  # until there is one too many of two: each is of four
        curve.add(float(step))
    assert len(curve.values) == 121 and curve.values[:2] == [1.5, 5.5] and curve.latest == 480.0
    assert curve.values[-2:] == [476.5, 479.5]


@pytest.mark.parametrize(
    ("header", "kill", "is_gone"),
    [
        ({}, ProcessLookupError, True),
        ({}, PermissionError, False),  # a process of another user
        ({}, None, False),
        ({"host": "another"}, ProcessLookupError, False),
        ({"process": 0}, ProcessLookupError, False),
    ],
)
@pytest.mark.skipif(os.name != "posix", reason="signal 0 asks for a process on POSIX systems")
def test_a_process_of_this_machine_that_has_gone_is_told(
    header: dict[str, Any], kill: type[OSError] | None, is_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(process: int, number: int) -> None:
        assert (process, number) == (1234, 0)
        if kill is not None:
            raise kill

    monkeypatch.setattr(os, "kill", asked)
    board = Board("run.jsonl")
    board.take([{"kind": "lowp monitor", "host": platform.node(), "process": 1234, **header}, record(0)])
    assert board.is_gone is is_gone
    assert shown(board, 80)[0] == f"run.jsonl  step 0, {'its process has gone, ' * is_gone}no alarm"
    monkeypatch.setattr(os, "name", "nt")
    assert board.is_gone is False
    monkeypatch.undo()
    board.take([{"ended": 1}])
    assert board.is_gone is False and shown(board, 80)[0] == "run.jsonl  step 0, ended after 1 step, no alarm"


LONG = "a.group.of.layers.with.a.long.name"


@pytest.mark.parametrize(
    ("width", "curve", "cell", "name"),
    [
        *((400, 80, 24, f"{LONG[:21]}…"), (97, 80, 9, f"{LONG[:21]}…"), (96, 79, 9, f"{LONG[:21]}…")),
        *((84, 67, 13, f"{LONG[:21]}…"), (83, 66, 12, f"{LONG[:21]}…"), (60, 43, 13, f"{LONG[:21]}…")),
        *((40, 23, 1, f"{LONG[:21]}…"), (24, 7, 1, f"{LONG[:17]}…"), (20, 6, 1, f"{LONG[:13]}…")),
    ],
)
def test_curves_and_names_are_as_wide_as_there_is_room(width: int, curve: int, cell: int, name: str) -> None:
    board = Board("run.jsonl")
    sizes = {"activation": 1.0, "update_to_weight": 1.0, "lost": 0.25}
    for step in range(200):
        groups = {LONG: {"gradient": 2.0 ** (step % 3), **sizes}}
        board.take([{"step": step, "loss": float(step % 2), "groups": groups}])
    lines = shown(board, width)
    assert [len(re.findall("[▁-█]+", line)[0]) for line in (lines[1], lines[-1])] == [curve, cell]
    assert lines[-1].startswith(f"{name}   ")


def test_a_board_fits_the_terminal() -> None:
    board = Board("run.jsonl")
    board.take([record(step, groups=60) for step in range(4)])
    for width in (60, 80, 160):
        lines = shown(board, width, height=24)
        assert len(lines) <= 24 and max(map(len, lines)) <= width
        assert any("blocks.1" in line for line in lines) and any(line.endswith("more") for line in lines)
        assert any("N101 step 2: blocks.1.norm" in line for line in lines)
    assert "update / weight" in "".join(shown(board, 80)) and "activation" not in "".join(shown(board, 60))


def test_the_rate_is_that_of_the_latest_steps() -> None:
    board = Board("run.jsonl")
    for step, seconds, rate in ((0, 1.0, None), (1, 2.0, 1.0), (4, 7.0, 4 / 6), (4, 7.0, 4 / 6)):
        board.take([{**record(step), "time": seconds}])
        assert board.rate == rate
    board.take([{**record(step), "time": step} for step in range(100)])
    assert board.rate == 1.0
    at_once = Board("run.jsonl")
    at_once.take([{**record(step), "time": 1.0} for step in range(2)])
    assert at_once.rate is None


def test_a_resumed_run_begins_anew() -> None:
    board = Board("run.jsonl")
    board.take([record(step) for step in range(4)])
    board.take([{"kind": "lowp monitor", "model": "Network"}, record(0)])
    assert board.step == 0 and not board.alarms


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (100, "group gradient update / weight activation updates lost"),
        (73, "group gradient update / weight activation updates lost"),  # with six characters for each curve
        (72, "group gradient update / weight updates lost"),
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


BOARD = """\
run.jsonl  Network, step 3, 4 steps/s, 6 alarms
loss          █ ▂▁ 0.125
loss scale    ▅▅▅▅ 512, 6 skipped
all gradients ▅▅▅▅ 1
group      gradient                  update / weight         activation          updates lost
─────────────────────────────────────────────────────────────────────────────────────────────
blocks.0   █▆▃▁            0.001     ▅▅▅▅            0.001                       50%
blocks.1   █▆▃▁            0.001     ▅▅▅▅            0.001   ▅▅▅▅            2   50%
blocks.2   █▆▃▁            inf/NaN   ▅▅▅▅            0.001   ▅▅▅▅            2   inf/NaN
blocks.3   █▆▃▁            0.001     ▅▅▅▅            0.001   ▅▅▅▅            2   50%

""".splitlines()
LINE = "N101 step 2: blocks.{}.norm: it is so since step 0. Keep. (lowp explain N101)"


def alarm(block: int) -> dict[str, Any]:
    return Alarm("N101", f"blocks.{block}.norm", "it is so", 0, 2, "Keep.", 1.0).document()


def test_a_board_is_shown_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock.now))
    board = Board("run.jsonl")
    assert shown(board, 80)[0] == "run.jsonl  no look yet, no alarm"
    assert board.document() == {
        **{"kind": "lowp watch", "file": "run.jsonl", "model": None, "step": -1, "steps_per_second": None},
        **{"ended": False, "skipped": 0, "groups": {}, "alarms": []},
    }
    board.take([{"kind": "lowp monitor", "model": "Network"}])
    for step in range(4):
        loss = None if step == 1 else 2.0**-step
        board.take([record(step, 4, alarms=[*map(alarm, range(step))], skipped=step, loss=loss)])
    board.groups["blocks.2"]["lost"].add(None)
    board.groups["blocks.2"]["gradient"].add(None)
    del board.groups["blocks.0"]["activation"]
    clock.now = 110.0
    alarms = [LINE.format(block) for block in (0, 0, 1, 0, 1, 2)]
    assert shown(board, 100) == [*BOARD, *alarms]
    clock.now = 110.6
    assert shown(board, 100)[0] == "run.jsonl  Network, step 3, 4 steps/s, latest look 11 s ago, 6 alarms"
    lines = shown(board, 100, height=5)
    assert [line.split()[0] for line in lines[6:9]] == ["blocks.0", "blocks.1", "2"] and lines[8] == "2 more"
    board.take([record(step, 4, alarms=[alarm(5)]) for step in (4, 6)])
    lines = shown(board, 100)
    assert lines[0] == "run.jsonl  Network, step 6, 4 steps/s, 8 alarms"
    assert lines[11:] == ["2 earlier alarms", *(LINE.format(block) for block in (1, 0, 1, 2, 5, 5))]
    assert board.document()["skipped"] == 6 and board.document()["loss"] == 2.0**-6
    assert board.document()["groups"]["blocks.3"] == {
        **{"activation": 2.0, "gradient": 1e-6, "update_to_weight": 1e-3, "lost": 0.5}
    }


@pytest.mark.parametrize(("alarms", "count"), [(0, 51), (1, 49), (6, 39), (7, 39)])
def test_a_board_leaves_two_lines_for_each_alarm_that_it_shows(alarms: int, count: int) -> None:
    board = Board("run.jsonl")
    board.take([record(0, 70, alarms=[alarm(0)] * alarms)])
    lines = shown(board, 100, height=60)
    assert sum(line.startswith("blocks.") for line in lines) == count
    assert f"{70 - count} more" in lines


@pytest.mark.parametrize(("height", "count"), [(100, 30), (40, 30), (39, 28), (24, 13), (13, 2), (12, 2), (1, 2)])
def test_groups_with_alarms_are_shown_where_there_is_no_room_for_all(height: int, count: int) -> None:
    board = Board("run.jsonl")
    board.take([record(0, 30, alarms=[alarm(29)])])
    console = Console(width=100, height=height, force_terminal=True, color_system="standard", legacy_windows=False)
    rows = max(height - 8 - 2, 3)
    table = board._table(console, rows, "_#")
    (names, *_) = (list(column.cells) for column in table.columns)
    groups = [str(name) for name in names if str(name).startswith("blocks.")]
    assert groups == [*(f"blocks.{place}" for place in range(count - 1)), "blocks.29"]
    assert [str(name) for name in names[count:]] == ([f"{30 - count} more"] if count < 30 else [])
    assert [str(name.style) for name in names[:count]] == [""] * (count - 1) + ["bold red"]
    with console.capture() as capture:
        console.print(board.shown(console))
    assert sum("blocks." in line and "N101" not in line for line in capture.get().splitlines()) == count
