"""An `__exit__` that leaves the block even if a signal arrives as the method begins.

Python runs signal handlers at the first instruction of every function, before any ``try`` of that function. An
`__exit__` written in Python that is interrupted there has done nothing, so the region stays active. Here ``with`` gets
a method implemented in C, which resumes a generator that is already inside its ``try``.

Python 3.10 also runs signal handlers just before it calls `__exit__` for a block that raised, and then never calls it.
The method object is released, however. That closes the generator, which then leaves the block.
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
    """The latest exit made in this thread: the id of its context and its marks."""

    made: tuple[int, object] = (0, None)


_latest = _Latest()


def exit_of(context: object) -> object:
    """Return the object that identifies the exit of the ``with`` that enters a context; None if there is no ``with``.

    ``with`` looks up `__exit__` just before it calls `__enter__`.
    """
    (identity, marks), _latest.made = _latest.made, (0, None)
    return marks if identity == id(context) else None


class _Block(io.RawIOBase):
    """One ``with``. Its `__exit__` is io.IOBase's: it is implemented in C and only calls `close`."""

    closed = True  # so that releasing the object does not call `close`


class Leaving(Generic[_Entered]):
    """The `__exit__` of a class: `undo` leaves what `find` returns; then `told` is called unless an error was raised.

    `abandoned` takes a result of `exit_of` whose exit was released uncalled and returns what was entered with it, or
    None. `undo` may be called twice. No callback gets the error.
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
        """Return the function that ``with`` calls at its end; for access on the class, the plain function."""
        if context is None:
            return self.leave
        block = _Block()
        block.close = self._begun(context).__next__  # type: ignore[method-assign]
        return block.__exit__

    def leave(self, context: Any, kind: Any, value: Any, traceback: Any) -> None:
        """Leave."""
        next(self._begun(context, kind is None))

    def _begun(self, context: Any, is_clean: bool | None = None) -> Iterator[None]:
        """Return a started generator that leaves when resumed. If `is_clean` is None, `sys` tells of errors."""
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
        except GeneratorExit:  # the exit was released uncalled
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
