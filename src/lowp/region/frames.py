"""Which generator or coroutine entered a region: it may be suspended there while other code runs in the thread."""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import FrameType

__all__ = ["is_coroutine", "is_suspended", "suspendable"]

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = contextlib.__file__


def suspendable(depth: int) -> FrameType | None:
    """Return the frame of the generator or coroutine that is `depth` calls up; None for a plain function.

    For a generator that is a contextlib context manager, this is the frame of the code whose ``with`` runs it.
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
    """Whether the frame of a generator or coroutine waits to be resumed: it has no caller."""
    return frame.f_back is None


def is_coroutine(frame: FrameType) -> bool:
    """Whether a frame is a coroutine's: while the coroutine is suspended, its caller does not run in its place."""
    return bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
