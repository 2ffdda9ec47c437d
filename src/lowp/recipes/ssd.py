"""SSD on VGG-16: the detector that does not train in fp16 without loss scaling.

In the published run (Micikevicius et al. 2018, arXiv 1710.03740, table 2 and section 3.2) gradients of activations
between 2^-27 and 2^-24 were lost, and mattered; a loss scale of 8 brought mAP from "does not converge" to 77.1, with
76.9 in fp32. The gradients of the CPU size are larger, and it trains without a loss scale (docs/detection.md). The
convolutions compute in low precision; the normalisation of the first map and the losses are fp32; boxes and their
matches are fp32 in every precision.

The network predicts boxes and classes at every position of feature maps of several sizes, in one pass: Liu et al.,
"SSD: Single Shot MultiBox Detector", 2016, arXiv 1512.02325, section 2 and figure 2 (SSD300 on VGG-16).
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.compat import real_tensors
from lowp.recipes.data import detection
from lowp.recipes.detection import VARIANCES, WIDTHS, by_anchor, detector, initialise, stage
from lowp.recipes.recipe import Size, built


# -- the network -------------------------------------------------------------------------------------------------------
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
        offsets = [by_anchor(layer(x), 4) for layer, x in zip(self.offsets, maps, strict=True)]
        scores = [by_anchor(layer(x), self.classes + 1) for layer, x in zip(self.scores, maps, strict=True)]
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


# -- the recipe --------------------------------------------------------------------------------------------------------
NEGATIVES = 3  # unmatched anchors in the loss for each matched anchor

# A shallower and narrower network for images of 96x96.
SMALL = SSDShape(
    layers=(1, 1, 2, 2, 1),
    share=0.125,
    sides=(12, 6, 3),
    extra=((2, 1),),
    sizes=(0.15, 0.3, 0.5, 0.75),
    ratios=((2,), (2, 3), (2,)),
    classes=20,
)


@lru_cache(maxsize=8)
def anchors_of(count: int, device: torch.device) -> Tensor:
    """Return the default boxes [count, 4] of the layout with `count` of them, SSD300 or SMALL."""
    with real_tensors():
        both = (default_boxes(layout) for layout in (SSD300, SMALL))
        return next(boxes for boxes in both if len(boxes) == count).to(device)


# -- loss -------------------------------------------------------------------------------------------------------------
def match_targets(anchors: Tensor, truth: detection.Truth) -> tuple[Tensor, Tensor]:
    """Return the target class int64 [N] (0 for background, else 1 + the class index) and box [N, 4] of each anchor.

    A box is matched to the anchor with the largest overlap, and to all anchors that overlap it by more than a half.
    """
    if not len(truth.boxes):
        return torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device), anchors
    overlap, index = detection.match_anchors(anchors, truth.boxes)
    return torch.where(overlap > 0.5, truth.classes[index] + 1, 0), truth.boxes[index]


def targets(anchors: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the target classes int64 [N, anchors] and offsets [N, anchors, 4] of a batch, as in `match_targets`."""
    pairs = [match_targets(anchors, truth) for truth in detection.truths_of(batch)]
    boxes = torch.stack([boxes for _, boxes in pairs])
    return torch.stack([classes for classes, _ in pairs]), detection.encode_boxes(boxes, anchors, VARIANCES)


def mine_negatives(losses: Tensor, positive: Tensor) -> Tensor:
    """Return a mask [N, anchors] of the matched anchors and, per image, the unmatched ones with the largest losses.

    There are three unmatched anchors for each matched one (hard negative mining, section 2.2).
    """
    rank = losses.masked_fill(positive, -1.0).argsort(1, descending=True).argsort(1)
    return positive | (rank < NEGATIVES * positive.sum(1, keepdim=True))


def detection_loss(offsets: Tensor, scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Compute the smooth L1 loss of the matched anchors' offsets plus the cross-entropy, per matched anchor.

    The cross-entropy is that of the anchors in `mine_negatives`.
    """
    offsets, scores = offsets.float(), scores.float()
    with detection.no_autocast_no_grad(scores.device):
        target_classes, target_offsets = targets(anchors_of(scores.shape[1], scores.device), batch)
        positive = target_classes > 0
        count = positive.sum().clamp(min=1)
    offset_loss = nn.functional.smooth_l1_loss(offsets[positive], target_offsets[positive], reduction="sum")
    losses = nn.functional.cross_entropy(scores.flatten(0, 1), target_classes.flatten(), reduction="none")
    losses = losses.view(target_classes.shape)
    with detection.no_autocast_no_grad(scores.device):
        counted = mine_negatives(losses, positive)
    return (offset_loss + losses[counted].sum()) / count


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the multibox loss (section 2.2 of the paper)."""
    offsets, scores = model(batch["images"])
    return detection_loss(offsets, scores, batch)


# -- evaluation -------------------------------------------------------------------------------------------------------
def detections(offsets: Tensor, scores: Tensor) -> list[detection.Detections]:
    """Return the detections of each image, at most 50 per class."""
    with detection.no_autocast_no_grad(scores.device):
        boxes = detection.decode_boxes(offsets.float(), anchors_of(scores.shape[1], scores.device), VARIANCES)
        probabilities = scores.float().softmax(-1)[..., 1:]
        pairs = zip(boxes, probabilities, strict=True)
        return [detection.select_detections(*pair, iou_threshold=0.45, max_count=50) for pair in pairs]


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``mAP``, as in Pascal VOC 2007 (0 to 1), and ``loss``."""

    def detect(batch: dict[str, Tensor]) -> tuple[Tensor, list[detection.Detections]]:
        offsets, scores = model(batch["images"])
        return detection_loss(offsets, scores, batch), detections(offsets, scores)

    network: Any = model
    return detection.evaluate_detector(batches, detect, network.classes)


SSD_RECIPE = detector(
    name="ssd",
    summary="Multibox SSD on VGG-16: finds things in pictures",
    source="Liu et al. 2016, arXiv 1512.02325; Micikevicius et al. 2018, arXiv 1710.03740, table 2",
    sizes={
        "cpu": Size(14, 8, 1e-3, 509_038, {"layout": SMALL, "side": 96, "images": (400, 80)}),
        "full": Size(120, 32, 1e-4, 26_285_486, {"layout": SSD300, "side": 300, "images": (400, 80)}),
    },
    load=partial(detection.load, "layout"),
    make_model=built(SSD, "layout"),
    loss=loss,
    evaluate=evaluate,
)
