"""Shared parts of the classification recipes: data, loss, metrics, optimizer, and the layers of a perceptron."""

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowp.recipes.data.cifar import read_cifar10
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
    """Compute the cross-entropy, averaged over the batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


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


classifier = partial(
    Recipe,
    metric=Metric("accuracy"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=sgd_with_momentum,
    schedule=linear_decay,
    unit="images",
)
