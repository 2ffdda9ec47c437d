"""The entries of regions in a thread: the state that each of them saved, and which one applies when coroutines wait."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from types import FrameType
from typing import Any, cast

import torch

from lowp.compat import accelerator, constant_when_compiled, private
from lowp.errors import Misuse
from lowp.region.engine import Engine

State = tuple[str, bool, torch.dtype]

# torch's original functions: `_answer_for_who_asks` replaces some of them in torch
_is_enabled, _get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_set_enabled, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
_SWITCHES = tuple(name for name in dir(torch) if re.fullmatch(r"(is|get|set)_autocast_(\w+_)?(enabled|dtype)", name))


@dataclass(eq=False, slots=True)
class Entry:
    """One entry of a region: its engine, the state before it, and the generator or coroutine that entered it.

    While a coroutine waits, its entries are parked: the state of `before` is restored, other code may change it, and
    `within` holds the state to restore when the coroutine continues.
    """

    region: Any
    frame: FrameType | None = None
    engine: Engine | None = None
    outer: Entry | None = None  # the active entry when this one was made
    outer_active: bool = False
    before: list[State] = field(default_factory=list)
    within: list[State] = field(default_factory=list)
    is_parked: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    audit: Any = None
    follows: bool = False  # whether module hooks are registered
    exit: object = None  # identifies the `with` that made the entry

    @property
    def is_elsewhere(self) -> bool:
        """Whether a waiting coroutine made the entry, so that it does not apply to the code that runs."""
        return self.frame is not None and is_suspended(self.frame) and is_coroutine(self.frame)


class _Local(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_local = _Local()


def push(entry: Entry) -> None:
    """Enter: save torch.autocast's state and deactivate the region that the thread is in."""
    if entry.frame is not None:
        _answer_for_who_asks()
    settle()
    entry.outer = current()
    entry.before = autocast_state() if isinstance(entry.region, torch.autocast) else present_state()
    engine = None if entry.outer is None else entry.outer.engine
    entry.outer_active = engine is not None and engine.active
    _local.entries.append(entry)
    if engine is not None:
        engine.active = False


def find(region: object) -> Entry:
    """Return the innermost active entry of a region in this thread. Raises Misuse if there is none."""
    settle()
    for entry in reversed(_local.entries):
        if entry.region is region and not entry.is_parked:
            return entry
    raise Misuse(f"{region!r} was left in a thread or task that has not entered it, or was left twice")


def abandoned(exit: object) -> Entry | None:
    """Return this thread's entry that was made by the ``with`` of this exit, or None."""
    return next((one for one in _local.entries if one.exit is exit), None)


def remove(entry: Entry) -> None:
    """Leave: restore the state before the entry and reactivate the region around it. A second call changes nothing.

    If regions end in another order than they began, an entry made within this one stays active and takes over the state
    that this entry would restore.
    """
    entries = _local.entries
    if entry not in entries:
        return
    inner = [one for one in entries if one.outer is entry]

    def leave() -> None:
        for one in inner:
            one.before, one.outer, one.outer_active = entry.before, entry.outer, entry.outer_active
        if not entry.is_parked and all(one.is_parked for one in inner):
            _restore(entry)
        if entry in entries:
            entries.remove(entry)

    _whole(leave)
    if entries and not any(one.engine is not None for one in entries):
        for one in entries:  # no engine can detect task switches: the state applies to the whole thread, as torch's
            _unpark(one)


def _restore(entry: Entry) -> None:
    """Restore the state before an entry."""
    set_autocast_state(entry.before)
    if entry.outer is not None and entry.outer.engine is not None:
        entry.outer.engine.active = entry.outer_active


def _whole(change: Callable[[], None]) -> None:
    """Make a change that can be repeated. If a signal interrupts the change, make it again, then raise."""
    try:
        change()
    except BaseException:
        change()
        raise


def is_in(region: object) -> bool:
    """Whether this thread is in a region."""
    return any(entry.region is region for entry in _local.entries)


def current() -> Entry | None:
    """Return the innermost entry that applies to the code that runs in this thread."""
    entries = _local.entries
    if not entries:
        return None
    if (last := entries[-1]).frame is None or not last.is_elsewhere:  # most entries have no frame
        return last
    return next((entry for entry in reversed(entries) if not entry.is_elsewhere), None)


def current_engine() -> Engine | None:
    """Return the engine of that entry; None if there is no entry, or one without rules."""
    entries = _local.entries
    if not entries:
        return None
    entry = entries[-1] if entries[-1].frame is None else current()  # `current`, in no function
    return None if entry is None else entry.engine


def followed_engine() -> Engine | None:
    """Return the engine whose path this thread's module hooks update; None if no entry has hooks.

    An inner entry without hooks (a policy without paths) shares the path of the outer one. Compiled code, which writes
    at no sites, follows modules only if rules have paths.
    """
    entries = _local.entries
    if not entries:
        return None
    entry = entries[-1] if entries[-1].frame is None else current()  # as in `current_engine`
    engine = None if entry is None else entry.engine
    if entry is None or engine is None or (torch.compiler.is_compiling() and not engine.uses_paths):
        return None
    return engine if entry.follows or following() is not None else None


def following() -> Entry | None:
    """Return the innermost entry with module hooks that applies to the code that runs."""
    return next((one for one in reversed(_local.entries) if one.follows and not one.is_elsewhere), None)


# -- coroutines and generators ------------------------------------------------------------------------------------

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = contextlib.__file__


def suspendable(depth: int) -> FrameType | None:
    """Return the frame of the generator or coroutine that is `depth` calls up; None for a plain function.

    For a generator that is a contextlib context manager, this is the frame of the code whose ``with`` runs it.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        if frame.f_code.co_filename == _CONTEXTLIB:
            frame = frame.f_back
            continue
        flags = frame.f_code.co_flags
        if not flags & _SUSPENDABLE:
            return None
        above = frame.f_back
        if flags & inspect.CO_COROUTINE or above is None or above.f_code.co_filename != _CONTEXTLIB:
            return frame
        frame = above
    return None


def is_suspended(frame: FrameType) -> bool:
    """Whether the frame of a generator or coroutine waits to be resumed: it has no caller."""
    return frame.f_back is None


def is_coroutine(frame: FrameType) -> bool:
    """Whether a frame is a coroutine's: while the coroutine is suspended, its caller does not run in its place."""
    return bool(frame.f_code.co_flags & inspect.CO_COROUTINE)


def settle() -> None:
    """Park the entries of waiting coroutines and resume the entries of the running ones."""
    entries = _local.entries
    for entry in entries:
        if entry.frame is not None:
            break
    else:  # the usual case: no generator and no coroutine has made one
        return
    for entry in reversed(entries):
        if entry.is_elsewhere:
            _park(entry)
    for entry in entries:
        if not entry.is_elsewhere:
            _unpark(entry)


def _park(entry: Entry) -> None:
    if entry.is_parked:
        return
    within = autocast_state()

    def park() -> None:
        entry.within, entry.is_parked = within, True
        if entry.engine is not None:
            entry.engine.active = False
        _restore(entry)

    _whole(park)


def _unpark(entry: Entry) -> None:
    if not entry.is_parked:
        return
    before = autocast_state()

    def unpark() -> None:
        entry.before, entry.is_parked = before, False
        if entry.outer is not None and entry.outer.engine is not None:
            entry.outer.engine.active = False
        if entry.engine is not None:
            entry.engine.active = True
        set_autocast_state(entry.within)

    _whole(unpark)


def look(entry: Entry) -> None:
    """Update which entries apply. Called before each op in an entry that a generator or coroutine made."""
    if entry.is_elsewhere is not entry.is_parked:
        settle()
    elif not entry.is_parked:
        check_generators(entry)


def check_generators(entry: Entry) -> None:
    """Raise Misuse if a generator runs that entered a region before this entry's generator, which is suspended.

    The thread is in the later region, and nothing tells which of the two is meant.
    """
    if entry.frame is None or not is_suspended(entry.frame) or is_coroutine(entry.frame):
        return
    for outer in _local.entries[: _local.entries.index(entry)]:
        if outer.frame is not None and not is_suspended(outer.frame):
            raise Misuse(
                f"{outer.frame.f_code.co_name}() continued in {outer.region!r} while {entry.frame.f_code.co_name}() "
                f"has entered {entry.region!r} later and is suspended in it: regions belong to a thread, not to a "
                "generator. Leave the region before yield, or decorate the generator with it: then it applies only "
                "while the generator runs"
            )


@cache
def _answer_for_who_asks() -> None:
    """Let torch's autocast getters and setters work on the state of the generator or coroutine that calls them.

    Ops reach the region through its function mode; these functions do not.
    """

    def asked(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                settle()
                for entry in _local.entries[-1:]:
                    check_generators(entry)
            return original(*args, **kwargs)

        return function

    for name in _SWITCHES:
        function = asked(original := getattr(torch, name))
        function = function if name.startswith("set") else constant_when_compiled(function)
        setattr(torch, name, function)
        if (op := _op_when_scripted(original)) is not None:
            _run_when_scripted(function, op)


# -- torch.autocast -----------------------------------------------------------------------------------------------


@cache
def devices() -> tuple[str, ...]:
    """Return the devices whose torch.autocast shows a region's state: CPU, CUDA (the default) and the accelerator."""
    kind = accelerator()
    names = ["cpu", "cuda", *([] if kind is None else [kind])]
    return tuple(dict.fromkeys(name for name in names if torch.amp.is_autocast_available(name)))


def autocast_state() -> list[State]:
    """Return (device, enabled, dtype) of torch.autocast for each device; [] while torch.compile traces.

    During tracing only torch.autocast itself, whose state the compiler follows, restores the state.
    """
    if torch.compiler.is_compiling():
        return []
    return present_state()


def present_state() -> list[State]:
    """Return the same, while torch.compile traces, too: it follows the entry of a region where it has given up."""
    return [(device, _is_enabled(device), _get_dtype(device)) for device in devices()]


def set_autocast_state(state: list[State]) -> None:
    """Switch torch.autocast on or off for each device."""
    for device, enabled, dtype in state:
        _set_enabled(device, enabled)
        _set_dtype(device, dtype)


# -- modes --------------------------------------------------------------------------------------------------------

_op_when_scripted = cast(Callable[[Any], str | None], private("torch.jit._builtins._find_builtin"))
_run_when_scripted = cast(Callable[[Any, str], None], private("torch.jit._builtins._register_builtin"))
_count_of_modes = cast(Callable[[], int], private("torch._C._len_torch_function_stack"))
_mode_at = cast(Callable[[int], Any], private("torch._C._get_function_stack_at"))
_push_mode = cast(Callable[[Any], None], private("torch._C._push_on_torch_function_stack"))
_pop_mode = cast(Callable[[], Any], private("torch._C._pop_torch_function_stack"))
dispatch_modes = cast(Callable[[], list[Any]], private("torch.utils._python_dispatch._get_current_dispatch_mode_stack"))


def take_off(engine: Engine) -> None:
    """Remove a mode from this thread's stack, wherever it is in it; a mode that is not on the stack is ignored."""
    depth = _count_of_modes()
    if depth and _mode_at(depth - 1) is engine:
        _pop_mode()
        return
    if not any(_mode_at(place) is engine for place in range(depth)):
        return
    above = []
    while (mode := _pop_mode()) is not engine:
        above.append(mode)
    for mode in reversed(above):
        _push_mode(mode)
