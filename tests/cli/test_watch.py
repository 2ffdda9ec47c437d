"""`lowp watch`: a file that a monitor writes, on a terminal and elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from report.looks import record

from lowp.cli import main
from lowp.monitoring.log import JsonLines

PATIENCE = 60.0  # seconds for a terminal to show what it should


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a file of a run of four looks that goes on."""
    path = tmp_path / "run.jsonl"
    JsonLines(path, {"model": "Network"}).close(0)
    header = path.read_text().splitlines()[0]
    path.write_text("".join(f"{line}\n" for line in [header, *(json.dumps(record(step)) for step in range(4))]))
    return path


# -- the command ------------------------------------------------------------------------------------------------------
def test_where_there_is_no_terminal_the_present_state_is_printed_once(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run.jsonl  Network, step 3, 4 steps/s, 1 alarm\n")
    assert "blocks.0" in out and "50%" in out and "N101 step 2: blocks.1.norm: 100% of the updates" in out


def test_the_present_state_is_printed_as_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["loss"], found["scale"], found["ended"]) == (3, 0.125, 512.0, False)
    assert found["groups"]["blocks.0"]["update_to_weight"] == 1e-3
    assert found["alarms"][0]["layer"] == "blocks.1.norm"


def test_what_is_no_file_of_a_monitor_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    for name, words in (("none.jsonl", "there is no file"), ("notes.txt", "is not a file of a lowp monitor")):
        assert main(["watch", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert words in error and "lowp run --monitor=" in error and error.count("\n") == 1
    assert main(["watch", "--every", "0", str(tmp_path / "notes.txt")]) == 2
    assert "--every 0: give seconds, more than 0" in capsys.readouterr().err


# -- a terminal -------------------------------------------------------------------------------------------------------
@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a function that types into a terminal of tmux and waits for words on its screen."""
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("needs tmux")
    command = [tmux, "-S", str(tmp_path / "socket"), "-f", "/dev/null"]

    def call(*arguments: str) -> str:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    def typed(keys: tuple[str, ...], words: str) -> str:
        if keys:
            call("send-keys", "-t", "test", *keys)
        ends = time.monotonic() + PATIENCE
        while words not in (screen := call("capture-pane", "-p", "-t", "test")):
            assert time.monotonic() < ends, screen
            time.sleep(0.05)
        return screen

    call("-u", "new-session", "-d", "-s", "test", "-x", "100", "-y", "30", "env", "LC_ALL=C.UTF-8", "PS1=$ ", "sh")
    try:
        yield typed
    finally:
        call("kill-server")


def test_a_running_job_is_shown_live_in_a_terminal(log: Path, terminal: Callable[..., str]) -> None:
    command = f"{sys.executable} -m lowp watch run.jsonl --every 0.05; echo code:$?"
    screen = terminal((command, "Enter"), "step 3, ")
    assert "loss " in screen and "█" in screen and "blocks.1" in screen and "(lowp explain N101)" in screen
    with log.open("a") as file:
        file.write(json.dumps(record(4)) + "\n" + json.dumps(record(5))[:20])  # the second is being written
    assert "step 4, " in terminal((), "step 4, ")
    assert "code:130" in terminal(("C-c",), "code:130")
    terminal((command, "Enter"), "$ ")
    with log.open("a") as file:
        file.write(json.dumps(record(5))[20:] + "\n" + json.dumps({"ended": 6}) + "\n")
    screen = terminal((), "code:0")
    assert "ended after 6 steps" in screen and "Traceback" not in screen
