"""Ctrl-C as a wish that is granted between two steps; a second one is granted at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """``with Interrupts() as interrupts``: `interrupts()` tells whether Ctrl-C (or SIGTERM) has come.

    What handled the signals before handles them again afterwards. Outside the main thread nothing is changed.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """The code that shells report for the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.received or signal.SIGINT)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
