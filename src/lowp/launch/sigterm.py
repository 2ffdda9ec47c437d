"""SIGTERM in the process of a script: the run is told of, and the process then ends by the signal, as Python would.

The script sees nothing of it. While it handles SIGTERM itself, this does nothing; while it does not, `signal.getsignal`
and `signal.signal` answer SIG_DFL, which is what it would find without lowp, and SIG_DFL is what its children begin
with. Neither ``finally`` nor `atexit` runs, as in Python. Like Ctrl-C, the signal is answered between two
instructions of Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any, cast

__all__ = ["tell_first"]


def tell_first(tell: Callable[[], None]) -> None:
    """Call `tell` before a SIGTERM that the script does not handle ends this process; not in its children.

    Nothing is done outside the main thread, and where SIGTERM is handled or ignored already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _Ending(tell).install()


class _Ending:
    """The handler in place of SIG_DFL."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell, self._process = tell, os.getpid()
        self._get: Callable[[int], Any] = signal.getsignal
        self._set: Callable[[int, Any], Any] = signal.signal

    def install(self) -> None:
        """Handle the signal, and let the script's questions be answered as without."""

        @wraps(signal.getsignal)
        def getsignal(signalnum: int) -> Any:
            return self._as_python_says(self._get(signalnum))

        @wraps(signal.signal)
        def set_handler(signalnum: int, handler: Any) -> Any:
            is_default = signalnum == signal.SIGTERM and handler == signal.SIG_DFL
            stands_in = is_default and os.getpid() == self._process
            return self._as_python_says(self._set(signalnum, self if stands_in else handler))

        cast(Any, signal).getsignal, cast(Any, signal).signal = getsignal, set_handler
        if hasattr(os, "register_at_fork"):
            # A child has SIG_DFL from its first instruction on: Python drops what a handler gets just after a fork.
            os.register_at_fork(
                before=partial(self._exchange, self, signal.SIG_DFL),
                after_in_parent=partial(self._exchange, signal.SIG_DFL, self),
                after_in_child=partial(self._exchange, self, signal.SIG_DFL),
            )
        self._set(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._get(number) is not self:
            return  # called by a handler of the script's that took it for one to call, too
        self._set(number, signal.SIG_DFL)  # a second one ends the process at once
        if os.getpid() == self._process:
            with contextlib.suppress(BaseException):
                self._tell()
        os.kill(os.getpid(), number)

    def _as_python_says(self, handler: Any) -> Any:
        return signal.SIG_DFL if handler is self else handler

    def _exchange(self, old: Any, new: Any) -> None:
        if self._get(signal.SIGTERM) == old:
            with contextlib.suppress(ValueError):  # outside the main thread
                self._set(signal.SIGTERM, new)
