"""Steps without a loss scale: skipped if a shared exponent met infinities, reported if not finite."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from lowp.compat import private
from lowp.exponents import SharedExponents
from lowp.grad_scaler import NonFiniteGradients
from lowp.kernels import hardware
from lowp.optim.shards import local
from lowp.step_guard import StepGuard

__all__ = ["UnscaledSteps"]

_DisableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C.DisableTorchFunction"))
Optimizers = Sequence[torch.optim.Optimizer]


class UnscaledSteps:
    """The checks of a step in a precision without a loss scale; the guard acts on the results."""

    def __init__(self, name: str, exponents: SharedExponents | None) -> None:
        self.name, self.exponents = name, exponents
        self.faults: list[str] = []  # of the latest step that was skipped because of them
        self._bad_loss: Tensor | bool | None = None  # whether a loss since the last step was not finite, on the device

    def saw(self, loss: Tensor) -> None:
        """Check a loss before its backward; nothing waits for a device."""
        if torch.compiler.is_compiling() or self.exponents is not None:  # shared exponents skip a step for infinities
            return
        with _DisableTorchFunction():  # a function mode of the user's is not called for these ops
            if type(loss) is Tensor and hardware.is_on_host(loss) and loss.numel() == 1:  # faster than torch's kernels
                bad: Tensor | bool = not cmath.isfinite(loss.item())
            else:
                bad = ~torch.isfinite(loss.detach()).all()
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def skips(self, guard: StepGuard, number: int) -> bool:
        """Skip step `number` if a non-finite value was written in it, on any rank. Return whether it was skipped.

        The skip is reported, counted and settled. Raises NonFiniteGradients after `patience` consecutive skips.
        """
        exponents = self.exponents
        if exponents is None:
            return False
        faults = exponents.faults()
        if not exponents.any_rank(bool(faults)):
            return False
        self.faults = faults
        guard.settle(False)
        exponents.flush()
        where = f"first in the {faults[0]}" if faults else "on another rank"
        text = f"an infinity or a NaN, {where}: int16 has neither, and step {number} was skipped"
        guard.count(True)
        if guard.too_many():
            raise NonFiniteGradients(
                f"{text}, as were the {guard.patience - 1} steps before it: look at the inputs, the learning rate and "
                "the loss, or add a rule that keeps that op in fp32"
            )
        warnings.warn(text, UserWarning, stacklevel=4)
        return True

    def end(self, guard: StepGuard, number: int, optimizers: Optimizers) -> None:
        """Settle step `number`, which was taken; warn once when it is known that the run is no longer finite."""
        guard.settle(True)
        bad, self._bad_loss = self._bad_loss, None
        if self.exponents is not None:
            self._look_beyond(self.exponents, guard, number)
            self.exponents.flush()
            return
        bad = _smallest_gradient_is_bad(optimizers) if bad is None else bad
        if bad is not None and guard.turned_bad(bad):
            warnings.warn(
                f"step {number}: the loss or a gradient is infinite or NaN, and {self.name} has no loss scale that "
                "skips such steps: the weights may no longer be finite. Resume an earlier checkpoint with a smaller "
                f"learning rate, look at the inputs, or skip such steps: Precision({self.name!r}, "
                "loss_scale='dynamic')",
                UserWarning,
                stacklevel=4,
            )

    def _look_beyond(self, exponents: SharedExponents, guard: StepGuard, number: int) -> None:
        """Warn once about numbers too large for the format; raise if weights stay too large."""
        sites = exponents.beyond()
        guard.count(any(site.startswith(("weight of", "update of")) for site in sites))
        if not sites:
            return
        text = f"step {number}: numbers beyond the largest of {self.name} are cut off, first in the {sites[0]}"
        advice = "look at the learning rate and at the scale of inputs and loss"
        if guard.too_many():
            exponents.flush()
            raise NonFiniteGradients(f"{text}, and weights for {guard.patience} steps in a row: {advice}")
        if not exponents.has_told_beyond:
            exponents.has_told_beyond = True
            warnings.warn(f"{text}. If this continues, {advice}", UserWarning, stacklevel=5)


def _smallest_gradient_is_bad(optimizers: Optimizers) -> Tensor | None:
    """Whether the smallest gradient is not finite; used if no loss was seen, since NaN spreads through backward."""
    present = [
        local(parameter.grad)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and not parameter.grad.is_sparse
    ]
    return ~torch.isfinite(min(present, key=torch.Tensor.numel)).all() if present else None
