"""How a region follows code into modules, checkpoints, worker threads, steps of optimizers and TorchScript modules.

torch has no interface to pass a function mode to a recomputation or a worker thread. The hooks here replace the private
functions by which torch.utils.checkpoint and torch.nn.parallel receive the function to run later. They are installed
when the first region with a policy of its own is entered, and do nothing outside such regions.

No region's rules apply to an optimizer's step, wherever it is called. torch runs hooks before and after every
optimizer's step, but no hook if the step raises. So the region is suspended while the frame of the step's call is on
the stack.

A function mode does not see the ops of a TorchScript module: its interpreter supports torch.autocast only. If
contractions write fp16 or bf16, it casts by torch's own lists; any other format would be ignored silently, of which
the region warns.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowp.compat import plain_when_run, private, skipped_by_compilers
from lowp.exponents import Spots, Trail
from lowp.region.engine import Engine
from lowp.region.entries import Entry, current, current_engine, followed_engine
from lowp.region.paths import ModulePath

_EnableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C._EnableTorchFunction"))
_Function = TypeVar("_Function", bound=Callable[..., Any])

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


class _Hooks(threading.local):
    """This thread's module hooks, the same in every region: torch.compile compiles again for a hook it has not seen.

    Each thread has its own, so that threads share no state that needs a lock: an exception raised by a signal just
    after a lock was taken would leave it locked. torch's own numbers of hooks are not negative.
    """

    def __init__(self) -> None:
        self.number = -threading.get_ident()
        self.entries: list[Entry] = []  # those that have the hooks
        self.enter, self.leave = partial(_enter_module, self.number), partial(_leave_module, self.number)


def follow_modules(entry: Entry) -> None:
    """Have this thread's module hooks keep an entry's module path up to date."""
    # Hooks are also called for a compiled module's wrapper. That is harmless: wrappers are transparent to paths.
    if _OF_WRAPPERS not in warnings.filters:
        warnings.filterwarnings("ignore", message=_OF_WRAPPERS[1].pattern, category=UserWarning)
    entry.follows = True  # set first: `unfollow_modules` must also run if a signal interrupts the lines below
    _here.entries.append(entry)
    _pre_hooks[_here.number] = _here.enter
    _hooks_always_called[_here.number] = True
    _hooks[_here.number] = _here.leave


def unfollow_modules(entry: Entry) -> None:
    """Remove this thread's module hooks with the last entry that has them. A second call changes nothing."""
    if not entry.follows:
        return
    if entry in _here.entries:
        _here.entries.remove(entry)
    if not _here.entries:
        for hooks in (_pre_hooks, _hooks, _hooks_always_called):
            hooks.pop(_here.number, None)


@plain_when_run
def _enter_module(number: int, module: nn.Module, arguments: Any) -> None:
    engine = followed_engine() if number == _here.number else None  # a hook is of one thread
    if engine is not None:
        is_compiling = torch.compiler.is_compiling()
        is_outermost = engine.path.enter(module, None if is_compiling else sys._getframe(1))
        if is_outermost and engine.spots is not None and not is_compiling:
            engine.spots.enter(module, arguments)
        if engine.uses_paths:  # else all paths share their plans
            engine.move()


@plain_when_run
def _leave_module(number: int, module: nn.Module, arguments: Any, output: Any) -> None:
    engine = followed_engine() if number == _here.number else None  # a hook is of one thread
    if engine is not None:
        engine.path.leave(module)
        if engine.uses_paths:
            engine.move()


_here = _Hooks()


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
        engine = current_engine()
        return None if engine is None or engine.spots is None else cls(engine.spots)

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Use the first run's spots in this thread's entry within the context."""
        engine = current_engine()
        assert engine is not None
        before, engine.spots = engine.spots, self()
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
    """Install, once, what follows a region into other threads, optimizers' steps and TorchScript modules."""
    _follow_checkpoints()
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
    _note_scripted_modules()


def _follow_checkpoints() -> None:
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


# -- steps of optimizers ----------------------------------------------------------------------------------------
def at_rest(function: _Function) -> _Function:
    """Return the function wrapped so that the region around its call is suspended: for a step and all its parts.

    No compiler follows it.
    """

    @skipped_by_compilers
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        engine = current_engine()
        if engine is None or engine.rests():
            return function(*args, **kwargs)
        engine.resting = sys._getframe()
        try:
            return function(*args, **kwargs)
        finally:
            engine.resting = None

    return cast(_Function, run)


def _begin(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    engine = current_engine()
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
    engine = current_engine()
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


# -- TorchScript modules ----------------------------------------------------------------------------------------
_told: set[str] = set()
_rounding: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _note_scripted_modules() -> None:
    """Note the calls of TorchScript modules in regions that cannot round their ops, and warn once per policy."""

    def __call__(self: torch.jit.ScriptModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _note_scripted(self)
        return nn.Module.__call__(self, *args, **kwargs)

    torch.jit.ScriptModule.__call__ = __call__  # type: ignore[method-assign]


def _note_scripted(module: torch.jit.ScriptModule) -> None:
    engine = current_engine()
    if engine is None or not engine.active or not engine.rulebook.policy.rules:
        return
    if engine.dtype is not torch.float32 or not torch.is_autocast_enabled("cpu") or _rounds_by_itself(module):
        return
    name = module.original_name
    engine.rulebook.missed_script(name)
    policy = engine.rulebook.policy.name or "unnamed"
    if policy not in _told:
        _told.add(policy)
        warnings.warn(
            f"nothing that module {name} computes is rounded as policy {policy} says: TorchScript runs it, whose ops "
            "no region sees. Call the module itself, without torch.jit.script or torch.jit.trace, or compile it with "
            "torch.compile",
            UserWarning,
            stacklevel=3,
        )


def _rounds_by_itself(module: torch.jit.ScriptModule) -> bool:
    """Whether the module's graph contains lowp's casts, because it was traced within a region."""
    known = _rounding.get(module)
    if known is None:
        known = _rounding[module] = "lowp::" in str(module.inlined_graph)
    return known
