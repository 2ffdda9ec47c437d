"""Backward passes: scale the seed instead of the loss, which the script prints, and run outside the region."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lowp.compat import metadata_of, private
from lowp.errors import Misuse
from lowp.formats import FloatFormat
from lowp.launch.boot import replaces
from lowp.launch.gradients import SIXTEEN_BIT, Gradients, leaves_of
from lowp.launch.session import Session
from lowp.policy import Policy
from lowp.presets import clipped_gradients
from lowp.step import first_scale

_tracing = cast(Callable[[], object], private("torch._guards.TracingContext.try_get"))
_task = cast(Callable[[], int], private("torch._C._current_graph_task_id"))
_NO_TASK = -1  # outside of any backward pass, also on the threads that run the passes of a device
# torch.autograd.grad returns its result to the script, and no step is skipped on overflow: its scale leaves room for
# gradients of 2**6. fp16 keeps six bits above a seed of 1 and ten below with the largest of these scales.
_GRAD_ROOM = 6
_LARGEST_GRAD_SCALE = 1024.0


def largest_grad_scale(policy: Policy) -> float:
    """Return the largest scale of torch.autograd.grad under a policy: a power of two from 1 to 1024.

    Times 2**6 it is at most the power of two above the maximum of each format of gradients that has no shared scale:
    1024 for fp16, 8 for e4m3fn (maximum 448), and 1 where the format has no room for more, as e3m4 and e2m1.
    """
    casts = [cast for rule in policy.rules for cast in rule.grads]
    maxima = [cast.format.maximum for cast in casts if isinstance(cast.format, FloatFormat)]
    # frexp: maximum < 2**exponent
    scales = (math.ldexp(1.0, math.frexp(maximum)[1] - _GRAD_ROOM) for maximum in maxima)
    return max(1.0, min(_LARGEST_GRAD_SCALE, *scales)) if maxima else _LARGEST_GRAD_SCALE


def _tensors(given: Any) -> tuple[Any, ...]:
    """Return what torch.autograd takes as a tensor, an edge of the graph, or an iterable of them, as a tuple."""
    return (given,) if isinstance(given, (Tensor, GradientEdge)) else tuple(given)


def _leaf_of(place: Any) -> Any:
    """Return the leaf to whose gradient an edge of the graph leads; anything else unchanged."""
    return getattr(place.node, "variable", place) if isinstance(place, GradientEdge) else place


class _Backward:
    """The backward passes of one session whose precision scales losses."""

    def __init__(self, session: Session, gradients: Gradients) -> None:
        self.session, self.gradients = session, gradients
        self._looks = session.preset.loss_scale.search
        self._clipped = clipped_gradients(session.preset)
        self.largest_grad_scale = largest_grad_scale(session.preset.policy)

    def _look_for_scale(self, outputs: tuple[Tensor, ...]) -> None:
        """Set a dynamic scale's initial value to one at which the first gradients fit, found by trial on this loss."""
        if not self._looks or len(outputs) != 1 or outputs[0].numel() != 1:
            return
        self._looks = False
        scale = self.session.preset.loss_scale
        self.gradients.is_trial = True
        try:
            self.session.precision.scaler.begin_with(first_scale(outputs[0], scale.initial, scale.floor))
        except Misuse:  # a step on gradients from elsewhere has already used a scale
            pass
        finally:
            self.gradients.is_trial = False

    def scales(self, outputs: tuple[Any, ...]) -> bool:
        """Whether a pass from these tensors is scaled. A 16-bit loss of the script's own has no room for a scale."""
        return bool(outputs) and all(isinstance(one, Tensor) and one.dtype not in SIXTEEN_BIT for one in outputs)

    def adopted(self, outputs: tuple[Any, ...]) -> list[Tensor]:
        """Return the leaves that a pass from these tensors reaches, all of which unscale their gradients."""
        leaves = list(leaves_of([one for one in outputs if isinstance(one, Tensor)]))
        for leaf in leaves:
            self.gradients.adopt(leaf)
        return leaves

    def _begin(self, outputs: tuple[Tensor, ...], most: float, looks: bool) -> None:
        leaves = self.adopted(outputs)
        if has_no_optimizer(self.session, leaves):
            return
        if self._clipped is not None:
            self.session.record.note(self._clipped)
            self._clipped = None
        one = torch.ones((), dtype=torch.float32, device=outputs[0].device)
        if looks:
            self._look_for_scale(outputs)
        waits = self._looks and most < self.session.preset.loss_scale.initial  # until a backward pass has searched
        scale = one * most if waits else self.session.precision.scaler.scale(one).clamp(max=most)
        self.gradients.set_retained_aside()
        self.gradients.scale, self.gradients.inverse = scale, scale.reciprocal()

    @contextmanager
    def own(self, outputs: tuple[Tensor, ...], most: float = math.inf, looks: bool = False) -> Iterator[None]:
        """Scale a pass by at most `most`; every leaf that it reaches unscales its gradient."""
        with self.session.turn:
            self._begin(outputs, most, looks)
            try:
                yield
            finally:
                if self.gradients.inverse is not None:
                    self.gradients.unscale_retained()
                self.gradients.scale = self.gradients.inverse = None

    @contextmanager
    def limited(self, outputs: tuple[Any, ...]) -> Iterator[None]:
        """Limit the scale to that of a pass that gives its gradients to the script, within the pass that runs."""
        gradients = self.gradients
        self.adopted(outputs)
        before = gradients.scale, gradients.inverse
        if gradients.scale is not None:
            gradients.scale = gradients.scale.clamp(max=self.largest_grad_scale)
            gradients.inverse = gradients.scale.reciprocal()
        try:
            yield
        finally:
            gradients.scale, gradients.inverse = before

    def seeds(self, outputs: tuple[Tensor, ...], given: Any) -> list[Tensor | None]:
        """Return the gradients from which a pass starts, times the scale."""
        seeds: Sequence[Any] = [None] * len(outputs) if given is None else _tensors(given)
        return [self._seed(output, seed) for output, seed in zip(outputs, seeds, strict=True)]

    def _seed(self, output: Any, seed: Tensor | None) -> Tensor | None:
        place = output if isinstance(output, Tensor) else metadata_of(output)
        if seed is None:
            if math.prod(place.shape) != 1:
                return None
            if place is output:
                seed = torch.ones_like(output)
            else:
                seed = torch.ones(place.shape, dtype=place.dtype, device=place.device)
        return self.gradients.scaled(seed).to(place.dtype)


def has_no_optimizer(session: Session, leaves: list[Tensor]) -> bool:
    """Whether the script updates these parameters without an optimizer, so that no step can be skipped or written."""
    parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
    if not parameters or session.forward is None:
        return False
    if not all(map(session.is_stepped, parameters)):
        session.match_shards()
    if any(map(session.is_stepped, parameters)):
        return False
    session.forward.leave_alone(parameters)
    return True


class _Replaced:
    """torch.autograd.backward and torch.autograd.grad, as one session's script calls them."""

    def __init__(self, session: Session) -> None:
        self.session, self.local = session, session.local
        self.originals = torch.autograd.backward, cast(Any, torch.autograd.grad)
        self.writes = session.preset.policy.parameters is not None
        self.scaled = None if session.gradients is None else _Backward(session, session.gradients)

    def is_within(self) -> bool:
        """Whether a pass that runs calls this: a hook, or a reentrant checkpoint, whose gradients are scaled."""
        return bool(self.local.backward) or _task() != _NO_TASK

    def apart(self) -> AbstractContextManager[object]:
        """Return a context for gradients that the script is given, which no later step may find cut off."""
        exponents = self.session.precision.exponents
        return nullcontext() if exponents is None else exponents.uncounted(True)

    def backward(self, tensors: Any, grad_tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, scaled, (original, _), is_within = self.session, self.scaled, self.originals, self.is_within()
        if session.rests or (is_within and not self.local.hooks):
            return original(tensors, grad_tensors, *args, **kwargs)
        outputs = _tensors(tensors)
        if is_within:  # a hook, which has seen unscaled gradients
            if scaled is not None:
                scaled.adopted(outputs)
                grad_tensors = scaled.seeds(outputs, grad_tensors)
            with session.in_pass():
                return original(outputs, grad_tensors, *args, **kwargs)
        session.end_step()
        session.record.backward_passes += 1
        with session.in_pass():
            if self.writes and not session.record.steps:
                has_no_optimizer(session, list(leaves_of([one for one in outputs if isinstance(one, Tensor)])))
            if scaled is None or not scaled.scales(outputs):
                return original(outputs, grad_tensors, *args, **kwargs)
            given = kwargs.pop("grad_variables", None) if grad_tensors is None else grad_tensors
            with scaled.own(outputs, looks=given is None):
                return original(outputs, scaled.seeds(outputs, given), *args, **kwargs)

    def grad(self, outputs: Any, inputs: Any, seeds: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        session, scaled, (_, original), is_within = self.session, self.scaled, self.originals, self.is_within()
        # AOTAutograd traces through this function: a scale would become part of the compiled graph
        if session.rests or (is_within and not self.local.hooks) or _tracing() is not None:
            return original(outputs, inputs, seeds, *args, **kwargs)
        several, places = _tensors(outputs), _tensors(inputs)
        with session.in_pass(), self.apart():
            if scaled is None or not (is_within or scaled.scales(several)):
                return original(several, places, seeds, *args, **kwargs)
            gradients = scaled.gradients
            with scaled.limited(several) if is_within else scaled.own(several, scaled.largest_grad_scale):
                found = original(several, places, scaled.seeds(several, seeds), *args, **kwargs)
                return tuple(
                    one if one is None or gradients.is_adopted(_leaf_of(place)) else gradients.unscaled(one)
                    for one, place in zip(found, places, strict=True)
                )


def install(session: Session) -> None:
    """Replace torch.autograd.backward and torch.autograd.grad, unless the session changes nothing."""
    if session.is_plain:
        return
    replaced = _Replaced(session)

    @replaces(torch.autograd)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        return replaced.backward(tensors, grad_tensors, args, kwargs)

    @replaces(torch.autograd)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return replaced.grad(outputs, inputs, grad_outputs, args, kwargs)
