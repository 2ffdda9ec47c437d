"""Profiling of a recipe, and what its predictions are worth: the policy and single casts, tried beside fp32."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.errors import counted
from lowp.kernels import quantize
from lowp.numerics.prediction import effect, lost_updates, sensitivity
from lowp.numerics.profiler import Profiler
from lowp.numerics.record import Record
from lowp.numerics.spectrum import Spectrum, Updates
from lowp.policy import Policy
from lowp.precision import Precision
from lowp.recipes.sampling import Share
from lowp.recipes.training import Settings, Training, load_data, threads_of

_STEPS, _LOOKS, _SECONDS = 100, 4, 60.0  # of a profile without a given number of steps: see `profiled`
_CAST_ALONE = "bf16"
_TOLERANCE = 0.1  # of the decrease of the loss in fp32, by which the loss of a policy may be larger


def profiled(
    settings: Settings,
    steps: int | None,
    max_overhead: str | float | None,
    out: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], None] = lambda taken, steps: None,
) -> Record:
    """Train a recipe for some steps under the profiler, and return its record; stop earlier if `stop()` is true.

    Without a number of steps it takes 100, and then more until the profiler has sampled four rounds or a minute has
    passed. `on_progress` gets the number of steps taken and that number.
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
            on_progress(taken, max(taken, steps or _STEPS))
            if taken and stop():
                return True
            if steps is not None:
                return taken >= steps
            return taken >= _STEPS and (profiler.schedule.rounds >= _LOOKS or time.perf_counter() - begun > _SECONDS)

        with profiler:
            training.take(is_enough)
    return profiler.record


@dataclass(frozen=True)
class Verified:
    """A policy compared with fp32, and the errors of predictions against casts of the run's own tensors.

    `steps`: the number of steps compared, out of `whole` in the recipe. `losses`: the final loss in fp32 and under the
    policy. `first`: the loss before training. `skipped`: the steps skipped under the policy. `errors`: the mean
    absolute error of each predicted share. `layers`: predicted and measured effects of casting single layers.
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
        """Whether the final loss of the policy is finite, and larger than that of fp32 by at most the tolerance."""
        fp32, policy = self.losses
        return math.isfinite(policy) and policy - fp32 <= _TOLERANCE * max(self.first - fp32, abs(fp32) * 0.5)

    def __str__(self) -> str:
        fp32, policy = self.losses
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        word = "as fp32" if self.holds else "NOT as fp32"
        layers = "".join(f"\n  {layer}" for layer in self.layers)
        alone = f"\nchange of the loss when one layer alone is cast to {_CAST_ALONE}:{layers}" if layers else ""
        return (
            f"verified over {self.steps} of the recipe's {self.whole} steps: loss {policy:.4f} beside {fp32:.4f} in "
            f"fp32, {word}; {counted(self.skipped, 'step')} skipped\nerror of the predictions: {errors}{alone}"
        )


def verified(settings: Settings, policy: Policy, steps: int | None) -> Verified:
    """Train in fp32 and under the policy, from the same weights and on the same batches, and compare.

    Without a number of steps both runs take all steps of the recipe.
    """
    data = load_data(settings.filled())
    ends, skipped = [], 0
    training = Training(settings, data)
    whole = training.steps

    def is_enough(taken: int) -> bool:
        return taken >= (whole if steps is None else steps)

    with threads_of(training.recipe.threads):
        losses = training.take(is_enough)
        ends.append(_last(losses))
        errors = _errors(training)
        layers = tuple(confirmed(training, _CAST_ALONE))
        precision = Precision(policy, seed=settings.seed)
        policy_run = Training(replace(settings, precision="fp32"), data, precision)
        ends.append(_last(policy_run.take(is_enough)))
        skipped = policy_run.precision.skipped_steps
    return Verified(len(losses), whole, (ends[0], ends[1]), losses[0], skipped, errors, layers)


def _last(losses: list[float]) -> float:
    """Return the mean of the last tenth of the losses."""
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


def _errors(training: Training) -> dict[str, float]:
    """Return the absolute errors of predicted shares, compared with casts of the run's current gradients and weights.

    ``flushed in fp16``: the share of nonzero gradients that become zero. ``lost in pure bf16``: the share of nonzero
    updates that do not change a bf16 weight.
    """
    predicted = {"flushed in fp16": 0.0, "lost in pure bf16": 0.0}  # numbers of elements
    measured = {name: Share() for name in predicted}
    for group in training.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            weight, gradient = parameter.detach().float(), parameter.grad.detach().float()
            update = -float(group["lr"]) * gradient
            flushed = effect(Spectrum.of(gradient), "fp16").flushed
            lost = lost_updates(Updates.of(weight, update, gradient), Spectrum.of(weight), "bf16")
            counts = (
                (flushed, quantize(gradient, "fp16") == 0, gradient != 0),
                (lost, _is_lost(weight, update, "bf16"), update != 0),
            )
            for name, (share, found, chosen) in zip(predicted, counts, strict=True):
                predicted[name] += share * int(chosen.sum())
                measured[name].add(found, chosen)
    return {name: abs(predicted[name] - one.lost) / max(one.counted, 1) for name, one in measured.items()}


def _is_lost(weight: Tensor, update: Tensor, format: str) -> Tensor:
    """Return where an update does not change a weight that is stored in a format."""
    stored = quantize(weight, format)
    found: Tensor = quantize(stored + update, format) == stored
    return found


# -- single layers -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Confirmed:
    """A layer's weight or output: the predicted and the measured absolute change of the loss when it is cast."""

    module: str
    role: str
    predicted: float
    real: float

    def __str__(self) -> str:
        return f"{self.module or 'the model'} {self.role}: {self.predicted:.1e} predicted, {self.real:.1e} real"


def confirmed(training: Training, to: str, count: int = 3) -> list[Confirmed]:
    """Cast single weights and outputs to the format `to`, and return predicted and measured changes of the loss.

    They are the `count` weights and the `count` outputs of linear and convolutional layers with the largest changes
    that the record of a step predicts. All losses are those of one batch with the same random state. The model, its
    buffers, its gradients and the random state are restored.
    """
    model, kinds = training.model, (nn.Linear, nn.modules.conv._ConvNd)
    batch = training.data.training.batch(torch.arange(training.batch), torch.Generator().manual_seed(0))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    results: list[Confirmed] = []
    with _restored(model):
        still = torch.optim.SGD(model.parameters(), lr=0.0)  # its step changes nothing
        with Profiler(model, still, max_overhead=None, divergence=False) as profiler:
            loss = _loss(training, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            still.step()
        part = profiler.record.part
        weights = {name: part.updates.get(f"{name}.weight".removeprefix(".")) for name in layers}
        outputs = {key.module: slope for key, slope in part.slopes.items() if key.role == "output"}
        for role, seen in (("weight", weights), ("output", outputs)):
            predictions = [(sensitivity(one, to), name) for name in layers if (one := seen.get(name)) is not None]
            for predicted, name in sorted(predictions, reverse=True)[:count]:
                with torch.no_grad(), _cast(layers[name], role, to):
                    change = abs(float(_loss(training, batch)) - float(loss))
                results.append(Confirmed(name, role, predicted, change))
    return results


def _loss(training: Training, batch: Any) -> Tensor:
    torch.manual_seed(0)
    with training.precision.autocast():
        loss: Tensor = training.recipe.loss(training.model, batch)
    return loss


@contextmanager
def _cast(layer: nn.Module, role: str, to: str) -> Iterator[None]:
    """Cast a layer's weight, or its outputs, to the format for a while."""
    with ExitStack() as stack:
        if role == "output":
            handle = layer.register_forward_hook(lambda module, args, output: quantize(output, to))
            stack.callback(handle.remove)
        else:
            weight = layer.get_parameter("weight")
            stack.callback(weight.copy_, weight.detach().clone())
            weight.copy_(quantize(weight, to))
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Set gradients to None, and restore them, the buffers and torch's random state at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
