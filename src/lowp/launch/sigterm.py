"""SIGTERM in a script's process: lowp reports first, then the process ends by the signal, as in plain Python.

The script does not notice. If the script handles SIGTERM itself, this does nothing. Otherwise `signal.getsignal` and
`signal.signal` return SIG_DFL, as without lowp, and children start with SIG_DFL. Neither ``finally`` nor `atexit` runs,
as in plain Python. Like Ctrl-C, the signal is handled between two Python instructions.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any, cast


def tell_first(tell: Callable[[], None]) -> None:
    """Call `tell` before a SIGTERM that the script does not handle ends this process; not in its children.

    Does nothing outside the main thread, or if SIGTERM is already handled or ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        _Ending(tell).install()


class _Ending:
    """The handler that replaces SIG_DFL."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell, self._process = tell, os.getpid()
        self._get: Callable[[int], Any] = signal.getsignal
        self._set: Callable[[int, Any], Any] = signal.signal

    def install(self) -> None:
        """Install the handler, and make `signal.getsignal` and `signal.signal` answer as without it."""

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
            # A child must have SIG_DFL from its first instruction on: Python drops a signal that a handler gets just
            # after a fork.
            os.register_at_fork(
                before=partial(self._exchange, self, signal.SIG_DFL),
                after_in_parent=partial(self._exchange, signal.SIG_DFL, self),
                after_in_child=partial(self._exchange, self, signal.SIG_DFL),
            )
        self._set(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._get(number) is not self:
            return  # called by the script's own handler, which took it for a previous handler
        self._set(number, signal.SIG_DFL)  # a second SIGTERM ends the process at once
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
