"""UNet: classifies every pixel of an image into nine classes.

The convolutions and the transposed convolutions run in low precision; batch normalisation and the cross-entropy over
all pixels are fp32. Most of its memory is that of activations, which 16 bits halve: the published measurement on a T4
has 4.26 GB in fp32 and 2.67 GB in mixed precision.

Without padding every convolution shrinks the feature map, and skip connections are cropped to its size: Ronneberger,
Fischer, Brox, "U-Net", 2015, arXiv 1505.04597, figure 1, with four of the five levels, and batch normalisation after
each ReLU. The output for an image of 256x256 are scores of its central 164x164 pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.data.segmentation import drawn_masks, read_masked
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adam, constant


# -- the network -------------------------------------------------------------------------------------------------------
class UNet(nn.Module):
    """UNet: from float images [N, 3, side, side] to scores [N, classes, smaller side, smaller side].

    `widths`: channels of each level; with (64, 128, 256, 512) and 9 classes it has 7,703,497 parameters.
    """

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512), classes: int = 9) -> None:
        super().__init__()
        channels = [3, *widths]
        self.down = nn.ModuleList(_two_convolutions(*pair) for pair in itertools.pairwise(channels))
        self.shrink = nn.MaxPool2d(2)
        upward = list(itertools.pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(deep, high, 2, stride=2) for deep, high in upward)
        self.up = nn.ModuleList(_two_convolutions(2 * high, high) for _, high in upward)
        self.classify = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the images' central pixels."""
        x, skipped = images, []
        for level, convolutions in enumerate(self.down):
            x = convolutions(x if level == 0 else self.shrink(x))
            skipped.append(x)
        for enlarge, convolutions, skip in zip(self.enlarge, self.up, skipped[-2::-1], strict=True):
            x = enlarge(x)
            x = convolutions(torch.cat([_centre_crop(skip, x.shape[-1]), x], dim=1))
        scores: Tensor = self.classify(x)
        return scores


def _two_convolutions(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3),
        nn.ReLU(),
        nn.BatchNorm2d(out_channels),
        nn.Conv2d(out_channels, out_channels, 3),
        nn.ReLU(),
        nn.BatchNorm2d(out_channels),
    )


def _centre_crop(x: Tensor, side: int) -> Tensor:
    start = (x.shape[-1] - side) // 2
    return x[:, :, start : start + side, start : start + side]


# -- the recipe --------------------------------------------------------------------------------------------------------
CLASSES = 9


def load(size: Size, path: Path | None) -> Data:
    """Return the user's images and masks if a path is given, otherwise drawn ones.

    Images are padded by the border that the unpadded convolutions remove.
    """
    side, border = size.options["side"], size.options["border"]
    if path is not None:
        return read_masked(path, side, border, CLASSES)
    return drawn_masks(side, border, CLASSES, *size.options["images"])


def make_model(size: Size) -> nn.Module:
    """Return a UNet with the size's widths and torch's initialisation."""
    return UNet(size.options["widths"], CLASSES)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy, averaged over all pixels."""
    images, masks = batch
    return nn.functional.cross_entropy(model(images), masks)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``accuracy``, the share of correct pixels, ``mean_overlap``, the mean IoU of the classes, and ``loss``.

    A class that is neither in the masks nor predicted is left out of the mean.
    """
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    loss_sum, count = 0.0, 0
    for images, masks in batches:
        scores = model(images).float()
        loss_sum += float(nn.functional.cross_entropy(scores, masks)) * len(images)
        count += len(images)
        pairs = masks.flatten() * CLASSES + scores.argmax(1).flatten()
        confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES).cpu()
    correct = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - correct
    iou = correct[union > 0] / union[union > 0]
    return {
        "accuracy": float(correct.sum() / confusion.sum()),
        "mean_overlap": float(iou.mean()),
        "loss": loss_sum / count,
    }


UNET = Recipe(
    name="unet",
    summary="UNet: a class for every pixel of a picture",
    source="Ronneberger, Fischer, Brox 2015, arXiv 1505.04597; sizes as in A. Bilogur's guide to mixed precision, 2020",
    data="generated: eight figures drawn on scikit-learn's photographs; --data DIR: images/ and masks/",
    sizes={
        "cpu": Size(6, 4, 5e-3, 121_601, {"widths": (8, 16, 32, 64), "side": 68, "border": 46, "images": (300, 50)}),
        "full": Size(
            50, 8, 1e-3, 7_703_497, {"widths": (64, 128, 256, 512), "side": 164, "border": 46, "images": (200, 50)}
        ),
    },
    classes=1,
    metric=Metric("mean_overlap"),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=constant,
    unit="images",
)
