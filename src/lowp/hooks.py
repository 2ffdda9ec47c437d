"""Callbacks: lists of them, and hooks that copies and pickles of a module do not have."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

Callback = TypeVar("Callback")

_NOTHING = nullcontext().__exit__  # takes anything, does nothing, and is pickled without a trace of lowp


def listed(callbacks: list[Callback], callback: Callback) -> Callable[[], None]:
    """Add a callback to a list. Return a function that removes it, and does nothing if it is already removed."""
    callbacks.append(callback)

    def end() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return end


class Uncopied(partial[Any]):
    """A hook that copies and pickles of its module do not have, nor the object that the hook belongs to."""

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return _NOTHING

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")
