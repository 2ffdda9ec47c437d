"""UNet without padding: the map shrinks at every convolution, and skip connections are cropped to its size.

Ronneberger, Fischer, Brox, "U-Net", 2015, arXiv 1505.04597, figure 1, with three of the four levels, and batch
normalisation after each ReLU. An image of 256x256 gives scores for its central 164x164.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["UNet"]


class UNet(nn.Module):
    """Float images [N, 3, side, side] to scores [N, classes, smaller side, smaller side].

    `widths`: channels of each level; (64, 128, 256, 512) and 9 classes are 7,703,497 parameters.
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
        """Return scores of the centre of the images."""
        x, skipped = images, []
        for level, convolutions in enumerate(self.down):
            x = convolutions(x if level == 0 else self.shrink(x))
            skipped.append(x)
        for enlarge, convolutions, across in zip(self.enlarge, self.up, skipped[-2::-1], strict=True):
            x = enlarge(x)
            x = convolutions(torch.cat([_middle(across, x.shape[-1]), x], dim=1))
        scores: Tensor = self.classify(x)
        return scores


def _two_convolutions(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3),
        nn.ReLU(),
        nn.BatchNorm2d(after),
        nn.Conv2d(after, after, 3),
        nn.ReLU(),
        nn.BatchNorm2d(after),
    )


def _middle(x: Tensor, side: int) -> Tensor:
    start = (x.shape[-1] - side) // 2
    return x[:, :, start : start + side, start : start + side]
