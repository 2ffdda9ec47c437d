"""`__exit__` that leaves although a signal comes just as it begins.

Python answers signals at the first instruction of every function, before any of its own ``try``. An ``__exit__`` in
Python that is interrupted there has done nothing, and what it was to leave stays in force. Here ``with`` is given a
method in C, which goes on with a generator that already stands in its ``try``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Leaving"]

_Entered = TypeVar("_Entered")
_Exit = Callable[[Any, Any, Any], None]


class _Block(io.RawIOBase):
    """One ``with``. Its `__exit__` is io.IOBase's: in C, and all that it does is to call `close`."""

    closed = True  # so that nothing is closed where the object is only forgotten


class Leaving(Generic[_Entered]):
    """The `__exit__` of a class: `undo` leaves what `find` finds, `told` is called afterwards unless an error leaves.

    `undo` may be called twice. None of them gets the error.
    """

    def __init__(
        self,
        find: Callable[[Any], _Entered],
        undo: Callable[[_Entered], None],
        told: Callable[[Any, _Entered], None],
    ) -> None:
        self._find, self._undo, self._told = find, undo, told

    def __get__(self, context: Any, owner: type) -> Any:
        """Return what ``with`` calls at its end; of the class itself, a function."""
        if context is None:
            return self.leave
        block = _Block()
        block.close = self._begun(context).__next__  # type: ignore[method-assign]
        return block.__exit__

    def leave(self, context: Any, kind: Any, value: Any, traceback: Any) -> None:
        """Leave."""
        next(self._begun(context, kind is None))

    def _begun(self, context: Any, is_clean: bool | None = None) -> Iterator[None]:
        """Return what leaves when it goes on; where it is not known whether an error leaves, `sys` is asked."""
        marks: list[str] = []
        steps = self._steps(context, is_clean, marks)
        next(steps)
        marks.append("entered")
        return steps

    def _steps(self, context: Any, is_clean: bool | None, marks: list[str]) -> Iterator[None]:
        handled, entered = id(sys.exc_info()[1]), None
        try:
            yield
            entered = self._find(context)
            self._undo(entered)
        except GeneratorExit:  # nobody came to leave
            return
        except BaseException:
            if marks:
                self._undo(self._find(context) if entered is None else entered)
            raise
        if is_clean or (is_clean is None and id(sys.exc_info()[1]) == handled):
            self._told(context, entered)
        yield
