"""Which regions a thread is in, and how regions follow code to other places: modules, checkpoints, worker threads.

torch knows no way to hand a function mode to a recomputation or to a worker thread. The hooks here stand in the one
private place each where torch.utils.checkpoint and torch.nn.parallel take the function that they run later. They are
set when the first region with a policy of its own is entered, and outside such regions they do nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lowp.compat import private
from lowp.errors import Misuse
from lowp.exponents import Spots, Trail
from lowp.region.engine import Engine
from lowp.region.paths import ModulePath

_EnableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C._EnableTorchFunction"))

__all__ = ["Entry", "current", "follow_modules", "install", "is_in", "pop", "push"]


@dataclass
class Entry:
    """One entry of a region: what runs it, and what was there before, to be restored."""

    region: Any
    engine: Engine | None = None
    outer_active: bool = False
    before: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    audit: Any = None
    follows_modules: bool = False


class _Local(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_local = _Local()


def push(entry: Entry) -> Entry | None:
    """Enter: put the region to rest that this thread is in, and return its entry."""
    outer = current()
    if outer is not None and outer.engine is not None:
        entry.outer_active, outer.engine.active = outer.engine.active, False
    _local.entries.append(entry)
    return outer


def pop(region: object) -> Entry:
    """Leave: take away the innermost entry of a region, and let the one around it go on."""
    index = next((i for i in reversed(range(len(_local.entries))) if _local.entries[i].region is region), None)
    if index is None:
        raise Misuse(f"{region!r} is left in a thread that has not entered it, or twice")
    entry = _local.entries.pop(index)
    outer = _local.entries[index - 1] if index else None
    if outer is not None and outer.engine is not None:
        outer.engine.active = entry.outer_active
    return entry


def is_in(region: object) -> bool:
    """Whether this thread is in a region."""
    return any(entry.region is region for entry in _local.entries)


def current() -> Entry | None:
    """Return the innermost entry of this thread."""
    return _local.entries[-1] if _local.entries else None


# -- module paths -------------------------------------------------------------------------------------------------


class _ModuleHooks:
    """Global module hooks, present while any thread is in a region that follows modules."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._handles: list[RemovableHandle] = []

    def change(self, by: int) -> None:
        with self._lock:
            self._count += by
            if self._count and not self._handles:
                self._handles = [
                    register_module_forward_pre_hook(_enter_module),
                    register_module_forward_hook(_leave_module, always_call=True),
                ]
            elif not self._count:
                for handle in self._handles:
                    handle.remove()
                self._handles = []


_module_hooks = _ModuleHooks()


def follow_modules(begin: bool) -> None:
    """Begin or end to tell this thread's region where in the model it is."""
    _module_hooks.change(1 if begin else -1)


def _enter_module(module: nn.Module, arguments: Any) -> None:
    entry = current()
    if entry is not None and entry.engine is not None:
        if entry.engine.spots is not None and entry.engine.path.outermost is None:
            entry.engine.spots.enter(module, arguments)
        entry.engine.path.enter(module)
        entry.engine.move()


def _leave_module(module: nn.Module, arguments: Any, output: Any) -> None:
    entry = current()
    if entry is not None and entry.engine is not None:
        entry.engine.path.leave()
        entry.engine.move()


# -- recomputation and worker threads -----------------------------------------------------------------------------


class Repeats:
    """Gives each run of a checkpointed function its spots: those around it first, then copies of where it began.

    Every run but the first writes under the exponents of the first.
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
        """Return what a function that is called here needs; None where nothing is written under places."""
        entry = current()
        spots = None if entry is None or entry.engine is None else entry.engine.spots
        return None if spots is None else cls(spots)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """The first run is that of this thread within its entry."""
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
    """Return the function bound to this thread's region: it runs there wherever and whenever it is called.

    Outside any region, in a region without rules, and where the user has switched torch.autocast off, that is the
    function itself. `path` is where in the model it runs (by default where this thread is now); `repeats` gives each
    run its spots, which otherwise are copies of those here.
    """
    entry = current()
    if entry is None or entry.engine is None or not entry.engine.active or not entry.engine.is_ours():
        return function
    region, place = entry.region, entry.engine.path.copy() if path is None else path
    here = None if entry.engine.spots is None else entry.engine.spots.copy()
    spots: Callable[[], Spots | None] = repeats or (lambda: None if here is None else here.copy())

    def run(*args: Any, **kwargs: Any) -> Any:
        with _EnableTorchFunction():  # a backward that unpacks its tensors behind a shield must not disable this
            region.enter(place.copy(), spots())
            try:
                return function(*args, **kwargs)
            finally:
                region.leave(strict=False)

    return run


@cache
def install() -> None:
    """Let checkpoints and DataParallel's workers run their functions in the region they were called in."""
    checkpoint = sys.modules["torch.utils.checkpoint"]
    generator = cast(Callable[..., Any], private("torch.utils.checkpoint._checkpoint_without_reentrant_generator"))
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
        # The function itself enters the region; torch.autocast with the region's dtype may not exist on the CPU.
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
        "_checkpoint_without_reentrant_generator": non_reentrant,
        "CheckpointFunction": CheckpointFunction,
        "_get_autocast_kwargs": autocast_keywords,
    }.items():
        setattr(checkpoint, name, value)
    parallel = cast(Any, sys.modules["torch.nn.parallel.parallel_apply"])
    parallel.threading = SimpleNamespace(Thread=Thread, Lock=threading.Lock)
