"""Children that do what a GPU is asked: an error, a crash or a hang ends one item, and the others are done."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHILD = """
import argparse, json, os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {bench!r})
import gpu_children
from gpu_children import Task, work

started = time.monotonic()
parser = argparse.ArgumentParser()
for name, kind in dict(report=Path, left=float, done=json.loads).items():
    parser.add_argument("--" + name, type=kind)
options = parser.parse_args()
broken = False


def measure(name, places):
    global broken
    print("at", name, flush=True)
    if name == "raises":
        raise ValueError("no such kernel")
    if name == "breaks":
        broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "exits":
        sys.exit(7)
    if name == "hangs":
        os.system("sleep 60 & echo $! > " + {folder!r} + "/sleeper")
        time.sleep(60)
    if name == "waits":
        Path({folder!r}, "waiting").touch()
        time.sleep(60)
    return {{"process": os.getpid(), "sum": 3}}


{before}
task = Task({items!r}, measure, lambda name, places: 0.3 if name == "hangs" else 2000.0, lambda: not broken, {first!r})
sys.exit(work(task, options.report, options.done, lambda: options.left - (time.monotonic() - started)))
"""


@pytest.fixture
def children(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(repository / "bench")
    import gpu_children  # type: ignore[import-not-found]

    return gpu_children  # type: ignore[no-any-return]


Found = dict[str, dict[str, Any]]


def _supervised(
    children: ModuleType, folder: Path, items: list[str], seconds: float = 60, first: str = "", before: str = ""
) -> tuple[Found, str | None]:
    script = folder / "child.py"
    bench = str(Path(children.__file__ or "").parent)
    script.write_text(CHILD.format(bench=bench, folder=str(folder), items=items, first=[first], before=before))
    found: Found = {}
    ending = children.supervise([sys.executable, str(script)], folder, time.monotonic() + seconds, found.__setitem__)
    return found, ending


def test_items_are_done_in_their_order_by_one_process(children: ModuleType, tmp_path: Path) -> None:
    found, ending = _supervised(children, tmp_path, ["a", "raises", "b"])
    assert ending is None and list(found) == ["a", "raises", "b"]
    assert found["a"]["process"] == found["b"]["process"] and found["b"]["failure"] is None
    assert found["raises"]["failure"] == "ValueError: no such kernel" and "in measure" in found["raises"]["traceback"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("crashes", "the process was ended by SIGSEGV"),
        ("exits", "the process ended with code 7"),
        ("breaks", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("hangs", "ended after the 0 s that it may take"),
    ],
)
def test_what_ends_a_process_ends_one_item(bad: str, words: str, children: ModuleType, tmp_path: Path) -> None:
    found, ending = _supervised(children, tmp_path, ["a", bad, "b", "c"])
    assert ending is None and list(found) == ["a", bad, "b", "c"]
    assert found[bad]["failure"] == words and ("at " + bad in found[bad].get("printed", "at breaks"))
    assert found["a"]["process"] != found["b"]["process"] == found["c"]["process"]


def test_what_a_child_has_started_ends_with_it(children: ModuleType, tmp_path: Path) -> None:
    _supervised(children, tmp_path, ["hangs"])
    sleeper = int((tmp_path / "sleeper").read_text())
    for _ in range(100):
        state = Path(f"/proc/{sleeper}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(sleeper, signal.SIGKILL)
    raise AssertionError("it runs on")


def test_without_what_all_others_need_they_are_not_begun(children: ModuleType, tmp_path: Path) -> None:
    found, ending = _supervised(children, tmp_path, ["raises", "a"], first="raises")
    assert list(found) == ["raises"] and ending == "without 'raises' nothing else can be done"


def test_a_child_that_never_begins_is_given_up_with_its_last_words(children: ModuleType, tmp_path: Path) -> None:
    found, ending = _supervised(children, tmp_path, ["a"], before="raise ImportError('lowp supports torch >=2.13')")
    assert not found and ending is not None
    assert ending.startswith("the process ended with code 1; it printed: ") and "lowp supports torch >=2.13" in ending


def test_when_the_time_is_up_what_is_left_is_told_so(
    children: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.monotonic  # the time is up as soon as the child waits
    monkeypatch.setattr(children.time, "monotonic", lambda: real() + 1000 * (tmp_path / "waiting").exists())
    found, ending = _supervised(children, tmp_path, ["a", "waits", "b"], 500)
    assert ending is None and list(found) == ["a", "waits", "b"] and found["a"]["failure"] is None
    assert found["waits"]["failure"] == found["b"]["failure"] == "no time was left"
    assert _supervised(children, tmp_path, ["a"], seconds=0) == ({}, "no time was left")


def test_a_child_begins_no_item_when_its_time_is_up(children: ModuleType, tmp_path: Path) -> None:
    done: list[str] = []
    task = children.Task(["a", "b", "c"], lambda name, places: done.append(name) or {}, lambda name, places: 1.0)
    assert children.work(task, tmp_path / "report", ["a"], lambda: 1.0 - len(done)) == 0
    assert done == ["b"] and (tmp_path / "report").read_text().splitlines()[-1] == (
        '{"item": "c", "result": {"failure": "no time was left"}}'
    )
