"""Faster R-CNN on VGG-16: a detector in two steps, which fp16 trains with loss scaling as well as fp32.

In the published run (Micikevicius et al. 2018, arXiv 1710.03740, table 2) mAP is 69.1 in fp32, 68.6 in fp16 without
loss scaling and 69.7 with it. The convolutions and the large linear layers compute in few bits; the four losses are
fp32; boxes and their matches are so in every precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.recipes.data.boxes import (
    Detections,
    Truth,
    best_boxes,
    best_matches,
    decoded,
    encoded,
    found_boxes,
    outside,
    overlaps,
)
from lowp.recipes.data.detection import boxes_from, measured, truths
from lowp.recipes.detection import VARIANCES, detector
from lowp.recipes.networks.faster_rcnn import FasterRCNN, Shape, region_anchors
from lowp.recipes.recipe import Data, Size

REGIONS_COUNTED, REGIONS_JUDGED = 256, 64  # of an image, in the loss of each step
PROPOSED = 100  # regions of an image that are judged in evaluation

VGG_16 = Shape(layers=(2, 2, 3, 3, 3), share=1.0, sizes=(0.2, 0.4, 0.8), classes=20)
SMALL = Shape(layers=(1, 1, 2, 2, 1), share=0.125, sizes=(0.2, 0.35, 0.55), classes=20)


def load(size: Size, path: Path | None) -> Data:
    """Pascal VOC (or another set in its layout) where a path is given, else drawn scenes of ten kinds."""
    return boxes_from(path, size.options["side"], size.options["shape"].classes, size.options["images"])


def make_model(size: Size) -> nn.Module:
    """The size's shape."""
    return FasterRCNN(size.options["shape"])


# -- the two steps ----------------------------------------------------------------------------------------------------
def proposals(scores: Tensor, offsets: Tensor, anchors: Tensor, most: int) -> list[Tensor]:
    """Return for each image the `most` best boxes, without those that overlap a better one by 70 %."""
    chosen = []
    for likely, moved in zip(scores.float().softmax(-1)[..., 1], offsets.float(), strict=True):
        first = likely.argsort(descending=True)[: 4 * most]
        boxes = decoded(moved[first], anchors[first]).clamp(0, 1)
        chosen.append(boxes[best_boxes(boxes, likely[first], limit=0.7, most=most)])
    return chosen


def picked(wanted: Tensor, count: int, share: float) -> Tensor:
    """Numbers of up to `count` at random: of those above 0 up to a share of it, the rest of those that are 0."""
    positive, negative = (torch.nonzero(chosen)[:, 0] for chosen in (wanted > 0, wanted == 0))
    positive = positive[torch.randperm(len(positive))[: round(count * share)].to(wanted.device)]
    negative = negative[torch.randperm(len(negative))[: count - len(positive)].to(wanted.device)]
    return torch.cat([positive, negative])


def to_learn_from(anchors: Tensor, truth: Truth) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors of an image to learn from: numbers, 1 where they show something, which of these do, and their offsets.

    An anchor shows something where it overlaps a box by more than 0.7, or is a box's best; below 0.3 nothing.
    """
    best, which = best_matches(anchors, truth.boxes)
    wanted = torch.full((len(anchors),), -1, device=anchors.device)
    wanted[best < 0.3] = 0
    wanted[best > 0.7] = 1
    counted = picked(wanted, REGIONS_COUNTED, 0.5)
    there = counted[wanted[counted] == 1]
    return counted, wanted[counted], there, encoded(truth.boxes[which[there]], anchors[there])


def region_loss(scores: Tensor, offsets: Tensor, anchors: Tensor, truth: Truth) -> Tensor:
    """Of one image: cross-entropy of whether anchors show something, and smooth L1 of the offsets of those that do."""
    with outside(scores.device):
        counted, wanted, there, right = to_learn_from(anchors, truth)
    place = nn.functional.smooth_l1_loss(offsets[there].float(), right, reduction="sum", beta=1 / 9)
    return nn.functional.cross_entropy(scores[counted].float(), wanted) + place / len(counted)


def labelled(boxes: Tensor, truth: Truth) -> tuple[Tensor, Tensor, Tensor]:
    """Regions of an image to learn from, the class of each (0 for nothing, else 1 + the class) and its box."""
    boxes = torch.cat([boxes, truth.boxes])  # the right ones too, since at first none are proposed
    best, which = overlaps(boxes, truth.boxes).max(1)
    wanted = torch.where(best >= 0.5, truth.classes[which] + 1, 0)
    chosen = picked(wanted, REGIONS_JUDGED, 0.25)
    return boxes[chosen], wanted[chosen], truth.boxes[which[chosen]]


class Proposed(NamedTuple):
    """The output of the first step: the feature map of the images, and scores and offsets of the anchors on it."""

    features: Tensor
    scores: Tensor
    offsets: Tensor
    anchors: Tensor


def propose(network: Any, images: Tensor) -> Proposed:
    """Run the first step."""
    features = network.features(images)
    with outside(features.device):
        anchors = region_anchors(network.shape, *features.shape[-2:]).to(features.device)
    scores, offsets = network.propose(features)
    return Proposed(features, scores, offsets, anchors)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The losses of both steps, averaged over the images that show something."""
    return both_losses(model, propose(model, batch["images"]), batch)


def both_losses(network: Any, first: Proposed, batch: dict[str, Tensor]) -> Tensor:
    """The loss of the first step and, after the second one on regions of the first, the loss of that."""
    features, scores, offsets, anchors = first
    with outside(features.device):
        truth = truths(batch)
        shown = [place for place, one in enumerate(truth) if len(one.boxes)]
    if not shown:
        nothing: Tensor = 0.0 * scores.float().sum()
        return nothing
    of_anchors = [region_loss(scores[place], offsets[place], anchors, truth[place]) for place in shown]
    with outside(features.device):
        boxes = proposals(scores[shown], offsets[shown], anchors, 2 * REGIONS_JUDGED)
        regions = [labelled(own, truth[place]) for own, place in zip(boxes, shown, strict=True)]
    judged, moved = network.judge(features[shown], [own for own, _, _ in regions])
    total: Tensor = torch.stack(of_anchors).mean() + judging_loss(judged, moved, regions)
    return total


def judging_loss(scores: Tensor, offsets: Tensor, regions: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Cross-entropy of the classes, and smooth L1 of the offsets that belong to the right class."""
    with outside(scores.device):
        boxes, wanted, right = (torch.cat(parts) for parts in zip(*regions, strict=True))
        there = torch.nonzero(wanted)[:, 0]
        moves = encoded(right[there], boxes[there], VARIANCES)
    place = nn.functional.smooth_l1_loss(offsets.float()[there, wanted[there]], moves, reduction="sum")
    return nn.functional.cross_entropy(scores.float(), wanted) + place / len(wanted)


# -- evaluation -------------------------------------------------------------------------------------------------------
def found(network: Any, first: Proposed) -> list[Detections]:
    """What the regions of each image show: of each class the boxes with a share above 5 %, without overlapping ones."""
    with outside(first.features.device):
        regions = proposals(first.scores, first.offsets, first.anchors, PROPOSED)
    scores, offsets = network.judge(first.features, regions)
    with outside(scores.device):
        shares = scores.float().softmax(-1)[:, 1:]
        moved = decoded(offsets[:, 1:].float(), torch.cat(regions)[:, None], VARIANCES).clamp(0, 1)
        counts = [len(own) for own in regions]
        pairs = zip(torch.split(moved, counts), torch.split(shares, counts), strict=True)
        return [found_boxes(*pair, limit=0.3, most=PROPOSED) for pair in pairs]


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """``mAP`` as in Pascal VOC 2007, 0 to 1, and the loss, for which regions are drawn as they are in training."""
    network: Any = model

    def detect(batch: dict[str, Tensor]) -> tuple[Tensor, list[Detections]]:
        first = propose(network, batch["images"])
        return both_losses(network, first, batch), found(network, first)

    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same regions at every evaluation
        return measured(batches, detect, network.shape.classes)


FASTER_RCNN = detector(
    name="faster-rcnn",
    summary="Faster R-CNN on VGG-16: finds things in two steps",
    source="Ren et al. 2015, arXiv 1506.01497; Micikevicius et al. 2018, arXiv 1710.03740, table 2",
    sizes={
        "cpu": Size(12, 8, 1e-3, 2_070_735, {"shape": SMALL, "side": 96, "images": (400, 80)}),
        "full": Size(30, 2, 1e-4, 137_078_239, {"shape": VGG_16, "side": 600, "images": (200, 40)}),
    },
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
)
