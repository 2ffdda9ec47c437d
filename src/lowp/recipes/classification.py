"""What recipes that tell classes apart share: cross-entropy, and how often the class is the first or among five."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["evaluate", "loss"]


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, averaged over the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


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
