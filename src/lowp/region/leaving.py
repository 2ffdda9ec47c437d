"""`__exit__` that leaves although a signal comes just as it begins.

Python answers signals at the first instruction of every function, before any of its own ``try``. An ``__exit__`` in
Python that is interrupted there has done nothing, and what it was to leave stays in force. Here ``with`` is given a
method in C, which goes on with a generator that already stands in its ``try``.

Python 3.10 also answers signals just before it calls the `__exit__` of a block that an exception leaves, and then never
calls it. The method is forgotten, though, and the generator, which is closed by that, leaves what the block entered.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Leaving", "exit_of"]

_Entered = TypeVar("_Entered")
_Exit = Callable[[Any, Any, Any], None]


class _Latest(threading.local):
    """The latest exit that this thread has made: the identity of its context, and its marks."""

    made: tuple[int, object] = (0, None)


_latest = _Latest()


def exit_of(context: object) -> object:
    """Return what stands for the exit of the ``with`` that enters a context now; None where there is no ``with``.

    It looks up `__exit__` just before it calls `__enter__`.
    """
    (identity, marks), _latest.made = _latest.made, (0, None)
    return marks if identity == id(context) else None


class _Block(io.RawIOBase):
    """One ``with``. Its `__exit__` is io.IOBase's: in C, and all that it does is to call `close`."""

    closed = True  # so that nothing is closed where the object is only forgotten


class Leaving(Generic[_Entered]):
    """The `__exit__` of a class: `undo` leaves what `find` finds, `told` is called afterwards unless an error leaves.

    `abandoned` returns what was entered with an exit (of `exit_of`) that is forgotten uncalled, or None. `undo` may be
    called twice. None of them gets the error.
    """

    def __init__(
        self,
        find: Callable[[Any], _Entered],
        undo: Callable[[_Entered], None],
        told: Callable[[Any, _Entered], None],
        abandoned: Callable[[object], _Entered | None],
    ) -> None:
        self._find, self._undo, self._told, self._abandoned = find, undo, told, abandoned

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
        _latest.made = id(context), marks
        return steps

    def _steps(self, context: Any, is_clean: bool | None, marks: list[str]) -> Iterator[None]:
        handled, entered = id(sys.exc_info()[1]), None
        try:
            yield
            entered = self._find(context)
            self._undo(entered)
        except GeneratorExit:  # nobody came to leave
            entered = self._abandoned(marks)
            if entered is not None:
                self._undo(entered)
            return
        except BaseException:
            if marks:
                self._undo(self._find(context) if entered is None else entered)
            raise
        if is_clean or (is_clean is None and id(sys.exc_info()[1]) == handled):
            self._told(context, entered)
        yield
