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
from functools import cache, partial
from types import FrameType, SimpleNamespace
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
from lowp.region.frames import is_coroutine, is_suspended
from lowp.region.paths import ModulePath

_EnableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C._EnableTorchFunction"))

__all__ = ["Entry", "current", "find", "follow_modules", "install", "is_in", "push", "remove", "unfollow_modules"]


State = tuple[str, bool, torch.dtype]


@dataclass(eq=False)
class Entry:
    """One entry of a region: what runs it, what was there before, and the generator or coroutine that entered it."""

    region: Any
    frame: FrameType | None = None
    engine: Engine | None = None
    outer_active: bool = False
    before: list[State] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    audit: Any = None
    hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the code that entered is a coroutine that waits, so that what runs now is none of its own."""
        return self.frame is not None and is_suspended(self.frame) and is_coroutine(self.frame)


class _Local(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_local = _Local()


def push(entry: Entry) -> None:
    """Enter: note what torch.autocast is, and put the region to rest that this thread is in."""
    entries = _local.entries
    entry.before = autocast_state()
    if entries and (engine := entries[-1].engine) is not None:
        entry.outer_active = engine.active
        entries.append(entry)
        engine.active = False
    else:
        entries.append(entry)


def find(region: object) -> Entry:
    """Return the innermost entry of a region in this thread; raise Misuse where there is none."""
    found = next((entry for entry in reversed(_local.entries) if entry.region is region), None)
    if found is None:
        raise Misuse(f"{region!r} is left in a thread that has not entered it, or twice")
    return found


def remove(entry: Entry) -> None:
    """Leave: restore what was before, and let the region around go on. Done again, this changes nothing.

    Where regions end in another order than they began, as those of interleaved tasks, the one that was entered next
    stays in force, and restores in its turn what was before this one.
    """
    entries = _local.entries
    index = next((i for i, one in enumerate(entries) if one is entry), None)
    if index is None:
        return
    if index + 1 < len(entries):
        above = entries[index + 1]
        above.before, above.outer_active = entry.before, entry.outer_active
    else:
        set_autocast_state(entry.before)
        if index and (engine := entries[index - 1].engine) is not None:
            engine.active = entry.outer_active
    del entries[index]


def is_in(region: object) -> bool:
    """Whether this thread is in a region."""
    return any(entry.region is region for entry in _local.entries)


def current() -> Entry | None:
    """Return the innermost entry of what runs now in this thread."""
    entries = _local.entries
    if not entries or not entries[-1].is_elsewhere:
        return entries[-1] if entries else None
    return next((entry for entry in reversed(entries) if not entry.is_elsewhere), None)


# -- torch.autocast -----------------------------------------------------------------------------------------------


@cache
def devices() -> tuple[str, ...]:
    """Return the devices whose torch.autocast tells of a region: the CPU, CUDA (the default) and the one present."""
    accelerator = torch.accelerator.current_accelerator()
    names = ["cpu", "cuda", *([] if accelerator is None else [accelerator.type])]
    return tuple(dict.fromkeys(name for name in names if torch.amp.is_autocast_available(name)))


def autocast_state() -> list[State]:
    """Return whether torch.autocast is on, and its dtype, for each device; nothing while torch.compile traces.

    There torch.autocast alone, whose state the compiler follows, restores what it saw.
    """
    if torch.compiler.is_compiling():
        return []
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices()]


def set_autocast_state(state: list[State]) -> None:
    """Switch torch.autocast on or off for each device."""
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


# -- modes --------------------------------------------------------------------------------------------------------

_function_modes = cast(Callable[[], list[Any]], private("torch.overrides._get_current_function_mode_stack"))
_push_mode = cast(Callable[[Any], None], private("torch.overrides._push_mode"))
_pop_mode = cast(Callable[[], Any], private("torch.overrides._pop_mode"))
dispatch_modes = cast(Callable[[], list[Any]], private("torch.utils._python_dispatch._get_current_dispatch_mode_stack"))


def take_off(engine: Engine) -> None:
    """Take a mode off this thread's stack, wherever it lies there; one that is not there is off already."""
    modes = _function_modes()
    if not any(mode is engine for mode in modes):
        return
    above = []
    while (mode := _pop_mode()) is not engine:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)


# -- generators and coroutines ------------------------------------------------------------------------------------


def run_elsewhere(entry: Entry, function: Callable[[], Any]) -> Any:
    """Run what does not belong to the coroutine that has entered and waits: as if it had not entered."""
    entries, now = _local.entries, autocast_state()
    index = entries.index(entry)
    engine = entries[index - 1].engine if index else None
    set_autocast_state(entry.before)
    if engine is not None:
        engine.active = entry.outer_active
    try:
        return function()
    finally:
        set_autocast_state(now)
        if engine is not None:
            engine.active = False


def check_generators(entry: Entry) -> None:
    """Raise Misuse where a generator runs that has entered a region, while one that entered later is suspended.

    The region of the later one is what the thread is in, and nothing tells which of them the op is meant for.
    """
    for outer in _local.entries[: _local.entries.index(entry)]:
        if outer.frame is not None and not is_suspended(outer.frame) and entry.frame is not None:
            raise Misuse(
                f"{outer.frame.f_code.co_name}() goes on in {outer.region!r} while {entry.frame.f_code.co_name}() has "
                f"entered {entry.region!r} later and is suspended in it: regions belong to a thread, not to a "
                "generator. Leave the region before yield, or decorate the generator with it: then it is in force only "
                "while the generator runs"
            )


# -- module paths -------------------------------------------------------------------------------------------------


def follow_modules(entry: Entry) -> None:
    """Begin to tell an entry where in the model it is.

    Each entry has module hooks of its own, so that threads share nothing that would need a lock: an exception that a
    signal raises just after a lock was taken leaves it taken.
    """
    entry.hooks.append(register_module_forward_pre_hook(partial(_enter_module, entry)))
    entry.hooks.append(register_module_forward_hook(partial(_leave_module, entry), always_call=True))


def unfollow_modules(entry: Entry) -> None:
    """End to tell an entry where in the model it is; to end what has not begun changes nothing."""
    while entry.hooks:
        entry.hooks[-1].remove()  # first, so that one that a signal interrupts is removed again
        entry.hooks.pop()


def _engine_behind(hooked: Entry) -> Engine | None:
    """Return the engine that a hook of this entry moves: none in another thread, or where an inner entry has hooks.

    The inner entry may have none, as a policy without paths has not, and yet share the path of the outer one.
    """
    entry = current()
    if entry is None or entry is hooked:
        return None if entry is None else entry.engine
    following = next((one for one in reversed(_local.entries) if one.hooks and not one.is_elsewhere), None)
    return entry.engine if following is hooked else None


def _enter_module(entry: Entry, module: nn.Module, arguments: Any) -> None:
    engine = _engine_behind(entry)
    if engine is not None:
        if engine.spots is not None and engine.path.outermost is None:
            engine.spots.enter(module, arguments)
        engine.path.enter(module, None if torch.compiler.is_compiling() else sys._getframe(1))
        engine.move()


def _leave_module(entry: Entry, module: nn.Module, arguments: Any, output: Any) -> None:
    engine = _engine_behind(entry)
    if engine is not None:
        engine.path.leave(module)
        engine.move()


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
