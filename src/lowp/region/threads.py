"""How a region follows code into modules, checkpoints and worker threads.

torch has no interface to pass a function mode to a recomputation or a worker thread. The hooks here replace the private
functions by which torch.utils.checkpoint and torch.nn.parallel receive the function to run later. They are installed
when the first region with a policy of its own is entered, and do nothing outside such regions.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowp.compat import private
from lowp.exponents import Spots, Trail
from lowp.region.engine import Engine
from lowp.region.entries import Entry, current, following
from lowp.region.paths import ModulePath

_EnableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C._EnableTorchFunction"))

__all__ = ["Repeats", "bound", "follow_modules", "install", "unfollow_modules"]

_pre_hooks = cast(dict[int, Any], private("torch.nn.modules.module._global_forward_pre_hooks"))
_hooks = cast(dict[int, Any], private("torch.nn.modules.module._global_forward_hooks"))
_hooks_always_called = cast(dict[int, bool], private("torch.nn.modules.module._global_forward_hooks_always_called"))


# -- module paths -------------------------------------------------------------------------------------------------


_OF_WRAPPERS: Any = (
    "ignore",
    re.compile("Using `torch.compile.module.` when there are global hooks", re.IGNORECASE),
    UserWarning,
    None,
    0,
)


def follow_modules(entry: Entry) -> None:
    """Register module hooks that keep an entry's module path up to date.

    Each entry has its own hooks, so that threads share no state that needs a lock: an exception raised by a signal just
    after a lock was taken would leave it locked.
    """
    # Hooks are also called for a compiled module's wrapper. That is harmless: wrappers are transparent to paths.
    if _OF_WRAPPERS not in warnings.filters:
        warnings.filterwarnings("ignore", message=_OF_WRAPPERS[1].pattern, category=UserWarning)
    entry.follows = True  # set first: `unfollow_modules` must also run if a signal interrupts the lines below
    register_module_forward_pre_hook(partial(_enter_module, entry))
    register_module_forward_hook(partial(_leave_module, entry), always_call=True)


def unfollow_modules(entry: Entry) -> None:
    """Remove an entry's module hooks, if it has any.

    The hooks are searched in torch's registries: a signal may have come before their handles were known.
    """
    if not entry.follows:
        return
    for hooks in (_pre_hooks, _hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, partial) and hook.args[:1] and hook.args[0] is entry:
                _hooks_always_called.pop(number, None)
                hooks.pop(number, None)
    entry.follows = False


def _engine_behind(hooked: Entry) -> Engine | None:
    """Return the engine whose path a hook of this entry updates. None in another thread or if an inner entry has hooks.

    An inner entry without hooks (a policy without paths) shares the path of the outer one. Compiled code, which writes
    at no sites, follows modules only if rules have paths.
    """
    entry = current()
    engine = None if entry is None else entry.engine
    if engine is None or (torch.compiler.is_compiling() and not engine.uses_paths):
        return None
    return engine if entry is hooked or following() is hooked else None


def _enter_module(entry: Entry, module: nn.Module, arguments: Any) -> None:
    engine = _engine_behind(entry)
    if engine is not None:
        is_compiling = torch.compiler.is_compiling()
        if engine.spots is not None and engine.path.outermost is None and not is_compiling:
            engine.spots.enter(module, arguments)
        engine.path.enter(module, None if is_compiling else sys._getframe(1))
        engine.move()


def _leave_module(entry: Entry, module: nn.Module, arguments: Any, output: Any) -> None:
    engine = _engine_behind(entry)
    if engine is not None:
        engine.path.leave(module)
        engine.move()


# -- recomputation and worker threads -----------------------------------------------------------------------------


class Repeats:
    """Gives each run of a checkpointed function its spots: first the enclosing ones, then copies of the initial state.

    Every later run uses the exponents of the first run.
    """

    def __init__(self, outer: Spots) -> None:
        self._trail = outer.trail or Trail(torch.is_grad_enabled())
        self._first: Spots | None = outer.within(self._trail)
        self._later = outer.copy(self._trail)

    def __call__(self) -> Spots:
        """Return the spots of the next run."""
        spots, self._first = self._first, None
        if spots is None:
            self._trail.is_repeated = True
            spots = self._later.copy(self._trail)
        return spots

    @classmethod
    def here(cls) -> Repeats | None:
        """Return the Repeats of a function that is called here; None if nothing is written at sites."""
        entry = current()
        spots = None if entry is None or entry.engine is None else entry.engine.spots
        return None if spots is None else cls(spots)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Use the first run's spots in this thread's entry within the context."""
        entry = current()
        assert entry is not None and entry.engine is not None
        engine, before = entry.engine, entry.engine.spots
        engine.spots = self()
        try:
            yield
        finally:
            engine.spots = before


def bound(
    function: Callable[..., Any], path: ModulePath | None = None, repeats: Repeats | None = None
) -> Callable[..., Any]:
    """Return the function bound to this thread's region, so that every call runs in that region.

    Outside any region, in a region without rules, and where the user has switched torch.autocast off, the function
    itself is returned. `path`: the module path of the calls, by default the present one. `repeats` provides the spots
    of each run; without it each run gets a copy of the present spots.
    """
    entry = current()
    if entry is None or entry.engine is None or not entry.engine.active or not entry.engine.is_ours():
        return function
    region, place = entry.region, entry.engine.path.copy() if path is None else path
    here = None if entry.engine.spots is None else entry.engine.spots.copy()
    spots: Callable[[], Spots | None] = repeats or (lambda: None if here is None else here.copy())

    def run(*args: Any, **kwargs: Any) -> Any:
        # a backward that unpacks its tensors behind a shield must not disable this
        with _EnableTorchFunction(), region.resume(place.copy(), spots()):
            return function(*args, **kwargs)

    return run


@cache
def install() -> None:
    """Let checkpoints and DataParallel's workers run their functions in the region in which they were called."""
    checkpoint = sys.modules["torch.utils.checkpoint"]
    run_later = "_checkpoint_without_reentrant_generator"
    if hasattr(checkpoint, f"{run_later}_impl"):  # what torch 2.14 and later call
        run_later = f"{run_later}_impl"
    generator = cast(Callable[..., Any], private(f"torch.utils.checkpoint.{run_later}"))
    reentrant = cast(Any, private("torch.utils.checkpoint.CheckpointFunction"))
    keywords = cast(Callable[..., Any], private("torch.utils.checkpoint._get_autocast_kwargs"))

    class CheckpointFunction(reentrant):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, run_function: Callable[..., Any], *args: Any) -> Any:
            return super().apply(bound(run_function, repeats=Repeats.here()), *args)

    def autocast_keywords(*args: Any, **kwargs: Any) -> Any:
        given = keywords(*args, **kwargs)
        if bound(keywords) is keywords:
            return given
        # The function itself enters the region; torch.autocast may not support the region's dtype on the CPU.
        return tuple(None if one is None else {**one, "enabled": False} for one in given)

    def non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        repeats = Repeats.here()
        function = bound(function, repeats=repeats)
        with nullcontext() if repeats is None else repeats.first_run():  # while this generator is suspended
            yield from generator(function, *args, **kwargs)

    class Thread(threading.Thread):
        def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
            super().__init__(target=bound(target, ModulePath()), args=args)

    for name, value in {
        run_later: non_reentrant,
        "CheckpointFunction": CheckpointFunction,
        "_get_autocast_kwargs": autocast_keywords,
    }.items():
        setattr(checkpoint, name, value)
    parallel = cast(Any, sys.modules["torch.nn.parallel.parallel_apply"])
    parallel.threading = SimpleNamespace(Thread=Thread, Lock=threading.Lock)
