"""Processes that are started for training runs, and Ctrl-C."""

from __future__ import annotations

import signal

import forked
import pytest

STARTING = """
import multiprocessing, os, signal
from lowp.recipes.runs import interrupts_left_to_us

received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
multiprocessing.set_forkserver_preload([])  # of torch, which the tests preload
context = multiprocessing.get_context({kind!r})
process = context.Process(target=signal.raise_signal, args=(signal.SIGINT,))
with interrupts_left_to_us():
    process.start()
    os.kill(os.getpid(), signal.SIGINT)
process.join()
print(process.exitcode, len(received))
"""


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
@pytest.mark.parametrize("kind", ["forkserver", "spawn"])
def test_ctrl_c_ends_no_process_that_is_just_starting_and_reaches_the_parent(kind: str) -> None:
    ended = forked.run("-c", STARTING.format(kind=kind))
    assert (ended.stdout, ended.stderr) == ("0 1\n", "")
