"""SSD: predicts boxes and classes at every position of feature maps of several sizes, in one pass.

Liu et al., "SSD: Single Shot MultiBox Detector", 2016, arXiv 1512.02325, section 2 and figure 2 (SSD300 on VGG-16).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowp.recipes.networks.vgg import WIDTHS, initialise, stage

__all__ = ["SSD", "SSD300", "SSDShape", "default_boxes"]


class SSDShape(NamedTuple):
    """The hyperparameters of an SSD.

    `layers`: convolutions of each VGG stage. `share`: factor of VGG's widths. `sides`: sides of the feature maps.
    `extra`: (stride, padding) of each layer added after the seventh. `sizes`: sizes of the default boxes as fractions
    of the image, one more than feature maps. `ratios`: aspect ratios of each map's default boxes besides 1. `classes`:
    number of classes, without background.
    """

    layers: tuple[int, ...]
    share: float
    sides: tuple[int, ...]
    extra: tuple[tuple[int, int], ...]
    sizes: tuple[float, ...]
    ratios: tuple[tuple[int, ...], ...]
    classes: int

    @property
    def boxes_per_position(self) -> list[int]:
        """The number of default boxes per position of each map: two of ratio 1, and two for each other ratio."""
        return [2 + 2 * len(ratios) for ratios in self.ratios]


SSD300 = SSDShape(
    layers=(2, 2, 3, 3, 3),
    share=1.0,
    sides=(38, 19, 10, 5, 3, 1),
    extra=((2, 1), (2, 1), (1, 0), (1, 0)),
    sizes=(0.1, 0.2, 0.37, 0.54, 0.71, 0.88, 1.05),
    ratios=((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
    classes=20,
)


class SSD(nn.Module):
    """SSD: from images [N, 3, H, W] to offsets [N, boxes, 4] and scores [N, boxes, classes + 1], background first.

    With the layout SSD300 it has 26,285,486 parameters and 8,732 boxes.
    """

    def __init__(self, layout: SSDShape) -> None:
        super().__init__()
        self.classes = layout.classes
        widths = [3, *(round(width * layout.share) for width in WIDTHS)]
        self.stages = nn.ModuleList(
            stage(widths[level], widths[level + 1], layers) for level, layers in enumerate(layout.layers)
        )
        self.shrink = nn.MaxPool2d(2, ceil_mode=True)
        self.scale = nn.Parameter(torch.full((widths[4],), 20.0))  # the initial norm of features, section 3.1
        wide = round(1024 * layout.share)
        self.seventh = nn.Sequential(
            nn.MaxPool2d(3, 1, padding=1),
            nn.Conv2d(widths[5], wide, 3, padding=6, dilation=6),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 1),
            nn.ReLU(),
        )
        channels, added = [widths[4], wide], []
        for index, (stride, padding) in enumerate(layout.extra):
            width = round((256 if not index else 128) * layout.share)
            added.append(_added(channels[-1], width, stride, padding))
            channels.append(2 * width)
        self.added = nn.ModuleList(added)
        heads = list(zip(channels, layout.boxes_per_position, strict=True))
        self.offsets = nn.ModuleList(nn.Conv2d(width, 4 * boxes, 3, padding=1) for width, boxes in heads)
        self.scores = nn.ModuleList(
            nn.Conv2d(width, (layout.classes + 1) * boxes, 3, padding=1) for width, boxes in heads
        )
        initialise([*self.stages.modules(), *self.seventh.modules(), *self.added.modules()])
        for layer in [*self.offsets, *self.scores]:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets and scores, in the order of `default_boxes`."""
        x, maps = images, []
        for level, layers in enumerate(self.stages):
            x = layers(self.shrink(x) if level else x)
            if level == 3:
                maps.append(nn.functional.normalize(x.float(), dim=1) * self.scale.view(1, -1, 1, 1))
        x = self.seventh(x)
        maps.append(x)
        for layers in self.added:
            x = layers(x)
            maps.append(x)
        offsets = [_by_box(layer(x), 4) for layer, x in zip(self.offsets, maps, strict=True)]
        scores = [_by_box(layer(x), self.classes + 1) for layer, x in zip(self.scores, maps, strict=True)]
        return torch.cat(offsets, 1), torch.cat(scores, 1)


def default_boxes(layout: SSDShape) -> Tensor:
    """Return the boxes [boxes, 4] to which offsets refer, as fractions of the image (section 2.2)."""
    boxes = []
    for index, (side, ratios) in enumerate(zip(layout.sides, layout.ratios, strict=True)):
        size, larger = layout.sizes[index], layout.sizes[index + 1]
        shapes = [(size, size), ((size * larger) ** 0.5, (size * larger) ** 0.5)]
        for ratio in ratios:
            shapes += [(size * ratio**0.5, size / ratio**0.5), (size / ratio**0.5, size * ratio**0.5)]
        coordinates = (torch.arange(side) + 0.5) / side
        y, x = torch.meshgrid(coordinates, coordinates, indexing="ij")
        half = torch.tensor(shapes) / 2
        centres = torch.stack([x, y], -1).view(-1, 1, 2)
        boxes.append(torch.cat([centres - half, centres + half], -1).view(-1, 4))
    return torch.cat(boxes).clamp(0, 1)


def _added(in_channels: int, width: int, stride: int, padding: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=stride, padding=padding),
        nn.ReLU(),
    )


def _by_box(x: Tensor, values: int) -> Tensor:
    """Reshape [N, boxes per position * values, H, W] to [N, boxes, values]."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, values)
