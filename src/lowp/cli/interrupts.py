"""Ctrl-C ends work between two steps, or after two seconds; a second Ctrl-C ends it at once."""

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

__all__ = ["PATIENCE", "Interrupts"]

PATIENCE = 1.5  # seconds after which work that has not ended is ended
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides the cursor


class Interrupts:
    """``with Interrupts() as interrupts``: `interrupts()` returns whether Ctrl-C (or SIGTERM) was received.

    Work that calls `interrupts()` ends by itself and keeps its results; if that takes longer than `PATIENCE` seconds,
    `keeping`, which describes the work in progress, is written to stderr, and a second signal ends it. Work that does
    not call `interrupts()` within that time, because a step takes longer, is ended: `last_words()`, which describes
    what was saved, is written to stderr and the process ends with `exit_code`; files remain as the last atomic write
    left them, and no lock or partial file remains. The previous signal handlers are restored at the end of the block.
    Outside the main thread the block has no effect.
    """

    def __init__(self, last_words: Callable[[], str] = lambda: "interrupted", keeping: str = "cleaning up") -> None:
        self.received: int | None = None
        self._last_words, self._keeping = last_words, keeping
        self._before: dict[int, Any] = {}
        self._answered, self._over = threading.Event(), threading.Event()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._wakeup = -1

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
            # A Python handler runs only after the current call into C, such as a backward; the number of the signal
            # is written here at once.
            heard, told = self._sockets = socket.socketpair()
            told.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._wait_for_answer, args=(heard,), daemon=True).start()
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

    def _wait_for_answer(self, heard: socket.socket) -> None:
        """In a thread: end the process if a signal is not asked for in time, or at a second signal."""
        with heard:
            number = self._next(heard)
            if number is None:
                return
            ends = time.monotonic() + PATIENCE
            if not self._answered.wait(PATIENCE):
                self._end(number)
            if not self._over.wait(max(0.0, ends - time.monotonic())):
                os.write(2, f"{self._keeping}; Ctrl-C once more ends it at once\n".encode())
            if self._next(heard) is not None and not self._over.wait(PATIENCE):
                self._end(number)

    def _next(self, heard: socket.socket) -> int | None:
        """Return the next SIGINT or SIGTERM; None at the end of the block."""
        while numbers := heard.recv(1):
            if numbers[0] in self._before:
                return numbers[0]
        return None

    def _end(self, number: int) -> None:
        """Write the last words and end the process, whatever the main thread is doing."""
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
        os.write(2, f"{cursor}{self._last_words()}\n".encode())
        files.remove_own()
        os._exit(128 + number)
