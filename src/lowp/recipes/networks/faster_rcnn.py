"""Faster R-CNN: a first stage proposes regions of an image, and a second stage classifies each of them.

Ren, He, Girshick, Sun, "Faster R-CNN", 2015, arXiv 1506.01497, on VGG-16. Regions are resampled to 7x7 by bilinear
interpolation (RoIAlign: He et al. 2017, arXiv 1703.06870, section 3), without rounding coordinates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowp.recipes.data.boxes import no_autocast_no_grad
from lowp.recipes.networks.vgg import WIDTHS, initialise, stage

__all__ = ["POOLED", "FasterRCNN", "Shape", "region_anchors", "region_features"]

POOLED = 7  # side of a region's pooled map
_SAMPLES = 2  # samples averaged along each side of a position of that map


class Shape(NamedTuple):
    """The hyperparameters of Faster R-CNN.

    `layers`: convolutions of each VGG stage. `share`: factor of VGG's widths. `sizes`: sizes of the anchors as
    fractions of the image. `classes`: number of classes, without background.
    """

    layers: tuple[int, ...]
    share: float
    sizes: tuple[float, ...]
    classes: int


class FasterRCNN(nn.Module):
    """Faster R-CNN: call `features`, `propose` and `judge` in this order. Boxes are fractions of the image.

    With the widths of VGG-16, three anchor sizes and 20 classes it has 137,078,239 parameters.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        widths = [3, *(round(width * shape.share) for width in WIDTHS)]
        parts: list[nn.Module] = []
        for level, layers in enumerate(shape.layers):
            parts += [nn.MaxPool2d(2)] if level else []
            parts.append(stage(widths[level], widths[level + 1], layers))
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
        """Return the feature map [N, channels, H / 16, W / 16] of images [N, 3, H, W]."""
        output: Tensor = self.convolutions(images)
        return output

    def propose(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores [N, anchors, 2] (background, object) and offsets [N, anchors, 4] of `region_anchors`."""
        x = self.region(features)
        scores, offsets = self.region_scores(x), self.region_offsets(x)
        count = len(x)
        return scores.permute(0, 2, 3, 1).reshape(count, -1, 2), offsets.permute(0, 2, 3, 1).reshape(count, -1, 4)

    def judge(self, features: Tensor, boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return scores [regions, classes + 1] and offsets [regions, classes + 1, 4] for the boxes of all images."""
        x = self.hidden(region_features(features, boxes))
        return self.scores(x), self.offsets(x).view(len(x), -1, 4)


def region_features(features: Tensor, boxes: list[Tensor]) -> Tensor:
    """Pool the boxes of all images from their feature maps: [regions, channels, 7, 7].

    Each value is the mean of 2 x 2 bilinear samples of the map (RoIAlign).
    """
    side = POOLED * _SAMPLES
    with no_autocast_no_grad(features.device):
        steps = (torch.arange(side, device=features.device) + 0.5) / side
    pooled = []
    for image, regions in zip(features, boxes, strict=True):
        with no_autocast_no_grad(features.device):
            low, size = regions[:, :2, None], (regions[:, 2:] - regions[:, :2])[:, :, None]
            points = 2 * (low + size * steps) - 1  # [regions, (x, y), side] in -1 to 1: coordinates of grid_sample
            x = points[:, 0, None, :].expand(-1, side, -1)
            y = points[:, 1, :, None].expand(-1, -1, side)
            grid = torch.stack([x, y], -1).reshape(1, len(regions) * side, side, 2).to(image.dtype)
        sampled = nn.functional.grid_sample(image[None], grid, align_corners=False, padding_mode="border")
        by_region = sampled[0].view(image.shape[0], len(regions), side, side).transpose(0, 1)
        pooled.append(nn.functional.avg_pool2d(by_region, _SAMPLES))
    return torch.cat(pooled)


def region_anchors(shape: Shape, height: int, width: int) -> Tensor:
    """Return the anchors [anchors, 4] of a `height` x `width` map: all sizes in three aspect ratios per position."""
    shapes = torch.tensor([(size * ratio**0.5, size / ratio**0.5) for size in shape.sizes for ratio in (0.5, 1.0, 2.0)])
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    centres = torch.stack([x, y], -1).view(-1, 1, 2)
    return torch.cat([centres - shapes / 2, centres + shapes / 2], -1).view(-1, 4)
