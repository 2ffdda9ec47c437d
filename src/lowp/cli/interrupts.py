"""Ctrl-C as a wish that is granted between two steps, or within two seconds; a second one is granted at once."""

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

PATIENCE = 1.5  # seconds in which work may come to an end by itself
_SHOW_CURSOR = "\x1b[?25h"  # which a progress bar hides


class Interrupts:
    """``with Interrupts() as interrupts``: `interrupts()` tells whether Ctrl-C (or SIGTERM) has come.

    Work that asks `interrupts()` ends by itself and keeps what it has; where that takes longer than `PATIENCE` seconds,
    `keeping`, which says what is being done, is written to stderr, and a second signal ends it. Work that has not asked
    by then, since a step of it takes longer, is ended where it is: `last_words()`, which says what is left of it, is
    written to stderr and the process ends with `exit_code`; files are as the last write, which is atomic, has left
    them, and no lock or part of one stays. What handled the signals before handles them again afterwards. Outside the
    main thread nothing is changed.
    """

    def __init__(self, last_words: Callable[[], str] = lambda: "interrupted", keeping: str = "clearing up") -> None:
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
        """The code that shells report for the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.received or signal.SIGINT)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
            # A handler in Python waits for the end of the call into C that is running, a backward for instance; the
            # number of the signal is written here at once.
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
        """In a thread: end the process when a signal has come and nobody has asked for it in time, or at a second."""
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
        """Return the next signal that is ours; None at the end of the block."""
        while numbers := heard.recv(1):
            if numbers[0] in self._before:
                return numbers[0]
        return None

    def _end(self, number: int) -> None:
        """End the process with the last words, whatever its main thread is doing."""
        cursor = _SHOW_CURSOR if sys.stderr.isatty() else ""
        os.write(2, f"{cursor}{self._last_words()}\n".encode())
        files.remove_own()
        os._exit(128 + number)
