"""No region's rules apply to an optimizer's step, wherever it is called.

torch runs hooks before and after every optimizer's step, but no hook if the step raises. So the region is suspended
while the frame of the step's call is on the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp.region.engine import Engine
from lowp.region.entries import current

__all__ = ["at_rest", "install"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


@cache
def install() -> None:
    """Suspend the regions of a thread while an optimizer steps in it."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


def at_rest(function: _Function) -> _Function:
    """Return the function wrapped so that the region around its call is suspended: for a step and all its parts."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        engine = _engine()
        if engine is None or engine.rests():
            return function(*args, **kwargs)
        engine.resting = sys._getframe()
        try:
            return function(*args, **kwargs)
        finally:
            engine.resting = None

    return cast(_Function, run)


def _engine() -> Engine | None:
    entry = current()
    return None if entry is None else entry.engine


def _begin(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    engine = _engine()
    if engine is None:
        return None
    if not engine.rests():
        engine.resting = sys._getframe(1)
    if len(args) > 1 and callable(args[1]):
        return (args[0], _awake(args[1], engine), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _awake(kwargs["closure"], engine)}
    return None


def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    engine = _engine()
    if engine is not None and engine.resting is sys._getframe(1):
        engine.resting = None


def _awake(closure: Callable[..., Any], engine: Engine) -> Callable[..., Any]:
    """Return the closure of a step wrapped so that it computes the loss under the region's rules."""

    @wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        resting, engine.resting = engine.resting, None
        try:
            return closure(*args, **kwargs)
        finally:
            engine.resting = resting

    return run
