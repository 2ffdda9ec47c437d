"""Optimizer steps: skipped if a gradient overflowed, and written to the parameters' format if they have one."""

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lowp import distributed
from lowp.launch.boot import replaces, when_imported
from lowp.launch.gradients import Gradients
from lowp.launch.session import Session, nothing

Step = Callable[..., Any]
Parameters = Callable[[Any], list[Tensor]]
_WITHOUT_MODEL = (
    "what the script trains",
    "it calls no module with parameters, and what is outside of modules is plain torch",
)


class Held(Optimizer):
    """The script's optimizer for the precision: without wrappers that the script or a scheduler put around `step`.

    Groups, state and defaults ARE the optimizer's own; of one that is not of torch.optim's kind, `parameters` gives the
    parameters, and its state is left to it.
    """

    allows_fp16_gradients = True  # a script may convert its model, by its own choice

    def __init__(self, optimizer: Any, inner: Step, parameters: Parameters | None) -> None:
        self._optimizer, self._inner, self._parameters = weakref.ref(optimizer), inner, parameters
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        super().__setstate__({"defaults": {} if parameters else optimizer.defaults})

    @property
    def optimizer(self) -> Any:
        """The script's optimizer, which exists while it steps."""
        found = self._optimizer()
        assert found is not None
        return found

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        found = self._parameters
        return self.optimizer.param_groups if found is None else [{"params": found(self.optimizer)}]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state if self._parameters is None else {}

    def step(self, closure: None = None) -> Any:  # type: ignore[override]
        """Call the script's `step` with the script's arguments."""
        args, kwargs = self.arguments
        return self._inner(self.optimizer, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # the script's own step calls the step hooks


class _Steps:
    """The optimizer steps of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.gradients: Gradients | None = session.gradients
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        self._prepared: weakref.WeakKeyDictionary[Any, Optimizer] = weakref.WeakKeyDictionary()
        self._without_model = ""  # the sentence that no module has run so far
        self._stepped: set[int] = set()  # ids of parameters whose optimizers have stepped in this step

    def hold(self, parameters: Iterable[Tensor]) -> None:
        """Note parameters that an optimizer holds."""
        for parameter in parameters:
            self.session.stepped[parameter] = True
            if self.gradients is not None:
                self.gradients.adopt(parameter)
        if self.session.forward is not None:
            self.session.forward.look_again()

    def step(
        self,
        optimizer: Any,
        inner: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Parameters | None = None,
    ) -> Any:
        """Take one step of an optimizer of the script: torch.optim's, or one that tells its `parameters`."""
        local = self.session.local
        # a step within another optimizer's step is part of that step
        if torch.compiler.is_compiling() or local.steps or isinstance(optimizer, Held):
            return inner(optimizer, *args, **kwargs)
        with self.session.at(steps=1):
            return self._outermost(optimizer, inner, args, kwargs, parameters)

    def _outermost(
        self, optimizer: Any, inner: Step, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Parameters | None
    ) -> Any:
        session = self.session
        session.record.steps += 1
        session.record.rank = distributed.rank()
        if session.rests:
            return inner(optimizer, *args, **kwargs)
        held = self._held.get(optimizer)
        if held is None:
            held = self._held[optimizer] = Held(optimizer, inner, parameters)
        held.arguments = args, kwargs
        closure = None if parameters else args[0] if args else kwargs.get("closure")
        if closure is None:
            self._note_without_model()
            return self._guarded(held)
        if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS):
            # torch's own optimizers call the closure once, at the start; the step must be skipped if a gradient
            # overflows
            with torch.enable_grad():
                loss = closure()
            self._note_without_model()
            held.arguments = (), {"closure": lambda: loss}
            self._guarded(held)
            return loss
        return self._in_fp32(optimizer, inner, args, kwargs)

    def _note_without_model(self) -> None:
        """Note that no model has run, as long as this is so: outside of modules nothing runs under the rules."""
        session = self.session
        has_model = bool(session.record.calls) or session.forward is None or session.forward.has_models
        if has_model == bool(self._without_model):
            if has_model:
                session.record.take_back(self._without_model)
            self._without_model = "" if has_model else session.keeps_in_fp32(*_WITHOUT_MODEL)

    def _in_fp32(self, optimizer: Optimizer, inner: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step an optimizer that computes loss and gradients itself, any number of times, in fp32."""
        session = self.session
        session.keeps_in_fp32(
            f"what {type(optimizer).__name__} computes by its closure", "such a step cannot be skipped as a whole"
        )
        session.rests = True
        try:
            return inner(optimizer, *args, **kwargs)
        finally:
            session.rests = bool(session.record.stood_down)

    def _guarded(self, held: Held) -> Any:
        """Step by the precision, which skips the step if a gradient overflowed."""
        parameters = [one for group in held.param_groups for one in group["params"]]
        nonfinite = None if self.gradients is None else self.gradients.take_nonfinite(parameters)
        if all(one.grad is None for one in parameters):
            return held.step()
        if not self.session.is_scaling:
            return self.session.precision.step(self._of(held))
        with self.session.turn:
            return self._scaled_step(held, parameters, nonfinite)

    def _scaled_step(self, held: Held, parameters: list[Tensor], nonfinite: Tensor | None) -> Any:
        """Step one optimizer. The scale moves once, after all optimizers that share a backward pass have stepped.

        All have stepped when no other parameter waits for a step (`.grad` is not read, since other threads may write
        it). If others wait, possibly of another pass, the next forward or backward pass ends the step.
        """
        session, identities = self.session, {id(one) for one in parameters}
        if not self._stepped.isdisjoint(identities):
            session.end_step()
        scaler = session.precision.scaler
        scaler.scale(torch.ones((), dtype=torch.float32))  # made at the first loss; a script may step before
        scaler.check_(held, nonfinite)
        result = session.precision.step_one(self._of(held))
        self._stepped |= identities
        session.end_step = self._end_step
        is_only = len(self._stepped) >= len(session.stepped)
        if is_only or self.gradients is None or not self.gradients.are_waiting(session.stepped):
            self._end_step()
        return result

    def _end_step(self) -> None:
        with self.session.turn:
            self.session.end_step = nothing
            if not self._stepped:  # another thread has ended the step
                return
            self._stepped.clear()
            self.session.precision.end_step()
            record, scale = self.session.record, self.session.precision.scale
            if not record.scales or record.scales[-1][1] != scale:
                record.scales.append((record.steps, scale))

    def _of(self, held: Held) -> Optimizer:
        """Return what the precision steps: the held optimizer, or its wrapper that writes the parameters' format."""
        if self.session.preset.policy.parameters is None:
            return held
        optimizer = held.optimizer
        if optimizer not in self._prepared:
            models = nn.ModuleList(self.session.models_of(held))
            self._prepared[optimizer] = self.session.precision.prepare(models, held)[1]
            if not isinstance(optimizer, Optimizer):
                self.session.record.note(
                    f"the state of {type(optimizer).__name__} stays in fp32: it is not torch.optim's"
                )
        return self._prepared[optimizer]


def install(session: Session) -> None:
    """Wrap each optimizer's step at torch's `profile_hook_step`."""
    optimizers = cast(Any, Optimizer)
    measured: Callable[[Step], Step] = optimizers.profile_hook_step
    steps = _Steps(session)

    def profile_hook_step(function: Step) -> Step:
        inner = measured(function)

        @wraps(function)
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return steps.step(self, inner, args, kwargs)

        return step

    optimizers.profile_hook_step = staticmethod(profile_hook_step)
    for other in _OTHERS:  # when the script imports them
        when_imported(other.module, partial(_install_other, session, steps, other))
    if not session.is_plain:
        _install_groups(steps)


def _install_groups(steps: _Steps) -> None:
    """Record which parameters optimizers hold and which gradients they zero."""
    add_group, zero, set_state = Optimizer.add_param_group, Optimizer.zero_grad, cast(Any, Optimizer).__setstate__

    @replaces(Optimizer)
    def add_param_group(self: Optimizer, group: dict[str, Any]) -> None:
        add_group(self, group)
        steps.hold(self.param_groups[-1]["params"])

    @replaces(Optimizer)
    def __setstate__(self: Optimizer, state: dict[str, Any]) -> None:
        # copies and unpickled optimizers add no group, and have parameters of their own
        set_state(self, state)
        steps.hold(one for group in state.get("param_groups", ()) for one in group["params"])

    @replaces(Optimizer)
    def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if steps.gradients is not None:
            steps.gradients.forget(one for group in self.param_groups for one in group["params"])
        zero(self, *args, **kwargs)


class _Other(NamedTuple):
    """A class of optimizers that is not torch.optim's: the methods that make one and that step, and its parameters."""

    module: str
    name: str
    make: str
    step: str
    parameters: Parameters


def _of_keras(optimizer: Any) -> list[Tensor]:
    values = (variable.value for variable in optimizer._trainable_variables)
    return [value for value in values if isinstance(value, Tensor)]  # Keras has other backends


_OTHERS = (
    _Other("fastai.optimizer", "Optimizer", "__init__", "step", lambda optimizer: list(chain(*optimizer.param_lists))),
    _Other("keras.src.optimizers.base_optimizer", "BaseOptimizer", "build", "apply", _of_keras),
)


def _install_other(session: Session, steps: _Steps, other: _Other) -> None:
    """Wrap the steps of optimizers that are not torch.optim's."""
    kind = getattr(sys.modules[other.module], other.name)
    made, inner = getattr(kind, other.make), getattr(kind, other.step)

    @wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        steps.hold(other.parameters(self))

    @wraps(inner)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not other.parameters(self):
            return inner(self, *args, **kwargs)
        return steps.step(self, inner, args, kwargs, other.parameters)

    setattr(kind, other.step, step)
    if not session.is_plain:
        setattr(kind, other.make, make)
