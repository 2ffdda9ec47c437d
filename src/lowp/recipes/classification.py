"""Shared parts of the recipes that classify images: loss, metrics, optimizer, and the layers of a perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.recipe import Metric, Recipe, linear_decay, sgd_with_momentum

__all__ = ["classifier", "evaluate", "guesses", "loss", "perceptron_layers"]


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, averaged over the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def guesses(batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return ``accuracy`` and mean cross-entropy (``loss``) over all batches of scores [N, classes], classes [N]."""
    summed, right, count = 0.0, 0, 0
    for scores, classes in batches:
        scores = scores.float()
        summed += float(nn.functional.cross_entropy(scores, classes, reduction="sum"))
        right += int((scores.argmax(1) == classes).sum())
        count += len(classes)
    return {"accuracy": right / count, "loss": summed / count}


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Over all batches: ``accuracy``, ``top5`` (the class is among the five best scores) and the cross-entropy."""
    right = among_five = count = 0
    summed = 0.0
    for images, labels in batches:
        scores = model(images).float()
        best = scores.topk(5, dim=1).indices
        right += int((best[:, 0] == labels).sum())
        among_five += int((best == labels[:, None]).sum())
        summed += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
        count += len(labels)
    return {"accuracy": right / count, "top5": among_five / count, "loss": summed / count}


def perceptron_layers(values: int, hidden: Sequence[int], classes: int) -> list[nn.Module]:
    """Linear layers with ReLU between them; torch's own initialisation."""
    widths = [values, *hidden]
    layers = [layer for fan in itertools.pairwise(widths) for layer in (nn.Linear(*fan), nn.ReLU())]
    return [*layers, nn.Linear(widths[-1], classes)]


classifier = partial(
    Recipe,
    metric=Metric("accuracy"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=sgd_with_momentum,
    schedule=linear_decay,
    unit="images",
)
