"""A two-layer perceptron on handwritten digits of 28x28: MNIST, or scikit-learn's digits enlarged.

It is the smallest recipe that shows loss scaling on a well-known data set.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowp.recipes.classification import classifier, perceptron_layers
from lowp.recipes.data.images import image_data
from lowp.recipes.data.mnist import enlarged_digits, read_mnist
from lowp.recipes.recipe import Data, Size


def load(size: Size, path: Path | None) -> Data:
    """Return MNIST if a path is given, otherwise scikit-learn's digits enlarged; without augmentation."""
    return image_data(enlarged_digits() if path is None else read_mnist(path))


def make_model(size: Size) -> nn.Module:
    """Return a perceptron from 784 grey values to 10 digits, with one hidden layer and torch's initialisation."""
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
