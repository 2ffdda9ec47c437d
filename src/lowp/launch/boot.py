"""The first code of lowp in a process of `lowp run`: it waits until the script imports torch, and for SIGTERM.

``lowp-launch.pth`` beside the installed package, or ``site/sitecustomize.py``, calls it when Python starts, in every
process whose environment names a precision. A process that never imports torch pays only for this module. The process
that leads a run, for instance a launcher, reports at its end on the processes that it has started.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import FrameType, ModuleType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])
_started = False


def start() -> None:
    """Install lowp's patches after torch has been imported; once per process."""
    global _started
    if _started:
        return
    _started = True
    _lead()
    when_imported("torch", _install)


def _lead() -> None:
    """Let the leader of a run report on the others at its end, unless it imports torch, whose session then reports.

    The modules for the report are imported here: importing them after Ctrl-C has ended the script would change the exit
    code.
    """
    run = os.environ.get("LOWP_RUN", "")
    if f'"leader": {os.getpid()},' not in run:
        return
    from lowp.launch.record import RunSettings, gathered, tell_of_run

    settings = RunSettings.from_environment()
    if settings is None:
        return

    def tell(settings: RunSettings) -> None:
        if settings.leader == os.getpid() and "torch" not in sys.modules and gathered(settings.directory):
            tell_of_run([], settings)

    atexit.register(tell, settings)


def _install() -> None:
    if os.environ.get("LOWP_PROFILE"):
        from lowp.launch import profiling

        profiling.start()
        return
    from lowp.launch import session

    session.start()


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call a function after a module has been executed, now if it has been."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and calls a function after it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # what follows is its own
            loader.exec_module(module)
            self._then()

        if loader is not None:
            loader.exec_module = exec_module
        return spec


def replaces(owner: Any) -> Callable[[Function], Function]:
    """Put the decorated function in the place of a module's or class's one of its name, and let it look like that."""

    def put(function: Function) -> Function:
        original = getattr(owner, function.__name__)
        setattr(owner, function.__name__, wraps(original)(function))
        return function

    return put


# -- SIGTERM -----------------------------------------------------------------------------------------------------------
def tell_first(tell: Callable[[], None]) -> None:
    """Call `tell` before a SIGTERM that the script does not handle ends this process; not in its children.

    The script does not notice. If the script handles SIGTERM itself, this does nothing. Otherwise `signal.getsignal`
    and `signal.signal` return SIG_DFL, as without lowp, and children start with SIG_DFL. Neither ``finally`` nor
    `atexit` runs, as in plain Python. Like Ctrl-C, the signal is handled between two Python instructions.
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
