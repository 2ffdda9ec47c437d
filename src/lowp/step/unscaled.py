"""Steps without a loss scale: skipped if what they read, or a shared exponent met, is infinite or NaN."""

from __future__ import annotations

import cmath
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from lowp import distributed
from lowp.compat import private
from lowp.exponents import SharedExponents, is_result
from lowp.kernels.choose import hardware
from lowp.kernels.int16.late import LateNumber
from lowp.optim.flex import FlexWeights
from lowp.optim.shards import local
from lowp.optim.skipping import starts_momentum
from lowp.step import NonFiniteGradients
from lowp.step.finite import FiniteSteps
from lowp.step.guard import StepGuard

__all__ = ["UnscaledSteps"]

_DisableTorchFunction = cast(Callable[[], AbstractContextManager[None]], private("torch._C.DisableTorchFunction"))
Optimizers = Sequence[torch.optim.Optimizer]
_READ = "what the step reads"  # the flag of a device for what `FiniteSteps` names, after those of exponents


class UnscaledSteps:
    """The checks of a step in a precision without a loss scale; the guard acts on the results."""

    def __init__(self, name: str, exponents: SharedExponents | None, finite: FiniteSteps | None) -> None:
        self.name, self.exponents, self.finite = name, exponents, finite
        self._why = f"{name} has no loss scale" if exponents is None else "int16 has neither"
        self._faults: list[str] = []  # of the latest step that was skipped because of them
        self._skips_here = False  # the coming step, as the host knows
        self._there = _SkipsThere(self._why)
        self._bad_loss: Tensor | bool | None = None  # whether a loss since the last step was not finite, on the device

    @property
    def faults(self) -> list[str]:
        """The sites of the latest step that was skipped for them. Waits for a device that has skipped by itself."""
        there = self._there.faults()
        if _READ in there and self.finite is not None:
            there = [*there[: there.index(_READ)], *self.finite.faults()]
        return there or self._faults

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
        faults = [] if exponents is None else exponents.faults()
        if self._skips_here and self.finite is not None:
            faults += self.finite.faults()
        is_bad, self._skips_here = self._skips_here or bool(faults), False
        if not (is_bad if exponents is None else exponents.any_rank(is_bad)):
            return False
        self._faults, self._bad_loss = faults, None
        guard.settle(False)
        if exponents is not None:
            exponents.flush()
        where = f"first in the {faults[0]}" if faults else "on another rank"
        text = f"an infinity or a NaN, {where}: {self._why}, and step {number} was skipped"
        guard.count(True)
        if guard.too_many():
            raise NonFiniteGradients(
                f"{text}, as were the {guard.patience - 1} steps before it: look at the inputs, the learning rate and "
                "the loss, or add a rule that keeps that op in fp32"
            )
        warnings.warn(text, UserWarning, stacklevel=4)
        return True

    def skip_there(self, optimizers: Optimizers) -> Tensor | None:
        """Return whether a device is to skip this step, as `skips` would, in a 0-d tensor that nobody reads.

        None if the host has to know: under shared exponents with several ranks, on a CPU, and for an optimizer whose
        step cannot be undone.
        """
        reads = self.finite is not None and self.finite.skips(optimizers, self.exponents is None)
        flags = self._flags(optimizers)
        if flags is not None and isinstance(reads, Tensor):
            flags[_READ] = reads
        if flags and (isinstance(reads, Tensor) or not reads):
            return self._there.decide(flags)
        self._skips_here = bool(reads)
        return None

    def _flags(self, optimizers: Optimizers) -> dict[str, Tensor] | None:
        """Return the flags of a device by site, of shared exponents; None if the host has to know."""
        if self.exponents is None:
            return None if any(map(starts_momentum, optimizers)) else {}
        can_skip = not distributed.has_other_ranks() and all(isinstance(one, FlexWeights) for one in optimizers)
        flags = {site: flag for site, flag in self.exponents.flags().items() if not is_result(site)} if can_skip else {}
        return flags if flags and all(cast(FlexWeights, one).skips_there() for one in optimizers) else None

    def end(self, guard: StepGuard, number: int, optimizers: Optimizers, skip: Tensor | None = None) -> None:
        """Settle step `number`, which was taken unless a device has set `skip`.

        Warns once when it is known that the run is no longer finite.
        """
        guard.settle(True if skip is None else ~skip)
        bad, self._bad_loss = self._bad_loss, None
        if self.finite is not None:
            self.finite.stepped(optimizers)
        if self.exponents is not None:
            self._look_beyond(self.exponents, guard, number)
            self.exponents.flush()
            if skip is not None:
                self._there.end(guard, number, lambda: self.faults)
            return
        guard.count(False)
        if self.finite is not None:
            if skip is not None:
                self._there.end(guard, number, lambda: self.faults)
                bad = None if bad is None else ~skip & bad
        elif bad is None:
            bad = _smallest_gradient_is_bad(optimizers)
        if bad is not None and guard.turned_bad(bad):
            warnings.warn(f"step {number}: {self._of_loss()}", UserWarning, stacklevel=4)

    def _of_loss(self) -> str:
        """Return what is said of a step that was taken though the loss, or a gradient that is not looked at, is bad."""
        advice = "Resume an earlier checkpoint with a smaller learning rate, or look at the inputs"
        if self.finite is not None:
            return f"the loss is infinite or NaN, and no gradient is, so that the step was taken. {advice}"
        return (
            f"the loss or a gradient is infinite or NaN, and {self.name} has no loss scale that skips such steps: the "
            f"weights may no longer be finite. {advice}, or skip such steps: Precision({self.name!r}, "
            "loss_scale='dynamic'), or --loss-scale dynamic in lowp run"
        )

    def _look_beyond(self, exponents: SharedExponents, guard: StepGuard, number: int) -> None:
        """Warn once about numbers too large for the format; raise if weights stay too large."""
        sites = exponents.beyond()
        guard.count(any(site.startswith(("weight of", "update of")) for site in sites))
        if not sites:
            if not exponents.has_told_most and (most := exponents.beyond(most=True)):
                exponents.has_told_most = True
                warnings.warn(
                    f"step {number}: most numbers were cut off in the {most[0]}, as they are much larger than what "
                    "this place has seen in earlier steps. Its next exponent holds them. If two kinds of data take "
                    "turns there, such as two losses, compute them in modules of their own",
                    UserWarning,
                    stacklevel=5,
                )
            return
        text = f"step {number}: numbers beyond the largest of {self.name} are cut off, first in the {sites[0]}"
        advice = "look at the learning rate and at the scale of inputs and loss"
        if guard.too_many():
            exponents.flush()
            raise NonFiniteGradients(f"{text}, and weights for {guard.patience} steps in a row: {advice}")
        if not exponents.has_told_beyond:
            exponents.has_told_beyond = True
            warnings.warn(f"{text}. If this continues, {advice}", UserWarning, stacklevel=5)


class _SkipsThere:
    """Steps that a device has skipped by itself for infinities: told of when it is known, and never waited for."""

    def __init__(self, why: str) -> None:
        self._why = why  # such a step cannot be taken
        self._skipped: Tensor | None = None  # how many there were
        self._in_a_row: Tensor | None = None
        self._sites: list[str] = []
        self._flags: Tensor | None = None  # of the latest one, by site
        self._late, self._told = LateNumber(), 0

    def decide(self, flags: dict[str, Tensor]) -> Tensor:
        """Return whether any of these flags is set, and take note of a step that is skipped for it."""
        known = set(self._sites)
        self._sites += [site for site in flags if site not in known]
        nothing = torch.zeros_like(next(iter(flags.values())))
        found = torch.stack([flags.get(site, nothing) for site in self._sites])
        skip = found.any()
        if self._skipped is None or self._in_a_row is None:
            self._skipped, self._in_a_row = (torch.zeros_like(skip, dtype=torch.int64) for _ in range(2))
        if self._flags is None:
            self._flags = torch.zeros_like(found)
        elif len(self._flags) < len(found):
            self._flags = torch.cat((self._flags, found.new_zeros(len(found) - len(self._flags))))
        # in place: a captured graph goes on from what it has left
        self._skipped.add_(skip)
        self._in_a_row.add_(1).mul_(skip)
        self._flags.copy_(torch.where(skip, found, self._flags))
        return skip

    def faults(self) -> list[str]:
        """The sites of the latest step that was skipped. Waits for the device."""
        flags = [] if self._flags is None else self._flags.tolist()
        return [site for site, is_bad in zip(self._sites, flags, strict=True) if is_bad]

    def end(self, guard: StepGuard, number: int, faults: Callable[[], list[str]]) -> None:
        """Warn of steps that have been skipped since the last time; give up after as many as the guard has patience."""
        assert self._skipped is not None
        if guard.too_many(self._in_a_row):
            sites = faults()
            raise NonFiniteGradients(
                f"an infinity or a NaN, first in the {sites[0] if sites else 'step'}: {self._why}, and "
                f"{guard.patience} steps in a row were skipped up to step {number}: look at the inputs, the learning "
                "rate and the loss, or add a rule that keeps that op in fp32"
            )
        count = self._late.read() or 0
        if not self._late.is_under_way:
            self._late.send(self._skipped)
        if count > self._told:
            warnings.warn(
                f"an infinity or a NaN was met: {self._why}, and {count - self._told} of the steps up to "
                f"{number} were skipped; Precision.faults tells where",
                UserWarning,
                stacklevel=6,
            )
            self._told = count


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
