"""Lists of functions to call back, and what ends a place in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Callback = TypeVar("Callback")


def listed(callbacks: list[Callback], callback: Callback) -> Callable[[], None]:
    """Add a callback to a list; return what takes it out again, and does nothing where it is gone."""
    callbacks.append(callback)

    def end() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return end
