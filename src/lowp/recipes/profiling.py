"""A recipe watched by the profiler for some steps, and a policy tried beside fp32 on the same batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowp.kernels import quantize
from lowp.numerics.prediction import effect, lost_updates
from lowp.numerics.profiler import Profiler
from lowp.numerics.record import Record
from lowp.numerics.spectrum import Spectrum
from lowp.numerics.updates import Updates
from lowp.policy import Policy
from lowp.precision import Precision
from lowp.recipes.sensitivity import Confirmed, confirmed
from lowp.recipes.training import Settings, Training, load_data, threads_of

__all__ = ["Verified", "profiled", "verified"]

_STEPS, _LOOKS, _SECONDS = 100, 4, 60.0  # what a profile without a number of steps takes
_CAST_ALONE = "bf16"
_CLOSE = 0.1  # of the loss that training has taken away, by which a policy may end above fp32


def profiled(
    settings: Settings,
    steps: int | None,
    max_overhead: str | float | None,
    out: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Record:
    """Train a recipe for some steps under the profiler and return what it saw; where `stop()` becomes true, till then.

    Without a number of steps it trains until the budget has paid for a few looks: 100 steps at least, and beyond those
    for a minute at most.
    """
    training = Training(settings)
    begun = time.perf_counter()
    with threads_of(training.recipe.threads):
        profiler = Profiler(
            training.model,
            training.optimizer,
            precision=training.precision,
            out=out,
            max_overhead=max_overhead,
            title=f"{training.recipe.name}, {training.settings.precision}",
        )

        def is_enough(taken: int) -> bool:
            if taken and stop():
                return True
            if steps is not None:
                return taken >= steps
            return taken >= _STEPS and (profiler.plan.rounds.taken >= _LOOKS or time.perf_counter() - begun > _SECONDS)

        with profiler:
            _run(training, is_enough)
    return profiler.record


def _run(training: Training, is_enough: Callable[[int], bool]) -> list[float]:
    """Take steps of a training, over as many epochs as they need, without evaluations; return the losses."""
    losses: list[torch.Tensor] = []
    step = training.step

    def noted(batch: Any, sampler: Any = None) -> torch.Tensor:
        loss = step(batch, sampler)
        losses.append(loss)
        return loss

    training.step = noted  # type: ignore[method-assign]
    training.history.append({"loss": math.nan, "epoch": 0})  # no evaluation of the model before training
    while not is_enough(len(losses)):
        if training._run_epoch(lambda: is_enough(len(losses)), None):
            training.epoch, training.step_of_epoch = training.epoch + 1, 0
        if training.epoch >= training.epochs:
            break
    return [float(one) for one in losses]


@dataclass(frozen=True)
class Verified:
    """A policy beside fp32, and how far predictions were from casts of the run's own tensors.

    `steps` of the `whole` number of steps that the recipe has were compared.
    """

    steps: int
    whole: int
    losses: tuple[float, float]
    first: float
    skipped: int
    errors: dict[str, float]
    layers: tuple[Confirmed, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the policy learned as fp32 did."""
        plain, policy = self.losses
        return math.isfinite(policy) and policy - plain <= _CLOSE * max(self.first - plain, abs(plain) * 0.5)

    def __str__(self) -> str:
        plain, policy = self.losses
        told = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        word = "as fp32" if self.holds else "NOT as fp32"
        layers = "".join(f"\n  {one}" for one in self.layers)
        alone = f"\nhow far the loss moves where one layer alone is cast to {_CAST_ALONE}:{layers}" if layers else ""
        return (
            f"verified over {self.steps} of the recipe's {self.whole} steps: loss {policy:.4f} beside {plain:.4f} in "
            f"fp32, {word}; {self.skipped} steps skipped\nerror of the predictions: {told}{alone}"
        )


def verified(settings: Settings, record: Record, policy: Policy, steps: int | None) -> Verified:
    """Train in fp32 and under the policy, from the same weights on the same batches; None: over the whole recipe."""
    data = load_data(settings.filled())
    ends, skipped = [], 0
    training = Training(settings, data)
    whole = training.epochs * training.steps_per_epoch

    def is_enough(taken: int) -> bool:
        return taken >= (whole if steps is None else steps)

    with threads_of(training.recipe.threads):
        losses = _run(training, is_enough)
        ends.append(_last(losses))
        errors = _errors(training)
        layers = tuple(confirmed(training, _CAST_ALONE))
        precision = Precision(policy, seed=settings.seed)
        tried = Training(replace(settings, precision="fp32"), data, precision)
        ends.append(_last(_run(tried, is_enough)))
        skipped = tried.precision.skipped_steps
    return Verified(len(losses), whole, (ends[0], ends[1]), losses[0], skipped, errors, layers)


def _last(losses: list[float]) -> float:
    """The mean of the last tenth."""
    kept = losses[-max(len(losses) // 10, 1) :]
    return sum(kept) / len(kept)


def _errors(training: Training) -> dict[str, float]:
    """How far predictions are from what casts do to the gradients and weights that the run has now, over them all."""
    flushed: list[Any] = [0.0, 0.0, 0]  # predicted, real, of how many
    stalled: list[Any] = [0.0, 0.0, 0]
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            weight, gradient = parameter.detach().float(), parameter.grad.detach().float()
            update = -float(group["lr"]) * gradient
            present, moved = gradient != 0, update != 0
            stored = quantize(weight, "bf16")
            lost = lost_updates(Updates.of(weight, update, gradient), Spectrum.of(weight), "bf16")
            kept = (quantize(stored + update, "bf16") == stored) & moved
            _add(
                flushed,
                effect(Spectrum.of(gradient), "fp16").flushed,
                (quantize(gradient, "fp16") == 0) & present,
                present,
            )
            _add(stalled, lost, kept, moved)
    both = {"flushed in fp16": flushed, "lost in pure bf16": stalled}
    return {name: abs(predicted - real) / max(count, 1) for name, (predicted, real, count) in both.items()}


def _add(sums: list[Any], share: float, some: torch.Tensor, among: torch.Tensor) -> None:
    count = int(among.sum())
    sums[0], sums[1], sums[2] = sums[0] + share * count, sums[1] + int(some.sum()), sums[2] + count
