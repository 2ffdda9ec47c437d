"""Common parts of the recorders: a run observed at some of its steps, and the head of every document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lowp.recipes import results
from lowp.recipes.sampling import Observer
from lowp.recipes.training import Training, threads_of

__all__ = ["Stop", "Told", "head", "moments_of", "train", "weights_of"]

Stop = Callable[[], bool]
Told = Callable[[str, int], None]


def train(training: Training, observer: Observer | None, stop: Stop, told: Told, name: str | None = None) -> bool:
    """Train to the end with the recipe's own schedule and threads; return False if it was stopped before."""
    title = name or f"{training.recipe.name} in {training.precision.preset.name}"
    with threads_of(training.recipe.threads):
        return training.run(lambda one: told(title, one.epoch), stop, observer)


def moments_of(steps: range, count: int) -> list[int]:
    """Return at most `count` of the steps, spread evenly, each in the middle of its part."""
    count = min(count, len(steps))
    return [steps[int((number + 0.5) * len(steps) / count)] for number in range(count)]


def weights_of(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the matrices and kernels among named parameters: those with two dimensions or more."""
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: tensor for name, tensor in named if tensor.dim() >= 2}


def head(kind: str, training: Training) -> dict[str, Any]:
    """Return the head of every document of a run: settings, data, and the final metric."""
    settings, metric = training.settings, training.recipe.metric
    last = training.history[-1] if training.history else {}
    return {
        **results.header(kind, results.command_line()),
        "recipe": settings.recipe,
        "data": training.data.description,
        "precision": settings.precision,
        "seed": settings.seed,
        "epochs": training.epochs,
        "steps": training.epochs * training.steps_per_epoch,
        "metric": {"name": metric.name, "is_share": metric.share, "value": last.get(metric.name)},
        "failure": training.failure,
    }
