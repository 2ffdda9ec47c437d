"""A region as a decorator: functions, generators, coroutines and asynchronous generators run in it, step by step.

A generator or coroutine is in the region only while it runs. Its caller and other tasks are not.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

__all__ = ["decorated"]

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
                    step = _bound(steps.athrow, error)
                else:
                    step = _bound(steps.asend, sent)
        finally:
            await _Awaited(region, steps.aclose())

    return run


def _bound(method: Callable[[Any], Any], value: Any) -> Callable[[], Any]:
    return lambda: method(value)


class _Awaited:
    """An awaitable that runs each of its steps in the region."""

    def __init__(self, region: _Region, awaitable: Any) -> None:
        self.region, self.awaitable = region, awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.awaitable if hasattr(self.awaitable, "send") else self.awaitable.__await__()
        return (yield from _stepped(self.region, steps))


def _stepped(region: _Region, steps: Any) -> Generator[Any, Any, Any]:
    """Yield the items of a generator or coroutine. It runs in the region; the code that receives the items does not."""
    step: Callable[[], Any] = _bound(steps.send, None)
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
            step = _bound(steps.throw, error)
        else:
            step = _bound(steps.send, sent)
