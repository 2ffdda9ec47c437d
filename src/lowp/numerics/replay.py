"""A step that runs again under a trace: every operation that made a number infinite or NaN, and what it was made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from lowp.compat import private
from lowp.nested import tensors_of
from lowp.numerics.models import Models
from lowp.numerics.modes import Paths, numbers_of, source_line
from lowp.ops.table import name_of

_DispatchMode = cast(type, private("torch.utils._python_dispatch.TorchDispatchMode"))
_current_node = cast(Callable[[], Any], private("torch._C._current_autograd_node"))

# ops that write the infinity they are given, or one that they stand for: a mask, not a fault
_FILLS = frozenset("masked_fill full full_like fill new_full scalar_tensor lift_fresh constant_pad_nd where".split())
_ALIASES = frozenset("alias detach lift_fresh view view_as values _values".split())
_MARK = "lowp_place"
_OUTSIDE = "a tensor made outside of torch's operations"


@dataclass(frozen=True)
class Place:
    """Where in the user's program an operation belongs: the op as it was called, the module's path, the line."""

    op: str
    module: str
    line: str


@dataclass
class Event:
    """An operation that gave an infinite or NaN number. `parents` are those that had given it its own."""

    order: int
    operation: str
    place: Place
    phase: str
    nan: int
    inf: int
    inputs: list[dict[str, Any]]
    parents: list[Event] = field(default_factory=list)
    finite_inputs: bool = True
    nan_inputs: bool = False
    fills: bool = False

    @property
    def is_outside(self) -> bool:
        """Whether the numbers were there before any operation ran."""
        return self.phase == "given"

    def read(self, nan: int, parent: Event | None) -> None:
        """Note an input that was not finite, and what made it so."""
        self.finite_inputs, self.nan_inputs = False, self.nan_inputs or nan > 0
        if parent is not None and parent is not self:
            self.parents.append(parent)

    def ancestors(self) -> list[Event]:
        """This event and all that led to it, in the order in which they ran."""
        found: dict[int, Event] = {}
        waiting: list[Event] = [self]
        while waiting:
            one = waiting.pop()
            if id(one) not in found:
                found[id(one)] = one
                waiting.extend(one.parents)
        return sorted(found.values(), key=lambda one: one.order)


def state_of(x: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite."""
    if not (x.is_floating_point() or x.is_complex()) or not x.numel() or x.is_meta:
        return 0, 0
    x = numbers_of(x.detach())
    nan = int(torch.isnan(x).sum())
    return nan, int((~torch.isfinite(x)).sum()) - nan


def ranges_of(tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Shape, dtype, and smallest and largest number of each tensor."""
    found = []
    for one in tensors[:6]:
        entry: dict[str, Any] = {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch.")}
        if one.numel() and not one.is_complex() and not one.is_meta:
            wide = numbers_of(one.detach()).double()
            kept = wide[torch.isfinite(wide)]
            if kept.numel():
                entry.update(smallest=float(kept.min()), largest=float(kept.max()), zeros=int((kept == 0).sum()))
            entry["nan"], entry["inf"] = state_of(wide)
        found.append(entry)
    return found


class Trace:
    """What a replay finds: the events in order, and which tensor each one's numbers are in."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.events: list[Event] = []
        self.current: Place | None = None
        self.line = ""  # of what is computed again from a tape; '' where the user's own code runs
        self._bad: dict[int, tuple[Event, Tensor]] = {}  # by address; the tensor is kept, so that no other gets it

    def event_of(self, x: Tensor) -> Event | None:
        """What last gave a tensor's memory a number that is not finite."""
        found = self._bad.get(address := _address(x))
        if found is None or _address(found[1]) != address:  # its memory was given back, as FSDP does with parameters
            return None
        return found[0]

    def give(self, x: Tensor, what: str) -> None:
        """Note a tensor that was there before: of the batch, or a parameter."""
        nan, inf = state_of(x)
        if (not nan and not inf) or _address(x) in self._bad:
            return
        only_minus = not nan and not bool((numbers_of(x.detach()) == math.inf).any())
        event = self._add(what, Place(what, "", ""), "given", (nan, inf), [x])
        event.fills = not nan and (only_minus or x.ndim == 0)
        self._bad[_address(x)] = (event, x)

    def came_in(self, x: Tensor) -> None:
        """Note an argument that is not finite and that no operation is known to have made so: foreign code has."""
        if not any(state_of(x)):
            return
        node = x.grad_fn
        known = self.event_of(x)
        if known is None:
            self.give(x, _OUTSIDE)
            known = self.events[-1]
            known.place = Place(_OUTSIDE, self.paths.current, source_line())
        if known.operation == _OUTSIDE and isinstance(node, BackwardCFunction):
            known.operation, known.phase = _node_name(node), "forward"
            known.place = _marks(node).get(_MARK) or Place(_node_name(node), self.paths.current, source_line())

    def ran(self, operation: str, given: list[tuple[Tensor, tuple[int, int]]], results: list[Tensor]) -> None:
        """Note an operation whose result is not finite."""
        bad = [(one, state) for one in results if any(state := state_of(one))]
        if not bad or (operation in _ALIASES and all(_address(one) in self._bad for one, _ in bad)):
            return
        nan, inf = map(sum, zip(*(state for _, state in bad), strict=True))
        event = self._add(operation, *self._place_of(operation), (nan, inf), [one for one, _ in given])
        for one, state in given:
            if any(state):
                event.read(state[0], self.event_of(one))
        fills = event.finite_inputs or (bool(event.parents) and all(one.fills for one in event.parents))
        event.fills = not nan and operation in _FILLS and fills
        for one, _ in bad:
            self._bad[_address(one)] = (event, one)

    def _place_of(self, operation: str) -> tuple[Place, str]:
        """Where the running operation belongs, and in which pass."""
        node = _current_node()
        if node is None:
            return self.current or Place(operation, self.paths.current, ""), "forward"
        return _marks(node).get(_MARK) or Place(_node_name(node), "", ""), "backward"

    def _add(self, operation: str, place: Place, phase: str, state: tuple[int, int], given: list[Tensor]) -> Event:
        event = Event(len(self.events), operation, place, phase, *state, ranges_of(given))
        self.events.append(event)
        return event

    def mark(self, results: Any, place: Place) -> None:
        """Let the nodes of the graph that a call has made know where they belong, unless they do already."""
        waiting = [one.grad_fn for one in tensors_of(results) if one.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if _MARK in _marks(node) or type(node).__name__ == "AccumulateGrad":
                continue
            _marks(node)[_MARK] = place
            waiting.extend(one for one, _ in node.next_functions if one is not None)


def _address(x: Tensor) -> int:
    """Where the numbers of a tensor lie; views, and a sparse tensor and its values, have one address."""
    return numbers_of(x.detach()).untyped_storage().data_ptr()


def _marks(node: Any) -> dict[str, Place]:
    """What a node of the graph carries of ours and of others."""
    found: dict[str, Place] = node.metadata
    return found


def _node_name(node: Any) -> str:
    name = str(node.name())
    return name.removesuffix("0").removesuffix("Backward") or name


class _Operations(_DispatchMode):  # type: ignore[misc, valid-type]
    """Sees every operation that torch carries out, forward and backward."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at what it gave."""
        kwargs = kwargs or {}
        given = [(one, state_of(one)) for one in tensors_of((args, kwargs))]
        result = func(*args, **kwargs)
        namespace, _, name = str(func).partition(".")
        operation = name.partition(".")[0].rstrip("_") if namespace == "aten" else f"{namespace}::{name.split('.')[0]}"
        if not operation.startswith(("empty", "new_empty")):
            self.trace.ran(operation, given, tensors_of(result))
        return result


class _Calls(TorchFunctionMode):
    """Sees the ops as the user calls them, which gives operations their names, modules and lines."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call and mark what it made."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return func(*args, **kwargs)
        trace, line = self.trace, self.trace.line or source_line()
        given = tensors_of((args, kwargs))
        for one in given:
            trace.came_in(one)
            if one.grad_fn is not None:  # of a Function of the user's
                trace.mark(one, Place(_node_name(one.grad_fn), trace.paths.current, line))
        place = Place(name_of(func), trace.paths.current, line)
        before, trace.current = trace.current, place
        try:
            result = func(*args, **kwargs)
        finally:
            trace.current = before
        trace.mark(result, place)
        return result


@contextmanager
def _functions(trace: Trace) -> Iterator[None]:
    """Mark what Functions of the user's have made with the line that called them, which no mode sees."""
    plain = torch.autograd.Function.__dict__["apply"]  # a class method, from torch 2.15 on of C

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        place = Place(cls.__name__, trace.paths.current, source_line())
        result = plain.__get__(None, cls)(*args, **kwargs)
        trace.mark(result, place)
        return result

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", plain)  # noqa: B010


@contextmanager
def tracing(trace: Trace, models: Models) -> Iterator[None]:
    """Trace what runs in this block."""
    paths = trace.paths

    def left(module: nn.Module, result: Any) -> None:
        for one in tensors_of(result):
            if one.grad_fn is not None:
                trace.mark(one, Place(_node_name(one.grad_fn), paths.current, ""))

    for name, parameter in models.named_parameters():
        trace.give(parameter.detach(), f"parameter {name}")
    for name, buffer in models.named_buffers():
        trace.give(buffer, f"buffer {name}")
    with ExitStack() as stack:
        stack.callback(paths.follow(left=left))
        stack.enter_context(_functions(trace))
        stack.enter_context(_Operations(trace))
        stack.enter_context(_Calls(trace))
        yield
