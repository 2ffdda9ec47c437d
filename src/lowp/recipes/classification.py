"""Shared parts of the classification recipes: the loss, the metrics, the optimizer, and the layers of a perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.recipe import Metric, Recipe, linear_decay, sgd_with_momentum


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy, averaged over the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def score_metrics(batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return ``accuracy`` and ``loss``, the mean cross-entropy, of batches of scores [N, classes] and classes [N]."""
    loss_sum, correct, count = 0.0, 0, 0
    for scores, classes in batches:
        scores = scores.float()
        loss_sum += float(nn.functional.cross_entropy(scores, classes, reduction="sum"))
        correct += int((scores.argmax(1) == classes).sum())
        count += len(classes)
    return {"accuracy": correct / count, "loss": loss_sum / count}


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``accuracy``, ``top5`` and ``loss``, the mean cross-entropy, over all batches.

    ``top5``: the share of images whose label is among the five classes with the highest scores.
    """
    top1 = top5 = count = 0
    loss_sum = 0.0
    for images, labels in batches:
        scores = model(images).float()
        predictions = scores.topk(5, dim=1).indices
        top1 += int((predictions[:, 0] == labels).sum())
        top5 += int((predictions == labels[:, None]).sum())
        loss_sum += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
        count += len(labels)
    return {"accuracy": top1 / count, "top5": top5 / count, "loss": loss_sum / count}


def perceptron_layers(values: int, hidden: Sequence[int], classes: int) -> list[nn.Module]:
    """Return linear layers with ReLU between them, from `values` inputs to `classes` scores."""
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
