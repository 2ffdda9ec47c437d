"""Which generator or coroutine has entered a region: it may be suspended there while other code runs in the thread."""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import FrameType

__all__ = ["is_coroutine", "is_suspended", "suspendable"]

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = contextlib.__file__


def suspendable(depth: int) -> FrameType | None:
    """Return the frame of the generator or coroutine that is `depth` calls up; None for a function's.

    A generator that is a context manager by contextlib stands for the code whose ``with`` runs it.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        if frame.f_code.co_filename == _CONTEXTLIB:
            frame = frame.f_back
            continue
        flags = frame.f_code.co_flags
        if not flags & _SUSPENDABLE:
            return None
        above = frame.f_back
        if flags & inspect.CO_COROUTINE or above is None or above.f_code.co_filename != _CONTEXTLIB:
            return frame
        frame = above
    return None


def is_suspended(frame: FrameType) -> bool:
    """Whether a generator's or coroutine's frame waits to be resumed: nothing has called it now."""
    return frame.f_back is None


def is_coroutine(frame: FrameType) -> bool:
    """Whether a frame is a coroutine's, in whose stead nothing else runs while it is suspended."""
    return bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
