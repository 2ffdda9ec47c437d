"""Shared parts of the classification recipes, data, loss, metrics and optimizer, and two perceptrons on images.

`mnist` is the smallest recipe that shows loss scaling on a well-known data set. The time of `cifar10-mlp` is mostly
that of large matrix products, which are faster in integers.
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowp.recipes.data.cifar import read_cifar10
from lowp.recipes.data.digits import enlarged_digits, read_mnist
from lowp.recipes.data.images import image_data, read_folders
from lowp.recipes.data.shapes import shape_images
from lowp.recipes.recipe import Data, Metric, Recipe, Size, linear_decay, sgd_with_momentum

_DRAWN = "generated: ten figures drawn on scikit-learn's photographs"
DRAWN_SMALL = f"{_DRAWN}, 32x32; --data DIR: CIFAR-10 (batches or npz)"
DRAWN_LARGE = f"{_DRAWN}; --data DIR: train/CLASS and val/CLASS (ImageNet)"


def load_small(size: Size, path: Path | None, padding: int = 0) -> Data:
    """Return CIFAR-10 if a path is given, otherwise drawn images of 32x32 with ten kinds of figures.

    With a `padding`, training images are padded, cropped at random and flipped at random.
    """
    return image_data(shape_images(32, *size.options["images"]) if path is None else read_cifar10(path), padding)


def load_large(size: Size, path: Path | None) -> Data:
    """Return images in one folder per class if a path is given, otherwise drawn images with ten kinds of figures."""
    side = size.options["side"]
    if path is not None:
        return read_folders(path, side, size.options["classes"])
    return image_data(shape_images(side, *size.options["images"]), padding=side // 8)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy of ``(inputs, classes)``, averaged over the batch, and over pixels if each has one."""
    inputs, classes = batch
    return nn.functional.cross_entropy(model(inputs), classes)


def score_metrics(batches: Iterable[tuple[Tensor, Tensor]], *names: str) -> dict[str, float]:
    """Return ``accuracy``, ``loss``, the mean cross-entropy, and if named ``top5`` of scores [N, classes] and classes.

    ``top5``: the share of examples whose class is among the five with the highest scores.
    """
    loss_sum, top1, top5, count = 0.0, 0, 0, 0
    for scores, classes in batches:
        scores = scores.float()
        loss_sum += float(nn.functional.cross_entropy(scores, classes, reduction="sum"))
        if "top5" in names:
            predictions = scores.topk(5, dim=1).indices
            top1 += int((predictions[:, 0] == classes).sum())
            top5 += int((predictions == classes[:, None]).sum())
        else:
            top1 += int((scores.argmax(1) == classes).sum())
        count += len(classes)
    return {"accuracy": top1 / count, **{name: top5 / count for name in names}, "loss": loss_sum / count}


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``accuracy``, ``top5`` and ``loss``, the mean cross-entropy, over all batches."""
    return score_metrics(((model(images), labels) for images, labels in batches), "top5")


def perceptron_layers(values: int, hidden: Sequence[int], classes: int) -> list[nn.Module]:
    """Return linear layers with ReLU between them, from `values` inputs to `classes` scores."""
    widths = [values, *hidden]
    layers = [layer for fan in itertools.pairwise(widths) for layer in (nn.Linear(*fan), nn.ReLU())]
    return [*layers, nn.Linear(widths[-1], classes)]


# -- perceptrons on images ---------------------------------------------------------------------------------------------
classifier = partial(
    Recipe,
    metric=Metric("accuracy"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=sgd_with_momentum,
    schedule=linear_decay,
    unit="images",
)


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
