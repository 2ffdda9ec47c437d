"""Gradients and updates of weights in a real run, as histograms of exponents, and their losses in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.recording.histograms import Fp16Counts, Histogram, LostUpdates, ratios
from lowp.recipes.recording.runs import Stop, Told, head, moments_of, train, weights_of
from lowp.recipes.sampling import ExactUpdates, Reference
from lowp.recipes.training import Settings, Training

__all__ = ["record_gradients", "record_updates"]

# An update below the ratio 2**limit to its weight is lost by rounding to nearest: half an ulp is 2**-p of a weight's
# power of two, hence between 2**-(p + 1) and 2**-p of the weight, with p bits of significand.
LIMITS = {"bf16": -8, "fp16": -11}
_STEPS_OF_AN_EPOCH = 8
_STEPS_OF_A_RUN = 24


def record_updates(
    settings: Settings, *, stop: Stop = lambda: False, told: Told = lambda name, epoch: None
) -> dict[str, Any]:
    """Train; return histograms of weight gradients and of |update| / |weight| in the first, middle and last epoch.

    They are those of matrices and kernels at eight steps of each epoch. Updates are computed by the recipe's optimizer
    in fp64. `below`: shares of ratios below the limits. `lost`: shares of updates that do not change a weight stored in
    the format.
    """
    training = Training(settings)
    wanted = {"first": 0, "last": training.epochs - 1, "middle": training.epochs // 2}
    once = {epoch: moment for moment, epoch in reversed(wanted.items())}  # fewer than three for a short run
    moments = {once[epoch]: epoch for epoch in sorted(once)}
    observer = _Updates(training, moments)
    train(training, observer, stop, told)
    return {
        **head("figure-updates", training),
        "limits": LIMITS,
        "weights": sum(one.numel() for one in weights_of(training.model.named_parameters()).values()),
        "moments": {moment: observer.found[moment].document() for moment in moments},
    }


def record_gradients(
    settings: Settings, *, stop: Stop = lambda: False, told: Told = lambda name, epoch: None
) -> dict[str, Any]:
    """Train in a naive precision; return histograms of weight gradients, updates and update:weight ratios.

    They are taken at 24 steps of the run. Gradients are those of an fp32 backward on the same weights and batch;
    `flushed`: the share of them that is zero in the run. Updates are computed in fp64 from the run's own gradients;
    `unmoved`: the share of them whose weight did not change in the run's step.
    """
    training = Training(settings)
    observer = _Swallowed(training)
    train(training, observer, stop, told)
    return {**head("figure-gradients", training), "limits": LIMITS, **observer.document()}


class _Moment:
    """Counts of the sampled steps of one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.gradients, self.ratios = Histogram(), Histogram()
        self.lost = [LostUpdates(format) for format in LIMITS]

    def document(self) -> dict[str, Any]:
        """Return plain values; epochs are counted from 1."""
        return {
            "epoch": self.epoch + 1,
            "steps_sampled": self.steps,
            "learning_rates": [min(self.rates), max(self.rates)] if self.rates else None,
            "gradients": self.gradients.document(),
            "ratios": self.ratios.document(),
            "below": {format: self.ratios.below(limit) for format, limit in LIMITS.items()},
            "lost": {one.format: one.share for one in self.lost},
        }


class _Updates:
    """Counts weight gradients and fp64 updates at some steps of some epochs."""

    def __init__(self, training: Training, moments: dict[str, int]) -> None:
        self.found = {moment: _Moment(epoch) for moment, epoch in moments.items()}
        self._training = training
        self._exact = ExactUpdates(training.recipe, training.size, training.device)
        self._chosen = set(moments_of(range(training.steps_per_epoch), _STEPS_OF_AN_EPOCH))

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step: eight steps of each chosen epoch."""
        here = any(one.epoch == self._training.epoch for one in self.found.values())
        return here and self._training.step_of_epoch in self._chosen

    def before_forward(self) -> None:
        """Do nothing."""

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Count the gradients, and the updates of a step in fp64."""
        weights, own = model.state_dict(), dict(model.named_parameters())
        changes = weights_of(self._exact.of(weights, own, optimizer))
        step = self._training.epoch * self._training.steps_per_epoch + self._training.step_of_epoch
        for moment in self.found.values():
            if moment.epoch != self._training.epoch:
                continue
            moment.steps.append(step)
            moment.rates.append(optimizer.param_groups[0]["lr"])
            for name, change in changes.items():
                gradient, weight = own[name].grad, weights[name].double()
                if gradient is not None:
                    moment.gradients.add(gradient)
                    moment.ratios.add(ratios(weight, change))
                    for lost in moment.lost:
                        lost.add(weight, change)

    def after_step(self, model: nn.Module) -> None:
        """Do nothing: the fp64 updates were counted before the step."""


class _Swallowed:
    """Counts gradients and updates in fp32 and in a naive run at some of its steps."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._reference = Reference(training.recipe, training.size, training.device)
        self._exact = ExactUpdates(training.recipe, training.size, training.device)
        steps = range(training.epochs * training.steps_per_epoch)
        self._steps = moments_of(steps, _STEPS_OF_A_RUN)
        self._changes: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self.gradients, self.updates, self.ratios = Fp16Counts(), Fp16Counts(), Histogram()
        self._flushed = self._unmoved = self._moving = 0

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step: 24 steps of the run."""
        at = self._training.epoch * self._training.steps_per_epoch + self._training.step_of_epoch
        return at in self._steps

    def before_forward(self) -> None:
        """Prepare the reference."""
        self._reference.remember()

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Count gradients in comparison with fp32's, and the updates computed from them in fp64."""
        weights, own = model.state_dict(), dict(model.named_parameters())
        self._reference.backward(weights, batch)
        for name, parameter in weights_of(self._reference.model.named_parameters()).items():
            there, gradient = parameter.grad, own[name].grad
            if there is not None:
                self.gradients.add(there)
                self._flushed += int(((there != 0) & (True if gradient is None else gradient == 0)).sum())
        self._changes = weights_of(self._exact.of(weights, own, optimizer))
        self._before = {name: weights[name].detach().clone() for name in self._changes}
        for name, change in self._changes.items():
            self.updates.add(change)
            self.ratios.add(ratios(weights[name].double(), change))

    def after_step(self, model: nn.Module) -> None:
        """Count the weights with a nonzero update that did not change."""
        weights = model.state_dict()
        for name, change in self._changes.items():
            moving = change != 0
            self._moving += int(moving.sum())
            self._unmoved += int((moving & (weights[name] == self._before[name])).sum())

    def document(self) -> dict[str, Any]:
        """Return plain values; shares are those of the nonzero elements of the histograms."""
        return {
            "steps_sampled": self._steps,
            "gradients": self.gradients.document(),
            "flushed": self._flushed / max(1, self.gradients.histogram.present),
            "updates": self.updates.document(),
            "ratios": self.ratios.document(),
            "below": {format: self.ratios.below(limit) for format, limit in LIMITS.items()},
            "unmoved": self._unmoved / max(1, self._moving),
        }
