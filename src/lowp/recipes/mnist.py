"""A two-layer perceptron on handwritten digits of 28x28: MNIST if a path is given.

The smallest network that shows loss scaling at work on a well-known data set.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowp.recipes.classification import classifier, perceptron_layers
from lowp.recipes.data.images import image_data
from lowp.recipes.data.mnist import enlarged_digits, read_mnist
from lowp.recipes.recipe import Data, Size


def load(size: Size, path: Path | None) -> Data:
    """MNIST from the user's folder, or scikit-learn's digits enlarged; no augmentation."""
    return image_data(enlarged_digits() if path is None else read_mnist(path))


def make_model(size: Size) -> nn.Module:
    """784 grey values, one hidden layer with ReLU, 10 digits; torch's own initialisation."""
    return nn.Sequential(nn.Flatten(), *perceptron_layers(28 * 28, (size.options["hidden"],), 10))


MNIST = classifier(
    name="mnist",
    summary="two-layer perceptron on handwritten digits of 28x28",
    source="LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition, section III",
    data="embedded: scikit-learn's digits enlarged (real, 1797 images); --data DIR: MNIST (idx files, packed or not)",
    sizes={
        "cpu": Size(10, 50, 0.05, 101_770, {"hidden": 128}),
        "full": Size(20, 100, 0.05, 795_010, {"hidden": 1000}),
    },
    load=load,
    make_model=make_model,
    threads=1,
)
