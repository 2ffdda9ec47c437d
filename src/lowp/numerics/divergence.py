"""What made a loss or a gradient infinite or NaN: the first operation that did, found by running its step again."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowp.compat import private, unwrapped
from lowp.numerics.modes import Paths, local, put_on, source_line, take_off, tensors_in
from lowp.numerics.record import StepSeen
from lowp.numerics.replay import Event, Trace, state_of, tracing
from lowp.region import entries

__all__ = ["Diagnosis", "Fault", "Moment"]

_tree_map = cast(Callable[[Callable[[Any], Any], Any], Any], private("torch.utils._pytree.tree_map"))
_EXPLODED = 1e3  # weights that have grown so many times over their first size were driven there


@dataclass
class Fault:
    """What was found. `kind`: ``batch``, ``weights``, ``exploding``, ``operation``, or ``unknown``: nothing was."""

    step: int
    what: str
    kind: str
    operation: str = ""
    op: str = ""
    module: str = ""
    line: str = ""
    phase: str = ""
    nan: int = 0
    inf: int = 0
    inputs: list[dict[str, Any]] = field(default_factory=list)
    scale: float | None = None
    hint: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def place(self) -> str:
        """The module and the line in words."""
        module = f"in {self.module}" if self.module else "outside of any submodule"
        return module + (f", {self.line}" if self.line else "")

    def __str__(self) -> str:
        head = f"step {self.step}: the {self.what} {'is' if self.what == 'loss' else 'are'} not finite"
        if self.kind == "unknown":
            return f"{head}. {self.hint}"
        made = " and ".join(f"{count} {word}" for count, word in ((self.nan, "NaN"), (self.inf, "infinite")) if count)
        return f"{head}. First: {self.op} ({self.operation}, {self.phase}) {self.place}: {made}. {self.hint}"


class Moment(TorchFunctionMode):
    """The batch and the random state of a step, and what was computed of the model's output until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.on_backward: Callable[[Tensor], None] = lambda loss: None
        self.loss: Tensor | None = None
        self.model: nn.Module | None = None
        self.given: tuple[Any, Any] = ((), {})
        self.output: Any = None
        self.tape: list[tuple[Callable[..., Any], Any, Any, Any, str]] = []
        self.random: list[Tensor] = []
        self.autocast: list[tuple[str, bool, torch.dtype]] = []
        self.region: Any = None
        self._records = self._is_on = False

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember a call of the model that is about to run."""
        self.model, self.given = model, (args, kwargs)
        self.random = _random_state()
        entry = entries.current()
        inside = entry is not None and entry.engine is not None
        self.region = entry.region if inside and entry is not None else None
        self.autocast = [] if inside else [one for one in entries.autocast_state() if one[1]]
        self.tape.clear()
        self.loss = self.output = None

    def open(self, output: Any, place: int) -> None:
        """Record what is computed of the model's output."""
        self.output, self._records = output, True
        if not self._is_on:
            put_on(self, place)
            self._is_on = True

    def end(self, loss: Tensor) -> None:
        """Note the loss, after which nothing more is recorded."""
        self.loss, self._records = loss, False

    def close(self) -> None:
        """Stop recording; what was recorded is kept until the next call of the model."""
        self._records = False
        if self._is_on:
            take_off(self)
            self._is_on = False

    def forget(self) -> None:
        """Let go of the tensors of a step that has ended."""
        self.tape.clear()
        self.loss = self.output = None
        self.given = ((), {})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call and remember it."""
        if not self._records:
            return func(*args, **(kwargs or {}))
        if func is Tensor.backward:
            self.on_backward(args[0])
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.tape.append((func, args, kwargs or {}, result, source_line()))
        return result


class Diagnosis:
    """Runs a step again and names what was first not finite; the model and the random state are as before after it."""

    def __init__(
        self, moment: Moment, paths: Paths, names: dict[int, str], history: list[StepSeen], scale: float
    ) -> None:
        self._moment, self._names, self._history, self._scale = moment, names, history, scale
        self._trace = Trace(paths)

    def find(self, what: str, step: int, first_weight: float | None = None, unguarded: int = 0) -> Fault:
        """The fault of this step: `what` is the loss or the gradients."""
        fault = Fault(step, what, "unknown", scale=self._scale, history=[asdict(one) for one in self._history])
        model = self._moment.model
        if model is None:
            fault.hint = "The step cannot be run again: the model was not called in it."
            return fault
        last = self._replay(unwrapped(model))
        if last is None:
            fault.hint = (
                "Run again with the same batch and random state, the step was finite: something outside of the "
                "model's call differs, such as random numbers of its own or data that is written in place."
            )
            return fault
        event = _first_cause(last)
        fault.operation, fault.phase, fault.nan, fault.inf = event.operation, event.phase, event.nan, event.inf
        fault.op, fault.module, fault.line = event.place.op, event.place.module, event.place.line
        fault.inputs = event.inputs
        grown = _growth(model, first_weight)
        fault.kind, fault.hint = _judged(event, grown)
        if fault.kind == "weights" and unguarded:
            fault.hint += (
                f" {unguarded} steps were not watched, to stay in the budget: --max-overhead none watches each."
            )
        return fault

    def _replay(self, model: nn.Module) -> Event | None:
        """Run forward, loss and backward again; the event of the loss or of the first gradient that is not finite."""
        moment, trace = self._moment, self._trace
        gradients = [(one, one.grad) for one in model.parameters()]
        buffers = [(one, one.clone()) for one in model.buffers()]
        random = _random_state()
        loss: Any = None
        try:
            model.zero_grad(set_to_none=True)
            _set_random_state(moment.random)
            args, kwargs = _tree_map(_detached, moment.given)
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # what is said of the step was said when it ran
                if "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                self._enter_region(stack)
                for place, given in enumerate(tensors_in((args, kwargs))):
                    trace.give(given, f"the batch (tensor {place} of the model's arguments)")
                for place, given in enumerate(self._own_inputs()):
                    trace.give(given, f"the batch (tensor {place} beside the model)")
                stack.enter_context(tracing(trace, model))
                loss = self._loss_again(model(*args, **kwargs))
                if loss is not None and not any(state_of(loss)):
                    torch.autograd.backward(loss, torch.ones_like(loss))
            return self._last_event(model, loss)
        finally:
            _set_random_state(random)
            for parameter, before in gradients:
                parameter.grad = before
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    def _enter_region(self, stack: ExitStack) -> None:
        moment = self._moment
        if moment.region is not None:
            stack.enter_context(moment.region.going_on())
        for device, _, dtype in moment.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype))

    def _own_inputs(self) -> list[Tensor]:
        """What the loss reads beside the model's output: targets, masks."""
        made = {id(one) for _, _, _, result, _ in self._moment.tape for one in tensors_in(result)}
        made |= {id(one) for one in tensors_in(self._moment.output)} | set(self._names)
        read = [one for _, args, kwargs, _, _ in self._moment.tape for one in tensors_in((args, kwargs))]
        return [one for one in {id(one): one for one in read}.values() if id(one) not in made and one.grad_fn is None]

    def _loss_again(self, output: Any) -> Tensor | None:
        """Compute of the new output what was computed of the old one."""
        moment = self._moment
        new: dict[int, Any] = {}
        for old, one in zip(tensors_in(moment.output), tensors_in(output), strict=False):
            new[id(old)] = one
        for func, args, kwargs, result, line in moment.tape:
            given, named = _tree_map(lambda x: new.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
            if func is torch.Tensor.backward or not tensors_in(result):
                continue
            self._trace.line = line
            again = func(*given, **named)
            for old, one in zip(tensors_in(result), tensors_in(again), strict=False):
                new[id(old)] = one
        self._trace.line = ""
        if moment.loss is None:
            return None
        found = new.get(id(moment.loss))
        return found if isinstance(found, Tensor) and found.requires_grad else None

    def _last_event(self, model: nn.Module, loss: Tensor | None) -> Event | None:
        trace = self._trace
        if loss is not None and any(state_of(loss)):
            return trace.event_of(loss)
        for parameter in reversed(list(model.parameters())):
            if parameter.grad is not None and any(state_of(local(parameter.grad))):
                return trace.event_of(local(parameter.grad))
        return None


def _detached(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def _first_cause(last: Event) -> Event:
    """The first of the events that led to one which made something of numbers that were in order.

    Infinities that were written on purpose, as masks are, are in order; a NaN that is made of them is not.
    """
    ancestors = last.ancestors()
    for one in ancestors:
        if one.fills:
            continue
        made_nan = one.nan > 0 and not one.nan_inputs and all(parent.fills for parent in one.parents)
        if one.is_outside or one.finite_inputs or made_nan or not one.parents:
            return one
    return last


def _growth(model: nn.Module, first: float | None) -> float | None:
    """How many times larger the largest weight is than at the first step."""
    if not first:
        return None
    largest = [float(local(one.detach()).abs().amax()) for one in model.parameters() if one.numel()]
    return max(largest, default=0.0) / first


def _judged(event: Event, growth: float | None) -> tuple[str, str]:
    """What kind of fault an event is, and what to do."""
    if event.is_outside:
        if event.operation.startswith("the batch"):
            return (
                "batch",
                f"{event.operation[0].upper()}{event.operation[1:]} holds it: look at the data of this step.",
            )
        if event.operation.startswith(("parameter", "buffer")):
            return "weights", f"The {event.operation} was not finite before the step: an earlier step wrote it."
    if growth is not None and not growth < _EXPLODED:
        return (
            "exploding",
            f"The largest weight is {growth:.3g} times what it was at the first step: the learning rate is too large.",
        )
    return "operation", _hint(event)


def _hint(event: Event) -> str:
    ranges = "; ".join(f"{one['smallest']:.4g} .. {one['largest']:.4g}" for one in event.inputs if "smallest" in one)
    told = f"Its inputs: {ranges}." if ranges else ""
    advice = next((text for names, text in _HINTS if {event.operation, event.place.op} & names), "")
    dtypes = {one["dtype"] for one in event.inputs}
    if not advice and event.inf and (event.operation in ("_to_copy", "quantize") or dtypes & {"float16"}):
        advice = "That is beyond the largest number of the format: keep this layer in bf16 or fp32, or scale its input."
    if event.phase == "backward" and event.place.op in ("sqrt", "norm", "linalg_norm", "pow", "std"):
        advice = "The derivative at 0 is infinite: add a small number before it."
    return f"{told} {advice}".strip()


_HINTS: list[tuple[set[str], str]] = [
    ({"log", "log2", "log10"}, "The logarithm of 0: clamp its input, or use log_softmax or log1p."),
    ({"div", "reciprocal", "true_divide"}, "A division by 0: add a small number to the divisor."),
    ({"_softmax", "softmax", "_safe_softmax"}, "A row that is masked as a whole has no largest element."),
    (
        {"std", "var", "std_mean", "var_mean"},
        "The deviation of one element is not defined: give more, or correction=0.",
    ),
    ({"exp", "expm1"}, "The exponential is beyond the largest number: subtract the maximum first."),
]


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.extend(torch.cuda.get_rng_state_all())
    return states


def _set_random_state(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
