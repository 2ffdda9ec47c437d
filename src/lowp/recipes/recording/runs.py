"""Common parts of the recorders: training with an observer, the sampled steps, and the header of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lowp.recipes import results
from lowp.recipes.sampling import Observer
from lowp.recipes.training import Training, threads_of

Stop = Callable[[], bool]
OnProgress = Callable[[str, float], None]  # a name, and how much of it is done


def train(
    training: Training, observer: Observer | None, stop: Stop, on_progress: OnProgress, name: str | None = None
) -> bool:
    """Train to the end with the recipe's schedule and number of threads; return False if it was stopped before."""
    title = name or f"{training.recipe.name} in {training.precision.preset.name}"
    with threads_of(training.recipe.threads):
        return training.run(lambda training: on_progress(title, training.epoch), stop, observer)


def moments_of(steps: range, count: int) -> list[int]:
    """Return at most `count` of the steps, at the centres of parts of equal length."""
    count = min(count, len(steps))
    return [steps[int((index + 0.5) * len(steps) / count)] for index in range(count)]


def weights_of(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the matrices and kernels among named parameters: those with two dimensions or more."""
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: tensor for name, tensor in named if tensor.dim() >= 2}


def head(kind: str, training: Training) -> dict[str, Any]:
    """Return the header of a document of a run: settings, data, and the final metric."""
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
