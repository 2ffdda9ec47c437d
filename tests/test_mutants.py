"""Planted faults: what is changed, the samples, and the command, which leaves lowp and the folder of copies alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import mutants
import pytest

SOURCE = '''"""Text."""

@decorated(frozen=True)
def function(é: int = 3) -> list[1]:
    assert é > 0
    if not é or é < 4:
        raise ValueError(f"{é + 1}", 5)
    zip(é, strict=True)
    return é * 2 if é else -é
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutants, "SOURCES", tmp_path)
    path = tmp_path / "room.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_a_fault_changes_one_expression_that_runs(file: Path) -> None:
    assert sorted(str(one).removeprefix("room.py:") for one in mutants.mutants(file)) == [
        "4  3  ->  4",
        "6  4  ->  5",
        "6  not é  ->  é",
        "6  not é or é < 4  ->  not (not é or é < 4)",
        "6  not é or é < 4  ->  not é and é < 4",
        "6  é < 4  ->  é <= 4",
        "9  -é  ->  é",
        "9  2  ->  3",
        "9  return é * 2 if é else -é  ->  return None",
        "9  é  ->  not é",
        "9  é * 2  ->  é / 2",
    ]


def test_a_fault_is_planted_where_it_stands(file: Path) -> None:
    source = file.read_bytes()
    planted = {one.change: one.planted(source).decode().splitlines()[one.line - 1] for one in mutants.mutants(file)}
    assert planted["é < 4  ->  é <= 4"] == "    if not é or (é <= 4):"
    assert planted["é * 2  ->  é / 2"] == "    return (é / 2) if é else -é"


def test_a_changed_constant_is_known_by_its_line_too(file: Path) -> None:
    keys = {one.key for one in mutants.mutants(file)}
    assert {"room.py  2  ->  3  in  return é * 2 if é else -é", "room.py  é < 4  ->  é <= 4"} <= keys
    file.write_text("flag = found = True  # why")
    assert [one.key for one in mutants.mutants(file)] == ["room.py  True  ->  False  in  flag = found = True  # why"]


def test_a_sample_is_the_same_for_a_seed_and_draws_no_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first = mutants.sample("hashing", 3, "0")
    assert first == mutants.sample("hashing", 3, "0") and len(set(first)) == 3
    monkeypatch.setattr(mutants, "equal", lambda: {first[0].key: "why"})
    assert first[0] not in mutants.sample("hashing", 100, "0")


@pytest.mark.parametrize("line", ["import {}", "import json, {}.inner", "from {}.inner import name"])
def test_modules_of_libraries_that_are_not_installed_are_not_drawn(file: Path, line: str) -> None:
    file.write_text(line.format("no_such_library"))
    assert mutants.sources("room") == []
    file.write_text(line.format("email"))
    assert mutants.sources("room") == [file]


def test_the_list_of_equal_faults_names_some_that_exist() -> None:
    for key, reason in mutants.equal().items():
        assert key in {one.key for one in mutants.mutants(mutants.SOURCES / key.split("  ")[0])}
        assert reason


def test_the_tests_of_a_room_begin_with_those_named_like_the_module() -> None:
    names = [one.stem for one in mutants.tests("ops", "norm")]
    assert names[0] == "test_norm" and "test_contraction" in names
    assert {"ops", "kernels", "portable", "quantized"} <= set(mutants.rooms())


def test_the_command_tells_how_many_were_caught_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, mutants.__file__, "--room", "hashing", "--count", "1", "--json", "found.json"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("1 of 1 caught\n")
    assert json.loads((tmp_path / "found.json").read_text())["hashing"]["mutants"] == 1
    assert [one.name for one in tmp_path.iterdir()] == ["found.json"]


def test_ctrl_c_ends_the_runs_and_removes_their_copies(tmp_path: Path) -> None:
    command = [sys.executable, mutants.__file__, "--room", "hashing", "--count", "1"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        while process.poll() is None and not any(tmp_path.glob("*/*/sitecustomize.py")):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not any(tmp_path.iterdir())


def test_the_tests_that_enter_a_function_are_noted_and_run_first(tmp_path: Path) -> None:
    """The slow ones of them last. Noted are those that start a process, too, with a fork server or without."""
    made = "hashed_once(dataclasses.make_dataclass('Made', ['x'], frozen=True))"
    begin = "import dataclasses, os, time\nfrom lowp.hashing import hashed_once\n"
    process = "get_context('forkserver').Process(target=print); one.start(); one.join()"
    one, other = f"os.environ['LOWP_PLACE'] or time.sleep(1.5), {made}", f"hash({made}(1))"
    files = {
        "both": f"{begin}def test_one(): {one}\ndef test_other(): {other}\n",
        "child": "import subprocess\ndef test_child(): subprocess.run(['true'])\n",
        "server": f"from multiprocessing import get_context\ndef test_server(): one = {process}\n",
        "neither": "def test_neither(): pass\n",
    }
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    found = mutants.mutants(mutants.SOURCES / "hashing.py")
    inner, outer = (
        next(one.place for one in found if one.change.startswith(line)) for line in ("return int(found)", "return cls")
    )
    imported = "hashing.py:1"
    reached = tmp_path / "reached.json"
    reached.write_text(json.dumps([inner, outer, imported]))

    def order(place: str) -> list[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(mutants.TESTS),
            "LOWP_REACHED": str(reached),
            "LOWP_PLACE": place,
        }
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "reached"]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return re.findall(r"::test_(\w+) PASSED", result.stdout)

    every = ["one", "other", "child", "neither", "server"]
    assert order("") == every
    one, other = "test_both.py::test_one", "test_both.py::test_other"
    processes = ["test_child.py::test_child", "test_server.py::test_server"]
    assert json.loads(reached.read_text()) == {
        inner: [other],
        outer: [one, other],
        imported: [],
        "processes": processes,
        "slow": [one],
    }
    rest = ["child", "neither", "server"]
    assert order(imported) == ["other", *rest, "one"]
    assert order(outer) == ["other", "one", *rest] and order(inner) == ["other", *rest, "one"]


def test_files_of_which_no_test_enters_a_function_or_starts_a_process_do_not_run() -> None:
    entered, imported = (mutants.Mutant("step/guard.py", line, "1  ->  2", 0, 1, "2", "1") for line in (1, 2))
    found = {
        entered.place: ["tests/step/test_misuse.py::test_one", "tests/step/test_guard.py::test_two"],
        imported.place: [],
        "processes": ["tests/step/test_journal.py::test_three"],
    }
    with mutants.Runs(1) as runs:
        runs.reached("step").write_text(json.dumps(found))
        names = [one.stem for one in runs.files("step", entered)]
        assert names == ["test_guard", "test_journal", "test_misuse"]
        assert runs.files("step", imported) == mutants.tests("step", "guard")
        assert runs.files("step", None) == mutants.tests("step")
