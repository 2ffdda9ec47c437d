"""The guard of every step, and the search for the operation that first made a loss or a gradient infinite or NaN.

A healthy step costs references to its batch, the random state, the order of ops on the model's output, and one read of
the gradients. No tensor is copied or kept alive longer. A step with a fault is run again.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowp.kernels.steps.spectra import largest_of
from lowp.nested import tensors_of
from lowp.numerics.models import Models
from lowp.numerics.modes import Paths, Seam, numbers_of
from lowp.numerics.record import StepSeen
from lowp.numerics.replay import Event, Trace, state_of, tracing
from lowp.numerics.tape import Tape, beside, calls_again

_REMEMBERED = 20  # number of steps before a fault that are reported
_EXPLODED = 1e3  # growth of weights over their first size that counts as exploding


@dataclass
class Fault:
    """The result of the search. `kind`: ``batch``, ``weights``, ``exploding``, ``operation``, or ``unknown``."""

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
        of_operation = (
            f" ({self.operation}, {self.phase}) {self.place}" if self.kind not in ("batch", "weights") else ""
        )
        return f"{head}. First: {self.op}{of_operation}: {made}. {self.hint}"


class Diagnosis:
    """Runs a step again and names what was first not finite; the model and the random state are as before after it."""

    def __init__(self, tape: Tape, models: Models, history: list[StepSeen], scale: float) -> None:
        self._tape, self._models, self._history, self._scale = tape, models, history, scale
        self._trace = Trace(Paths(models))

    def find(self, what: str, step: int, first_weight: float | None, unguarded: int) -> Fault:
        """Return the fault of this step. `what` is the loss or the gradients."""
        fault = Fault(step, what, "unknown", scale=self._scale, history=[asdict(one) for one in self._history])
        if not self._tape.models:
            fault.hint = "The step cannot be run again: the model was not called in it."
            return fault
        try:
            last = self._replay()
        except (
            Exception
        ) as error:  # of the model's own code, which need not run twice: the training goes on as it would
            message = (str(error).splitlines() or [""])[0]
            fault.hint = f"The step cannot be run again: {type(error).__name__}: {message[:200]}"
            return fault
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
        grown = _growth(self._models, first_weight)
        fault.kind, fault.hint = _judged(event, grown)
        if fault.kind == "weights" and unguarded:
            fault.hint += (
                f" {unguarded} steps were not watched, to stay in the budget: --max-overhead none watches each."
            )
        return fault

    def _replay(self) -> Event | None:
        """Run forward, loss and backward again; the event of the loss or of the first gradient that is not finite."""
        with beside(self._tape, self._models):
            self._give_inputs()
            with tracing(self._trace, self._models):
                loss = calls_again(self._tape, self._at_line)
                if loss is not None and not any(state_of(loss)):
                    torch.autograd.backward(loss, torch.ones_like(loss))
            return self._last_event(loss)

    def _at_line(self, line: str) -> None:
        self._trace.line = line

    def _give_inputs(self) -> None:
        """Let the trace know the batch: what the models were given, and what the loss reads beside it, as targets."""
        for call in self._tape.calls:
            of_model = call.random is not None
            what = "of the model's arguments" if of_model else "beside the model"
            read = [one for one in tensors_of((call.args, call.kwargs)) if id(one) not in self._models.parameters]
            for place, one in enumerate(read):
                if of_model or one.grad_fn is None:
                    self._trace.give(one, f"the batch (tensor {place} {what})")

    def _last_event(self, loss: Tensor | None) -> Event | None:
        trace = self._trace
        if loss is not None and any(state_of(loss)):
            return trace.event_of(loss)
        for _, parameter in reversed(list(self._models.named_parameters())):
            if parameter.grad is not None and any(state_of(parameter.grad)):
                return trace.event_of(parameter.grad)
        return None


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


def _growth(models: Models, first: float | None) -> float | None:
    """Return how many times larger the largest weight is than at the first step."""
    if not first:
        return None
    largest = [float(numbers_of(one.detach()).abs().amax()) for _, one in models.named_parameters() if one.numel()]
    return max(largest, default=0.0) / first


def _judged(event: Event, growth: float | None) -> tuple[str, str]:
    """Return the kind of fault of an event, and advice."""
    if event.is_outside:
        if event.operation.startswith("the batch"):
            return "batch", "Look at the data of this step."
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
    inputs = f"Its inputs: {ranges}." if ranges else ""
    advice = next((text for names, text in _HINTS if {event.operation, event.place.op} & names), "")
    dtypes = {one["dtype"] for one in event.inputs}
    if not advice and event.inf and (event.operation in ("_to_copy", "quantize") or dtypes & {"float16"}):
        advice = "That is beyond the largest number of the format: keep this layer in bf16 or fp32, or scale its input."
    if event.phase == "backward" and event.place.op in ("sqrt", "norm", "linalg_norm", "pow", "std"):
        advice = "The derivative at 0 is infinite: add a small number before it."
    return f"{inputs} {advice}".strip()


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


# -- the guard ---------------------------------------------------------------------------------------------------------
class Guard:
    """Keeps what a step needs to be run again, and finds what made it not finite, once a run.

    While a step is run again `is_replaying` tells everyone else to look away. `diagnoses`: whether it looks for faults
    at all, or only keeps the tape. `unguarded` steps are said to have had no guard before the traced step.
    """

    def __init__(self, models: Models, seam: Seam, diagnoses: bool = True) -> None:
        self.history: deque[StepSeen] = deque(maxlen=_REMEMBERED)
        self.unguarded = 0
        self.is_replaying = False
        self.tape = Tape(seam)
        self._models, self._seam, self._diagnoses = models, seam, diagnoses
        self._first_weight: float | None = None

    def current(self, step: int) -> StepSeen:
        """The notes on this step."""
        if not self.history or self.history[-1].step != step:
            self.history.append(StepSeen(step))
        return self.history[-1]

    def saw_loss(self, loss: Tensor, seen: StepSeen, scale: float) -> Fault | None:
        """Note the loss. Return the fault if the loss is not finite."""
        self.tape.end(loss)
        finite = seen.loss is None or abs(seen.loss) < float("inf")
        return None if finite else self._diagnose("loss", seen, scale)

    def before_step(self, parameters: Sequence[nn.Parameter], seen: StepSeen, scale: float) -> Fault | None:
        """Check the gradients that the optimizer is about to use. Return the fault if one is not finite."""
        self.tape.rest()
        if not self._diagnoses:
            return None
        if self._first_weight is None:
            self._first_weight = largest_of([numbers_of(one.detach()) for one in parameters])
        gradients = [numbers_of(one.grad) for one in parameters if one.grad is not None]
        if not gradients:
            return None
        seen.largest_gradient = largest_of(gradients)
        finite = seen.largest_gradient < float("inf")
        return None if finite else self._diagnose("gradients", seen, scale)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Run a step again within this context, in which nobody takes it for a training step."""
        self.is_replaying = True
        try:
            yield
        finally:
            self.is_replaying = False

    def _diagnose(self, what: str, seen: StepSeen, scale: float) -> Fault | None:
        if not self._diagnoses:
            return None
        self._diagnoses = False
        diagnosis = Diagnosis(self.tape, self._models, list(self.history), scale)
        with self.replaying(), self._seam.resting():
            fault = diagnosis.find(what, seen.step, self._first_weight, self.unguarded)
        print(f"lowp profile: {fault}", file=sys.stderr)
        return fault
