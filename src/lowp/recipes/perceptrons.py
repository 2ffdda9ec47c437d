"""Perceptrons on images: MNIST, or scikit-learn's digits enlarged, and CIFAR-10.

`mnist` is the smallest recipe that shows loss scaling on a well-known data set. The time of `cifar10-mlp` is mostly
that of large matrix products, which are faster in integers.
"""

from functools import partial
from pathlib import Path

from torch import nn

from lowp.recipes.classification import DRAWN_SMALL, classifier, load_small, perceptron_layers
from lowp.recipes.data.digits import enlarged_digits, read_mnist
from lowp.recipes.data.images import image_data
from lowp.recipes.recipe import Data, Size


def load_digits(size: Size, path: Path | None) -> Data:
    """Return MNIST if a path is given, otherwise scikit-learn's digits enlarged; without augmentation."""
    return image_data(enlarged_digits() if path is None else read_mnist(path))


def make_model(values: int, size: Size) -> nn.Module:
    """Return a perceptron from an image's values to 10 classes, with the size's hidden layers, one by its width."""
    hidden = size.options["hidden"]
    return nn.Sequential(nn.Flatten(), *perceptron_layers(values, [hidden] if isinstance(hidden, int) else hidden, 10))


MNIST = classifier(
    name="mnist",
    summary="two-layer perceptron on handwritten digits of 28x28",
    source="LeCun et al. 1998, Gradient-Based Learning Applied to Document Recognition, section III",
    data="embedded: scikit-learn's digits enlarged (real, 1797 images); --data DIR: MNIST (idx files, packed or not)",
    sizes={"cpu": Size(10, 50, 0.05, 101_770, {"hidden": 128}), "full": Size(20, 100, 0.05, 795_010, {"hidden": 1000})},
    load=load_digits,
    make_model=partial(make_model, 28 * 28),
    threads=1,
)

CIFAR10_MLP = classifier(
    name="cifar10-mlp",
    summary="three-layer perceptron for images of 32x32",
    source="data: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
    data=DRAWN_SMALL,
    sizes={
        "cpu": Size(8, 100, 0.02, 855_050, {"hidden": (256, 256), "images": (2000, 500)}),
        "full": Size(40, 512, 0.02, 10_510_346, {"hidden": (2048, 2048), "images": (10_000, 2000)}),
    },
    load=load_small,
    make_model=partial(make_model, 3 * 32 * 32),
)
