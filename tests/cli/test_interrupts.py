"""Ctrl-C is answered between two steps, and in two seconds where a step takes longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowp.cli.interrupts import Interrupts

# Something in C that takes minutes and lets other threads run, as a backward does: no handler in Python is called.
LONG = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


def stopped(code: str, repository: Path, number: int = signal.SIGINT) -> tuple[int, str]:
    """Run code in a process of its own until it prints a line, send it a signal; return its exit code and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        try:
            said = process.stderr.read()
            return process.wait(60), said
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_that_takes_minutes_is_ended_with_the_last_words(repository: Path, number: int) -> None:
    code = f"""
from lowp.cli.interrupts import Interrupts
with Interrupts(lambda: "two runs are kept") as interrupts:
    print("ready", flush=True)
    {LONG}
"""
    assert stopped(code, repository, number) == (128 + number, "two runs are kept\n")


def test_work_that_asks_ends_by_itself_however_long_it_takes_to_clear_up(repository: Path) -> None:
    code = """
import sys, time
from lowp.cli import interrupts as module
module.PATIENCE = 0.2
with module.Interrupts() as interrupts:
    print("ready", flush=True)
    while not interrupts():
        time.sleep(0.01)
    time.sleep(1)
sys.exit(interrupts.exit_code)
"""
    assert stopped(code, repository) == (130, "")


def test_a_second_signal_is_granted_at_once() -> None:
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
