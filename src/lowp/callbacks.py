"""Lists of callbacks, and functions that remove a callback from a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Callback = TypeVar("Callback")


def listed(callbacks: list[Callback], callback: Callback) -> Callable[[], None]:
    """Add a callback to a list. Return a function that removes it, and does nothing if it is already removed."""
    callbacks.append(callback)

    def end() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return end
