"""What a step is remembered by, so that it can be run again beside the training, and that it runs again."""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lowp.compat import hooks_after_accumulation, unwrapped
from lowp.nested import mapped, tensors_of
from lowp.numerics.models import Models
from lowp.numerics.modes import Seam, source_line
from lowp.ops.shields import DisableTorchFunction
from lowp.region import entries

_MOST_CALLS = 16  # of models in one step; more are no training step, but for example a rollout


class Slot(NamedTuple):
    """Stands for a tensor that the step has computed, which the tape does not keep."""

    number: int


_KINDS = Tensor, Slot


@dataclass
class TapedCall:
    """A call of a model, or of a function of torch's on what came of one.

    In `args` and `kwargs` a Slot stands where a tensor is that an earlier call has given; the other tensors are kept.
    `results` numbers the tensors that this call gave.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    line: str = ""
    results: list[int] = field(default_factory=list)
    random: list[Tensor] | None = None  # of a model: what the random state was


class Tape:
    """The calls of one step, from the first of a model to the backward pass.

    It keeps what the models were given and the random state, and of what was computed the order alone: no tensor lives
    longer for it. It sees the calls between those of models, and those up to the backward pass.
    """

    def __init__(self, seam: Seam) -> None:
        self.calls: list[TapedCall] = []
        self.loss: int | None = None  # its number
        self.autocast: list[tuple[str, bool, torch.dtype]] = []
        self.region: Any = None
        self._numbers: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._count = self._models = 0
        self._waiting: TapedCall | None = None
        self._seam, self._is_over = seam, False

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember a call of a model that is about to run, together with those since the last backward pass."""
        if self._waiting is not None:
            return  # within the call of another one
        if self._is_over or self._models >= _MOST_CALLS:
            self.forget()
        if not self.calls:
            entry = entries.current()
            self.region = None if entry is None or entry.engine is None else entry.region
            self.autocast = [] if self.region is not None else [one for one in entries.autocast_state() if one[1]]
        self._waiting = TapedCall(model, self._kept(args), self._kept(kwargs), random=random_state())
        self.rest()

    def open(self, model: nn.Module, output: Any) -> None:
        """Record what is computed of the output of a call that was begun."""
        call = self._waiting
        if call is None or call.function is not model:
            return
        self._waiting = None
        self._models += 1
        self._add(call, output)
        self._seam.let(self._saw, True)

    def end(self, loss: Tensor) -> None:
        """Note the loss, after which nothing more is recorded."""
        slot = self._slot(loss)
        self.loss = slot.number if isinstance(slot, Slot) else None
        self._is_over = True
        self.rest()

    def rest(self) -> bool:
        """See no more calls until a model has given its output; return whether it has seen any until now."""
        return self._seam.let(self._saw, False)

    def forget(self) -> None:
        """Let go of the tensors of a step that has ended."""
        self.rest()
        self.calls.clear()
        self._numbers.clear()
        self.loss = self._waiting = None
        self._count = self._models = 0
        self._is_over = False

    @property
    def models(self) -> list[nn.Module]:
        """The models that were called, each once."""
        called = [one.function for one in self.calls if isinstance(one.function, nn.Module)]
        return list({id(one): one for one in called}.values())

    def _saw(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Remember a call that has run."""
        self._add(TapedCall(func, self._kept(args), self._kept(kwargs), source_line()), result)

    def _add(self, call: TapedCall, result: Any) -> None:
        for one in tensors_of(result):
            self._numbers[id(one)] = (self._count, weakref.ref(one))
            call.results.append(self._count)
            self._count += 1
        self.calls.append(call)

    def _kept(self, value: Any) -> Any:
        return mapped(self._slot, value, _KINDS) if self._numbers else value

    def _slot(self, x: Tensor) -> Tensor | Slot:
        """The number of a tensor that the step has computed; any other tensor as it is."""
        known = self._numbers.get(id(x))
        return Slot(known[0]) if known is not None and known[1]() is x else x


def random_state() -> list[Tensor]:
    """The state of torch's generators."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.extend(torch.cuda.get_rng_state_all())
    return states


def set_random_state(states: list[Tensor]) -> None:
    """Put torch's generators into a state again."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


# -- running a step again ----------------------------------------------------------------------------------------------
@contextmanager
def beside(tape: Tape, models: Models) -> Iterator[None]:
    """Let the step of a tape run again in here, as it was written: without torch.compile, in its region.

    Parameters have no gradients in here, and their hooks rest that run when a gradient is complete: an optimizer may
    step in them. Gradients, buffers and the random state are what they were afterwards.
    """
    parameters = [one for _, one in models.named_parameters()]
    gradients = [(one, one.grad) for one in parameters]
    hooks = [(one, dict(one)) for one in map(hooks_after_accumulation, parameters) if one]
    random = random_state()
    try:
        for one in parameters:
            one.grad = None
        for resting, _ in hooks:
            resting.clear()
        with ExitStack() as stack:
            stack.enter_context(_copied_buffers(models))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # warnings about the step were given when it ran first
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if tape.region is not None:
                stack.enter_context(tape.region.resume())
            for device, _, dtype in tape.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
    finally:
        set_random_state(random)
        for resting, kept in hooks:
            resting.update(kept)
        for parameter, before in gradients:
            parameter.grad = before


@contextmanager
def _copied_buffers(models: Models) -> Iterator[None]:
    """Let the models write copies of their buffers: a graph that waits for its backward pass may hold the buffers.

    Statistics that a norm in training has written in this step, and does not read, begin finite: they are no cause.
    """
    held = [
        (module, name, buffer)
        for model in models
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held}
    try:
        for module, name, buffer in held:
            if module.training and name in ("running_mean", "running_var"):
                copies[id(buffer)].nan_to_num_()
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def calls_again(tape: Tape, at_line: Callable[[str], None] = lambda line: None) -> Tensor | None:
    """Make the calls of the tape again and return the new loss; None if they do not produce the loss.

    What is outside of the step stays as it became when the step ran first. What was written there, such as an average,
    is not written again, but a sum that gradients pass is, in a copy; and no gradient goes further, nor to parameters
    but those of the models. `at_line` is called before each call with the line that made it, and with '' after the
    last call.
    """
    again = _Again(tape)
    for call in tape.calls:
        if call.random is not None or (call.results and not again.is_written(call)):
            at_line(call.line)
            again.make(call)
    at_line("")
    found = None if tape.loss is None else again.made.get(tape.loss)
    return found if found is not None and found.requires_grad else None


class _Again:
    """The tensors that a step makes when it runs again, and what is outside of it."""

    def __init__(self, tape: Tape) -> None:
        self.made: dict[int, Tensor] = {}
        self._ends: dict[int, Tensor] = {}  # of what gradients would go on from: where they end instead
        with DisableTorchFunction():  # nobody is to see this
            self._outside = {_memory(one) for call in tape.calls for one in tensors_of((call.args, call.kwargs))}
            self._own = {id(one) for model in tape.models for one in model.parameters()}

    def make(self, call: TapedCall) -> None:
        """Make a call."""
        function, given = call.function, self._given
        if call.random is not None:
            set_random_state(call.random)
            function, given = unwrapped(cast(nn.Module, function)), self._given_to_model
        result = function(*mapped(given, call.args, _KINDS), **mapped(given, call.kwargs, _KINDS))
        self.made.update(zip(call.results, tensors_of(result), strict=False))

    def is_written(self, call: TapedCall) -> bool:
        """Whether what a function writes is outside and written already; a sum that gradients pass is copied first."""
        with DisableTorchFunction():
            target = _written(call)
            written = tensors_of(mapped(self._given, target, _KINDS))
            if not any(_memory(one) in self._outside for one in written):
                return False
            if all(one.grad_fn is None for one in (*tensors_of(target), *written)):
                self.made.update(zip(call.results, written, strict=False))
                return True
            known, key = (self.made, target.number) if isinstance(target, Slot) else (self._ends, id(target))
            known[key] = written[0].detach().clone()  # gradients pass what one tensor holds
            return False

    def _given(self, x: Any) -> Tensor:
        if isinstance(x, Slot):
            return self.made[x.number]
        if x.requires_grad and id(x) not in self._own:
            return self._ends.setdefault(id(x), _detached(x))
        return cast(Tensor, x)

    def _given_to_model(self, x: Any) -> Tensor:
        return self.made[x.number] if isinstance(x, Slot) else _detached(x)


def _written(call: TapedCall) -> Any:
    """What a function writes into: its `out`, or the first argument of one in place; None for others."""
    if call.kwargs.get("out") is not None:
        return call.kwargs["out"]
    name = str(getattr(call.function, "__name__", ""))
    is_operator = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")
    in_place = is_operator or (name.endswith("_") and not name.endswith("__")) or call.kwargs.get("inplace", False)
    return next(iter((*call.args, *call.kwargs.values())), None) if in_place else None


def _memory(x: Tensor) -> int:
    """Tell a tensor's memory, which its views have, too, from that of others."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else id(x)


def _detached(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x
