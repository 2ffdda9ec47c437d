"""A two-layer perceptron on handwritten digits of 28x28: MNIST where a path is given.

The smallest network that shows loss scaling at work on a set that everybody knows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lowp.recipes.classification import evaluate, loss
from lowp.recipes.data.images import image_data
from lowp.recipes.data.mnist import enlarged_digits, read_mnist
from lowp.recipes.recipe import Data, Metric, Recipe, Size, linear_decay


def load(size: Size, path: Path | None) -> Data:
    """MNIST from the user's folder, or scikit-learn's digits enlarged; no augmentation."""
    return image_data(enlarged_digits() if path is None else read_mnist(path))


def make_model(size: Size) -> nn.Module:
    """784 grey values, one hidden layer with ReLU, 10 digits; torch's own initialisation."""
    hidden = size.options["hidden"]
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Plain SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


MNIST = Recipe(
    name="mnist",
    summary="two-layer perceptron on handwritten digits of 28x28",
    source="LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition, section III",
    data="embedded: scikit-learn's digits enlarged (real, 1797 images); --data DIR: MNIST (idx files, packed or not)",
    sizes={
        "cpu": Size(10, 50, 0.05, 101_770, {"hidden": 128}),
        "full": Size(20, 100, 0.05, 795_010, {"hidden": 1000}),
    },
    metric=Metric("accuracy"),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=make_optimizer,
    schedule=linear_decay,
    threads=1,
    unit="images",
)
