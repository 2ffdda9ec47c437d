"""Faster R-CNN: a first stage proposes regions of an image, and a second stage classifies each of them.

Ren, He, Girshick, Sun, "Faster R-CNN", 2015, arXiv 1506.01497, on VGG-16. Regions are resampled to 7x7 by bilinear
interpolation (RoIAlign: He et al. 2017, arXiv 1703.06870, section 3), without rounding coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowp.recipes.data.boxes import outside
from lowp.recipes.networks.vgg import WIDTHS, initialise, stage

__all__ = ["POOLED", "FasterRCNN", "Shape", "region_anchors", "region_features"]

POOLED = 7  # side of a region's resampled map
_SAMPLES = 2  # samples along a side of each of its places, averaged


class Shape(NamedTuple):
    """Layers of each VGG stage, share of its widths, sizes of the anchors as shares of the image, and classes."""

    layers: tuple[int, ...]
    share: float
    sizes: tuple[float, ...]
    classes: int


class FasterRCNN(nn.Module):
    """The stages `features`, `propose` and `judge`, called in this order. Boxes are shares of the image.

    With VGG-16's full widths, three sizes of anchors and 20 classes it has 137,078,239 parameters.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        widths = [3, *(round(width * shape.share) for width in WIDTHS)]
        parts: list[nn.Module] = []
        for place, layers in enumerate(shape.layers):
            parts += [nn.MaxPool2d(2)] if place else []
            parts.append(stage(widths[place], widths[place + 1], layers))
        self.convolutions = nn.Sequential(*parts)
        anchors, hidden = 3 * len(shape.sizes), round(4096 * shape.share)
        self.region = nn.Sequential(nn.Conv2d(widths[5], widths[5], 3, padding=1), nn.ReLU())
        self.region_scores = nn.Conv2d(widths[5], 2 * anchors, 1)
        self.region_offsets = nn.Conv2d(widths[5], 4 * anchors, 1)
        self.hidden = nn.Sequential(
            nn.Flatten(),
            nn.Linear(widths[5] * POOLED**2, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
        )
        self.scores = nn.Linear(hidden, shape.classes + 1)
        self.offsets = nn.Linear(hidden, 4 * (shape.classes + 1))
        initialise([*self.convolutions.modules(), *self.region.modules(), *self.hidden.modules()])
        for layer, deviation in (
            (self.region_scores, 0.01),
            (self.region_offsets, 0.01),
            (self.scores, 0.01),
            (self.offsets, 0.001),
        ):
            nn.init.normal_(layer.weight, std=deviation)

    def features(self, images: Tensor) -> Tensor:
        """Return a map with a sixteenth of the image's side."""
        output: Tensor = self.convolutions(images)
        return output

    def propose(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores [N, anchors, 2] (background, object) and offsets [N, anchors, 4], as in `region_anchors`."""
        x = self.region(features)
        scores, offsets = self.region_scores(x), self.region_offsets(x)
        count = len(x)
        return scores.permute(0, 2, 3, 1).reshape(count, -1, 2), offsets.permute(0, 2, 3, 1).reshape(count, -1, 4)

    def judge(self, features: Tensor, boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return scores [regions, classes + 1] and offsets [regions, classes + 1, 4] of the boxes of all images."""
        x = self.hidden(region_features(features, boxes))
        return self.scores(x), self.offsets(x).view(len(x), -1, 4)


def region_features(features: Tensor, boxes: list[Tensor]) -> Tensor:
    """Return the maps of the boxes, [regions, channels, 7, 7], each place the mean of 4 samples of the image's map."""
    side = POOLED * _SAMPLES
    with outside(features.device):
        steps = (torch.arange(side, device=features.device) + 0.5) / side
    pooled = []
    for image, own in zip(features, boxes, strict=True):
        with outside(features.device):
            low, size = own[:, :2, None], (own[:, 2:] - own[:, :2])[:, :, None]
            at = 2 * (low + size * steps) - 1  # [regions, (x, y), side] in -1 to 1, the coordinates of grid_sample
            x = at[:, 0, None, :].expand(-1, side, -1)
            y = at[:, 1, :, None].expand(-1, -1, side)
            grid = torch.stack([x, y], -1).reshape(1, len(own) * side, side, 2).to(image.dtype)
        sampled = nn.functional.grid_sample(image[None], grid, align_corners=False, padding_mode="border")
        by_region = sampled[0].view(image.shape[0], len(own), side, side).transpose(0, 1)
        pooled.append(nn.functional.avg_pool2d(by_region, _SAMPLES))
    return torch.cat(pooled)


def region_anchors(shape: Shape, height: int, width: int) -> Tensor:
    """Return boxes of three ratios (1:2, 1:1, 2:1) and all sizes of the shape at every place of a map, [anchors, 4]."""
    shapes = torch.tensor([(size * ratio**0.5, size / ratio**0.5) for size in shape.sizes for ratio in (0.5, 1.0, 2.0)])
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    middles = torch.stack([x, y], -1).view(-1, 1, 2)
    return torch.cat([middles - shapes / 2, middles + shapes / 2], -1).view(-1, 4)
