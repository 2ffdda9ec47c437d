"""Ctrl-C ends work between two steps, or within two seconds if a step takes longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest

from lowp.cli import interrupts as interrupts_module
from lowp.cli.interrupts import Interrupts

# Something in C that takes minutes and lets other threads run, as a backward does: no handler in Python is called.
LONG = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


def stopped(code: str, number: int = signal.SIGINT) -> tuple[int, str]:
    """Run code in a new process until it prints a line, send it a signal; return its exit code and stderr.

    Its stdin is closed when it has written a line to stderr, for code that waits for that.
    """
    environment = {**os.environ, "PYTHONPATH": forked.SOURCES}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        alarm = threading.Timer(forked.PATIENCE, process.kill)
        alarm.start()
        try:
            said = process.stderr.readline()
            process.stdin.close()
            said += process.stderr.read()
            return process.wait(), said
        finally:
            alarm.cancel()
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_takes_minutes_is_ended_with_the_last_words(number: int) -> None:
    code = f"""
from lowp.cli.interrupts import Interrupts
with Interrupts(lambda: "two runs are kept") as interrupts:
    print("ready", flush=True)
    {LONG}
"""
    assert stopped(code, number) == (128 + number, "two runs are kept\n")


def test_what_takes_long_to_keep_is_told_in_time_and_kept() -> None:
    code = """
import sys, time
from lowp.cli import interrupts as module
module.PATIENCE = 0.2
with module.Interrupts(keeping="a.pt is being written") as interrupts:
    print("ready", flush=True)
    while not interrupts():
        time.sleep(0.01)
    sys.stdin.read()
sys.exit(interrupts.exit_code)
"""
    assert stopped(code) == (130, "a.pt is being written; Ctrl-C once more ends it at once\n")


def test_a_second_signal_ends_what_takes_minutes_to_keep_and_leaves_no_files(tmp_path: Path) -> None:
    code = f"""
import os, signal, threading
from pathlib import Path
from lowp import files
from lowp.cli import interrupts as module
module.PATIENCE = 0.2
again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
path = Path({str(tmp_path / "a.pt")!r})
with module.Interrupts(lambda: "a.pt is as it was") as interrupts, files.sole_writer(path), files.replacing(path):
    print("ready", flush=True)
    while not interrupts():
        pass
    again.start()
    {LONG}
"""
    told = "cleaning up; Ctrl-C once more ends it at once\na.pt is as it was\n"
    assert stopped(code) == (130, told)
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_the_work_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_module, "PATIENCE", 600)  # or this process would be ended where it is slow
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts()
        time.sleep(0.05)  # the thread that waited for the answer goes on
        signal.raise_signal(signal.SIGINT)


def test_what_handled_signals_before_handles_them_again() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert not interrupts()
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signal.set_wakeup_fd(-1) == -1
