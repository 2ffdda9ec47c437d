"""SSD on VGG-16: the detector that does not train in fp16 without loss scaling.

In the published run (Micikevicius et al. 2018, arXiv 1710.03740, table 2 and section 3.2) gradients of activations
between 2^-27 and 2^-24 were lost, and mattered; a loss scale of 8 brought mAP from "does not converge" to 77.1, with
76.9 in fp32. The CPU size has larger gradients, and trains without (docs/detection.md). The convolutions compute in few
bits; the norm of the first map and the losses are fp32; boxes and their matches are so in every precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.compat import real_tensors
from lowp.recipes.data.boxes import Detections, Truth, best_matches, decoded, encoded, found_boxes, outside
from lowp.recipes.data.detection import boxes_from, measured, truths
from lowp.recipes.detection import VARIANCES, detector
from lowp.recipes.networks.ssd import SSD, SSD300, SSDShape, default_boxes
from lowp.recipes.recipe import Data, Size

NEGATIVES = 3  # for each box that has a match, so many hardest ones without

# A shallower and narrower one for images of 96x96.
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
    """The default boxes of the layout that has `count` of them."""
    with real_tensors():
        both = (default_boxes(layout) for layout in (SSD300, SMALL))
        return next(boxes for boxes in both if len(boxes) == count).to(device)


def load(size: Size, path: Path | None) -> Data:
    """Pascal VOC (or another set in its layout) where a path is given, else drawn scenes of ten kinds."""
    return boxes_from(path, size.options["side"], size.options["layout"].classes, size.options["images"])


def make_model(size: Size) -> nn.Module:
    """The size's layout."""
    return SSD(size.options["layout"])


# -- loss -------------------------------------------------------------------------------------------------------------
def matched(anchors: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """For each anchor the class that it is to find (0 for none, else 1 + the class) and the box.

    Each box has the anchor that overlaps it most, and all that overlap it by more than a half.
    """
    if not len(truth.boxes):
        return torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device), anchors
    best, which = best_matches(anchors, truth.boxes)
    return torch.where(best > 0.5, truth.classes[which] + 1, 0), truth.boxes[which]


def targets(anchors: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of each image's anchors what `matched` says: classes int64 [N, anchors] and offsets to boxes [N, anchors, 4]."""
    pairs = [matched(anchors, truth) for truth in truths(batch)]
    boxes = torch.stack([boxes for _, boxes in pairs])
    return torch.stack([classes for classes, _ in pairs]), encoded(boxes, anchors, VARIANCES)


def hardest(losses: Tensor, positive: Tensor) -> Tensor:
    """The matched anchors [N, anchors] and, of each image's others, those that are most wrong, three for each match."""
    rank = losses.masked_fill(positive, -1.0).argsort(1, descending=True).argsort(1)
    return positive | (rank < NEGATIVES * positive.sum(1, keepdim=True))


def detection_loss(offsets: Tensor, scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Smooth L1 of the offsets of matched boxes plus cross-entropy of these and of the hardest others, a match."""
    offsets, scores = offsets.float(), scores.float()
    with outside(scores.device):
        wanted, right = targets(anchors_of(scores.shape[1], scores.device), batch)
        positive = wanted > 0
        matches = positive.sum().clamp(min=1)
    place = nn.functional.smooth_l1_loss(offsets[positive], right[positive], reduction="sum")
    losses = nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
    with outside(scores.device):
        counted = hardest(losses, positive)
    return (place + losses[counted].sum()) / matches


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The multibox loss (section 2.2 of the paper)."""
    offsets, scores = model(batch["images"])
    return detection_loss(offsets, scores, batch)


# -- evaluation -------------------------------------------------------------------------------------------------------
def found(offsets: Tensor, scores: Tensor) -> list[Detections]:
    """Of each image the best boxes of each class."""
    with outside(scores.device):
        boxes = decoded(offsets.float(), anchors_of(scores.shape[1], scores.device), VARIANCES)
        shares = scores.float().softmax(-1)[..., 1:]
        return [found_boxes(*pair, limit=0.45, most=50) for pair in zip(boxes, shares, strict=True)]


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """``mAP`` as in Pascal VOC 2007, 0 to 1, and the loss."""

    def detect(batch: dict[str, Tensor]) -> tuple[Tensor, list[Detections]]:
        offsets, scores = model(batch["images"])
        return detection_loss(offsets, scores, batch), found(offsets, scores)

    network: Any = model
    return measured(batches, detect, network.classes)


SSD_RECIPE = detector(
    name="ssd",
    summary="Multibox SSD on VGG-16: finds things in pictures",
    source="Liu et al. 2016, arXiv 1512.02325; Micikevicius et al. 2018, arXiv 1710.03740, table 2",
    sizes={
        "cpu": Size(14, 8, 1e-3, 509_038, {"layout": SMALL, "side": 96, "images": (400, 80)}),
        "full": Size(120, 32, 1e-4, 26_285_486, {"layout": SSD300, "side": 300, "images": (400, 80)}),
    },
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
)
