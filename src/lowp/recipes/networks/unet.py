"""UNet without padding: every convolution shrinks the feature map, and skip connections are cropped to its size.

Ronneberger, Fischer, Brox, "U-Net", 2015, arXiv 1505.04597, figure 1, with four of the five levels, and batch
normalisation after each ReLU. The output for an image of 256x256 are scores of its central 164x164 pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["UNet"]


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
