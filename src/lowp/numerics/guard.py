"""The guard of every step: keeps what is needed to trace a non-finite loss or gradient to an op.

A healthy step costs references to its batch, the random state, the order of ops on the model's output, and one read of
the gradients. No tensor is copied or kept alive longer.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowp.hooks import Uncopied
from lowp.kernels.steps.spectra import largest_of
from lowp.numerics.divergence import Diagnosis, Fault
from lowp.numerics.models import Models
from lowp.numerics.modes import numbers_of
from lowp.numerics.record import StepSeen
from lowp.numerics.tape import Tape

_REMEMBERED = 20  # number of steps before a fault that are reported


class Guard:
    """Keeps what a step needs to be run again, and finds what made it not finite, once a run.

    `on_backward` is called with a loss whose backward pass begins; `looking_away` is entered while a step is run again,
    when `is_replaying` tells everyone else to look away too. `diagnoses`: whether it looks for faults at all, or only
    keeps the tape.
    """

    def __init__(
        self,
        models: Models,
        on_backward: Callable[[Tensor], None],
        looking_away: Callable[[], AbstractContextManager[None]],
        diagnoses: bool = True,
    ) -> None:
        self.history: deque[StepSeen] = deque(maxlen=_REMEMBERED)
        self.unguarded = 0  # steps without a guard before the traced step
        self.is_replaying = False
        self._models, self._looking_away = models, looking_away
        self.tape = Tape()
        self.tape.on_backward = on_backward
        self._is_on = self._failed = False
        self._diagnoses = diagnoses
        self._first_weight: float | None = None

    def listen(self) -> Callable[[], None]:
        """Call back before backward passes. Return a function that ends this."""
        return self.tape.listen()

    def take_seconds(self, of_a_call: float) -> float:
        """What the tape took since it was last asked, of which torch needs `of_a_call` to call it once."""
        tape = self.tape
        seconds = tape.seconds + of_a_call * tape.dispatched
        tape.seconds, tape.dispatched = 0.0, 0
        return seconds

    def current(self, step: int) -> StepSeen:
        """The notes on this step."""
        if not self.history or self.history[-1].step != step:
            self.history.append(StepSeen(step))
        return self.history[-1]

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call of a model that is about to run."""
        self._is_on = True
        self.tape.begin(module, args, kwargs)

    def rest(self) -> None:
        """Leave a step unguarded."""
        self._is_on = False

    def open(self, module: nn.Module, output: Any, place: int) -> None:
        """Record what is computed of the model's output, which follows the call that was begun."""
        if self._is_on:
            self.tape.open(module, output, place)

    def saw_loss(self, loss: Tensor, seen: StepSeen, scale: float) -> Fault | None:
        """Note the loss. Return the fault if the loss is not finite."""
        if not self._is_on:
            return None
        self.tape.end(loss)
        finite = seen.loss is None or abs(seen.loss) < float("inf")
        return None if finite else self._diagnose("loss", seen, scale)

    def close(self) -> None:
        """Stop recording: backward has run."""
        self.tape.close()

    def before_step(self, parameters: Sequence[nn.Parameter], seen: StepSeen, scale: float) -> Fault | None:
        """Check the gradients that the optimizer is about to use. Return the fault if one is not finite."""
        if not self._is_on or not self._diagnoses:
            return None
        if self._first_weight is None:
            self._first_weight = largest_of([numbers_of(one.detach()) for one in parameters])
        gradients = [numbers_of(one.grad) for one in parameters if one.grad is not None]
        if not gradients:
            return None
        seen.largest_gradient = largest_of(gradients)
        finite = seen.largest_gradient < float("inf")
        return None if finite else self._diagnose("gradients", seen, scale)

    def forget(self) -> None:
        """Release the tensors of a step that has ended."""
        self.tape.close()
        self.tape.forget()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Run a step again within this context, in which nobody takes it for a training step."""
        self.is_replaying = True
        try:
            yield
        finally:
            self.is_replaying = False

    def _diagnose(self, what: str, seen: StepSeen, scale: float) -> Fault | None:
        if self._failed or not self._diagnoses:
            return None
        self._failed = True
        diagnosis = Diagnosis(self.tape, self._models, list(self.history), scale)
        with self.replaying(), self._looking_away():
            fault = diagnosis.find(what, seen.step, self._first_weight, self.unguarded)
        print(f"lowp profile: {fault}", file=sys.stderr)
        return fault


# -- hooks -------------------------------------------------------------------------------------------------------------
class StepHooks:
    """Hooks around each call of the models, and before each step of the optimizer, or if it is None of any."""

    def __init__(
        self,
        models: Models,
        optimizer: Optimizer | None,
        before_forward: Callable[..., None],
        after_forward: Callable[..., None],
        before_step: Callable[..., None],
    ) -> None:
        self._models, self._optimizer = models, optimizer
        self._before_forward, self._after_forward, self._before_step = before_forward, after_forward, before_step
        self._handles: list[Any] = []

    def put(self, on: bool) -> None:
        """Add the hooks where they are not in place, or remove them."""
        if not on:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        elif not self._handles:
            for root in self._models.roots.values():
                before, after = Uncopied(self._before_forward), Uncopied(self._after_forward)
                self._handles.append(root.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(root.register_forward_hook(after, always_call=True))
            register = register_optimizer_step_pre_hook
            if self._optimizer is not None:
                register = self._optimizer.register_step_pre_hook
            self._handles.append(register(self._before_step))

    def renew(self) -> None:
        """Put the hooks on the models that there are."""
        self.put(False)
        self.put(True)
