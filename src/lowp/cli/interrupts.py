"""Handling of Ctrl-C: work ends between two steps or after `PATIENCE` seconds, and at once at a second Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lowp import files

PATIENCE = 1.5  # seconds after which work that has not ended is ended
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides the cursor


class Interrupts:
    """A handler of Ctrl-C and SIGTERM: in ``with Interrupts() as interrupts``, `interrupts()` is true after a signal.

    Work that calls `interrupts()` is expected to end by itself and to keep its results. If it takes longer than
    `PATIENCE` seconds, `keeping`, which describes the work in progress, is written to stderr, and a second signal ends
    the process. If `interrupts()` is not called within that time, because a step takes longer, the process is ended:
    `last_words()`, which describes what was saved, is written to stderr, and the exit code is `exit_code`. Files remain
    as the last atomic write left them, and no lock or partial file remains. The previous signal handlers are restored
    at the end of the block. Outside the main thread the block has no effect.
    """

    def __init__(self, last_words: Callable[[], str] = lambda: "interrupted", keeping: str = "cleaning up") -> None:
        self.received: int | None = None
        self._last_words, self._keeping = last_words, keeping
        self._before: dict[int, Any] = {}
        self._answered, self._over = threading.Event(), threading.Event()
        self._sockets: tuple[socket.socket, socket.socket] | None = None

    def __call__(self) -> bool:
        if self.received is None:
            return False
        self._answered.set()
        return True

    @property
    def exit_code(self) -> int:
        """The exit code that shells report for the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.received or signal.SIGINT)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
            # A Python handler runs only after the current call into C, such as a backward pass; the number of the
            # signal is written to this socket at once.
            receiver, sender = self._sockets = socket.socketpair()
            sender.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._wait_for_answer, args=(receiver,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._answered.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._sockets is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._sockets[1].close()
            self._sockets = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def _wait_for_answer(self, receiver: socket.socket) -> None:
        """Run in a thread: end the process if no call follows a signal within `PATIENCE`, or at a second signal."""
        with receiver:
            number = self._next(receiver)
            if number is None:
                return
            ends = time.monotonic() + PATIENCE
            if not self._answered.wait(PATIENCE):
                self._end(number)
            if not self._over.wait(max(0.0, ends - time.monotonic())):
                os.write(2, f"{self._keeping}; Ctrl-C once more ends it at once\n".encode())
            if self._next(receiver) is not None and not self._over.wait(PATIENCE):
                self._end(number)

    def _next(self, receiver: socket.socket) -> int | None:
        """Return the next SIGINT or SIGTERM; None at the end of the block."""
        while numbers := receiver.recv(1):
            if numbers[0] in self._before:
                return numbers[0]
        return None

    def _end(self, number: int) -> None:
        """Write the last words and end the process, whatever the main thread is doing."""
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
        os.write(2, f"{cursor}{self._last_words()}\n".encode())
        files.remove_own()
        os._exit(128 + number)
