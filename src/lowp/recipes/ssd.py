"""SSD on VGG-16: the detector that does not train in fp16 without loss scaling.

In the published run (Micikevicius et al. 2018, arXiv 1710.03740, table 2 and section 3.2) gradients of activations
between 2^-27 and 2^-24 were lost, and mattered; a loss scale of 8 brought mAP from "does not converge" to 77.1, with
76.9 in fp32. The gradients of the CPU size are larger, and it trains without a loss scale (docs/detection.md). The
convolutions compute in low precision; the normalisation of the first map and the losses are fp32; boxes and their
matches are fp32 in every precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.compat import real_tensors
from lowp.recipes.data.boxes import (
    Detections,
    Truth,
    decode_boxes,
    encode_boxes,
    match_anchors,
    no_autocast_no_grad,
    select_detections,
)
from lowp.recipes.data.detection import boxes_from, evaluate_detector, truths_of
from lowp.recipes.detection import VARIANCES, detector
from lowp.recipes.networks.ssd import SSD, SSD300, SSDShape, default_boxes
from lowp.recipes.recipe import Data, Size

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


def load(size: Size, path: Path | None) -> Data:
    """Return a data set in Pascal VOC's layout if a path is given, otherwise drawn scenes with ten kinds of figures."""
    return boxes_from(path, size.options["side"], size.options["layout"].classes, size.options["images"])


def make_model(size: Size) -> nn.Module:
    """Return an SSD with the size's layout."""
    return SSD(size.options["layout"])


# -- loss -------------------------------------------------------------------------------------------------------------
def match_targets(anchors: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """Return the target class int64 [N] (0 for background, else 1 + the class index) and box [N, 4] of each anchor.

    A box is matched to the anchor with the largest overlap, and to all anchors that overlap it by more than a half.
    """
    if not len(truth.boxes):
        return torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device), anchors
    overlap, index = match_anchors(anchors, truth.boxes)
    return torch.where(overlap > 0.5, truth.classes[index] + 1, 0), truth.boxes[index]


def targets(anchors: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the target classes int64 [N, anchors] and offsets [N, anchors, 4] of a batch, as in `match_targets`."""
    pairs = [match_targets(anchors, truth) for truth in truths_of(batch)]
    boxes = torch.stack([boxes for _, boxes in pairs])
    return torch.stack([classes for classes, _ in pairs]), encode_boxes(boxes, anchors, VARIANCES)


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
    with no_autocast_no_grad(scores.device):
        target_classes, target_offsets = targets(anchors_of(scores.shape[1], scores.device), batch)
        positive = target_classes > 0
        count = positive.sum().clamp(min=1)
    offset_loss = nn.functional.smooth_l1_loss(offsets[positive], target_offsets[positive], reduction="sum")
    losses = nn.functional.cross_entropy(scores.flatten(0, 1), target_classes.flatten(), reduction="none")
    losses = losses.view(target_classes.shape)
    with no_autocast_no_grad(scores.device):
        counted = mine_negatives(losses, positive)
    return (offset_loss + losses[counted].sum()) / count


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the multibox loss (section 2.2 of the paper)."""
    offsets, scores = model(batch["images"])
    return detection_loss(offsets, scores, batch)


# -- evaluation -------------------------------------------------------------------------------------------------------
def detections(offsets: Tensor, scores: Tensor) -> list[Detections]:
    """Return the detections of each image, at most 50 per class."""
    with no_autocast_no_grad(scores.device):
        boxes = decode_boxes(offsets.float(), anchors_of(scores.shape[1], scores.device), VARIANCES)
        probabilities = scores.float().softmax(-1)[..., 1:]
        pairs = zip(boxes, probabilities, strict=True)
        return [select_detections(*pair, iou_threshold=0.45, max_count=50) for pair in pairs]


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``mAP``, as in Pascal VOC 2007 (0 to 1), and ``loss``."""

    def detect(batch: dict[str, Tensor]) -> tuple[Tensor, list[Detections]]:
        offsets, scores = model(batch["images"])
        return detection_loss(offsets, scores, batch), detections(offsets, scores)

    network: Any = model
    return evaluate_detector(batches, detect, network.classes)


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
