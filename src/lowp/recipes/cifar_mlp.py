"""A perceptron on CIFAR-10: its time is mostly that of large matrix products, which are faster in integers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowp.recipes.classification import classifier, perceptron_layers
from lowp.recipes.data.cifar import read_cifar10
from lowp.recipes.data.images import image_data
from lowp.recipes.data.shapes import shape_images
from lowp.recipes.recipe import Data, Size

_VALUES = 3 * 32 * 32


def load(size: Size, path: Path | None) -> Data:
    """Return CIFAR-10 if a path is given, otherwise drawn images with ten kinds of figures; without augmentation."""
    if path is not None:
        return image_data(read_cifar10(path))
    return image_data(shape_images(32, *size.options["images"]))


def make_model(size: Size) -> nn.Module:
    """Return a perceptron from 3072 values to 10 classes, with the size's hidden layers and torch's initialisation."""
    return nn.Sequential(nn.Flatten(), *perceptron_layers(_VALUES, size.options["hidden"], 10))


CIFAR10_MLP = classifier(
    name="cifar10-mlp",
    summary="three-layer perceptron for images of 32x32",
    source="data: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images",
    data="generated: ten figures drawn on scikit-learn's photographs, 32x32; --data DIR: CIFAR-10 (batches or npz)",
    sizes={
        "cpu": Size(8, 100, 0.02, 855_050, {"hidden": (256, 256), "images": (2000, 500)}),
        "full": Size(40, 512, 0.02, 10_510_346, {"hidden": (2048, 2048), "images": (10_000, 2000)}),
    },
    load=load,
    make_model=make_model,
)
