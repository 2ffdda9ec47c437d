"""Blocks of code in a region: an `__exit__` that a signal cannot prevent, and functions decorated with a region.

Python runs signal handlers at the first instruction of every function, before any ``try`` of that function. An
`__exit__` written in Python that is interrupted there has done nothing, so the region stays active. Here ``with`` gets
a method implemented in C, which resumes a generator that is already inside its ``try``.

Python 3.10 also runs signal handlers just before it calls `__exit__` for a block that raised, and then never calls it.
The method object is released, however. That closes the generator, which then leaves the block.

A decorated generator or coroutine is in the region only while it runs. Its caller and other tasks are not.
"""

import inspect
import io
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Generic, TypeVar

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


_Region = AbstractContextManager[object]


def decorated(region: _Region, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function wrapped to run in the region; a generator or coroutine enters at every resumption."""
    if inspect.isasyncgenfunction(function):
        wrapper = _asynchronous_generator
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine
    else:
        wrapper = _function
    return wraps(function)(wrapper(region, function))


def _function(region: _Region, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with region:
            return function(*args, **kwargs)

    return run


def _generator(region: _Region, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with region:
            steps = function(*args, **kwargs)
        return (yield from _stepped(region, steps))

    return run


def _coroutine(region: _Region, function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await _Awaited(region, function(*args, **kwargs))

    return run


def _asynchronous_generator(region: _Region, function: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = function(*args, **kwargs)
        step: Callable[[], Any] = steps.__anext__
        try:
            while True:
                try:
                    item = await _Awaited(region, step())
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step = partial(steps.athrow, error)
                else:
                    step = partial(steps.asend, sent)
        finally:
            await _Awaited(region, steps.aclose())

    return run


class _Awaited:
    """An awaitable that runs each of its steps in the region."""

    def __init__(self, region: _Region, awaitable: Any) -> None:
        self.region, self.awaitable = region, awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.awaitable if hasattr(self.awaitable, "send") else self.awaitable.__await__()
        return (yield from _stepped(self.region, steps))


def _stepped(region: _Region, steps: Any) -> Generator[Any, Any, Any]:
    """Yield the items of a generator or coroutine. It runs in the region; the code that receives the items does not."""
    step: Callable[[], Any] = partial(steps.send, None)
    while True:
        try:
            with region:
                item = step()
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
        except GeneratorExit:
            with region:
                steps.close()
            raise
        except BaseException as error:
            step = partial(steps.throw, error)
        else:
            step = partial(steps.send, sent)
