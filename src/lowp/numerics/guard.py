"""The guard of every step: what is kept of it, so that a loss or a gradient that is not finite can be traced to an op.

A healthy step pays for references to its batch and its tape, the random state, and one maximum over the gradients.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lowp.numerics.divergence import Diagnosis, Fault, Moment
from lowp.numerics.modes import Paths
from lowp.numerics.record import StepSeen

__all__ = ["Guard"]

_REMEMBERED = 20  # steps before a fault that are told


class Guard:
    """Keeps what a step needs to be run again, and finds what made it not finite, once a run.

    `on_backward` is called with a loss whose backward pass begins; `looking_away` is entered while a step is run again,
    when `is_replaying` tells everyone else to look away too.
    """

    def __init__(
        self,
        paths: Paths,
        names: dict[int, str],
        on_backward: Callable[[Tensor], None],
        looking_away: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.history: deque[StepSeen] = deque(maxlen=_REMEMBERED)
        self.unguarded = 0  # steps in which it rested
        self.is_replaying = False
        self._paths, self._names, self._on_backward = paths, names, on_backward
        self._looking_away = looking_away
        self._moment: Moment | None = None
        self._is_on = self._failed = False
        self._first_weight: float | None = None

    def current(self, step: int) -> StepSeen:
        """What is noted of this step."""
        if not self.history or self.history[-1].step != step:
            self.history.append(StepSeen(step))
        return self.history[-1]

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Remember a call of the model that is about to run."""
        self._is_on = True
        if self._moment is None:
            self._moment = Moment()
            self._moment.on_backward = self._on_backward
        self._moment.close()
        self._moment.begin(module, args, kwargs)

    def rest(self) -> None:
        """Leave a step out."""
        self._is_on = False

    def open(self, module: nn.Module, output: Any, place: int) -> None:
        """Record what is computed of the model's output, which follows the call that was begun."""
        if self._is_on and self._moment is not None and self._moment.model is module:
            self._moment.open(output, place)

    def saw_loss(self, loss: Tensor, seen: StepSeen, scale: float) -> Fault | None:
        """Note the loss; the fault, where it is not finite."""
        if self._moment is None:
            return None
        self._moment.end(loss)
        finite = seen.loss is None or abs(seen.loss) < float("inf")
        return None if finite else self._diagnose("loss", seen, scale)

    def close(self) -> None:
        """Stop recording: backward has run."""
        if self._moment is not None:
            self._moment.close()

    def before_step(self, parameters: Sequence[nn.Parameter], seen: StepSeen, scale: float) -> Fault | None:
        """Look at the gradients that the optimizer is about to use; the fault, where one is not finite."""
        if self._first_weight is None:
            self._first_weight = _largest([one.detach() for one in parameters])
        if not self._is_on:
            return None
        seen.largest_gradient = _largest(
            [one.grad for one in parameters if one.grad is not None and not one.grad.is_sparse]
        )
        finite = seen.largest_gradient is None or seen.largest_gradient < float("inf")
        return None if finite else self._diagnose("gradients", seen, scale)

    def forget(self) -> None:
        """Let go of the tensors of a step that has ended."""
        if self._moment is not None:
            self._moment.forget()

    def end(self) -> None:
        """Let go of everything."""
        if self._moment is not None:
            self._moment.close()
            self._moment = None

    def _diagnose(self, what: str, seen: StepSeen, scale: float) -> Fault | None:
        if self._failed or self._moment is None:
            return None
        self._failed = self.is_replaying = True
        diagnosis = Diagnosis(self._moment, self._paths, self._names, list(self.history), scale)
        try:
            with self._looking_away():
                fault = diagnosis.find(what, seen.step, self._first_weight, self.unguarded)
        finally:
            self.is_replaying = False
        print(f"lowp profile: {fault}", file=sys.stderr)
        return fault


def _largest(gradients: list[Tensor]) -> float | None:
    """The largest gradient, NaN or infinite where one is; None of none."""
    if not gradients:
        return None
    return float(torch.stack([one.detach().abs().amax() for one in gradients if one.numel()]).amax())
