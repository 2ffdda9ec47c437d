"""Boxes around things: how far two overlap, offsets from one to another, the best of many, and the VOC 2007 measure.

A box is left, top, right, bottom, in any unit; a tensor of boxes is float [N, 4]. torchvision.ops has `box_iou`, `nms`
and `batched_nms` too; each of its releases requires one release of torch, so lowp does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Detections",
    "Truth",
    "best_boxes",
    "best_matches",
    "decoded",
    "encoded",
    "found_boxes",
    "mean_average_precision",
    "outside",
    "overlaps",
]


class Truth(NamedTuple):
    """The contents of an image: boxes [M, 4], classes int64 [M] from 0, and which boxes are marked as difficult."""

    boxes: Tensor
    classes: Tensor
    difficult: Tensor


class Detections(NamedTuple):
    """The objects that a network found in an image: boxes [K, 4], classes int64 [K], and scores [K]."""

    boxes: Tensor
    classes: Tensor
    scores: Tensor


@contextmanager
def outside(device: torch.device) -> Iterator[None]:
    """Leave a precision's region, and record nothing for backward.

    For boxes, matches, targets and what else decides about a network's tensors without being one: they are fp32, or
    indices, in every precision.
    """
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False), torch.no_grad():
        yield


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Return intersection over union of each box with each other one: [N, M], 0 if both are empty."""
    low, high = torch.maximum(one[:, None, :2], other[None, :, :2]), torch.minimum(one[:, None, 2:], other[None, :, 2:])
    common = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (one, other)]
    return common / (areas[0][:, None] + areas[1][None, :] - common).clamp(min=1e-12)


def best_matches(anchors: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Of each anchor how far it overlaps the box that it overlaps most, and the number of that box.

    The anchor that overlaps a box more than all others do belongs to it, with an overlap of 2. `boxes` are not empty.
    """
    close = overlaps(anchors, boxes)
    best, which = close.max(1)
    own = close.argmax(0)
    best[own] = 2.0
    which[own] = torch.arange(len(own), device=own.device)
    return best, which


def encoded(boxes: Tensor, anchors: Tensor, variances: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Offsets from anchors to boxes: of the middle in sizes of the anchor, and logarithms of the sizes' ratios.

    Divided by `variances` (Girshick 2015, arXiv 1504.08083; Liu et al. 2016, arXiv 1512.02325, equation 2).
    """
    middle, size = _middle_and_size(boxes)
    from_middle, from_size = _middle_and_size(anchors)
    moved, grown = (middle - from_middle) / from_size, torch.log(size / from_size)
    return torch.cat([moved / variances[0], grown / variances[1]], dim=-1)


def decoded(offsets: Tensor, anchors: Tensor, variances: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """The boxes that `encoded` gave these offsets for; sizes grow by a factor of 60 at most."""
    from_middle, from_size = _middle_and_size(anchors)
    middle = from_middle + offsets[..., :2] * variances[0] * from_size
    half = torch.exp((offsets[..., 2:] * variances[1]).clamp(max=4.1)) * from_size / 2
    return torch.cat([middle - half, middle + half], dim=-1)


def _middle_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]).clamp(min=1e-6)


def best_boxes(boxes: Tensor, scores: Tensor, limit: float, most: int) -> Tensor:
    """Numbers of up to `most` boxes, best first, without those that overlap a better one by more than `limit`."""
    order = scores.argsort(descending=True)
    clash = (overlaps(boxes[order], boxes[order]) > limit).cpu().numpy()
    dropped = np.zeros(len(order), dtype=bool)
    kept: list[int] = []
    for place in range(len(order)):
        if not dropped[place]:
            kept.append(place)
            if len(kept) == most:
                break
            dropped |= clash[place]
    return order[torch.tensor(kept, dtype=torch.int64, device=order.device)]


def found_boxes(boxes: Tensor, shares: Tensor, limit: float, most: int, least: float = 0.05) -> Detections:
    """Of an image's boxes [boxes, 4], or [boxes, classes, 4], with shares of classes, the best of each class.

    Of each class up to `most` that have more than `least` of it, without those that overlap a better one by more than
    `limit`; what is found is on the CPU.
    """
    parts = []
    for number in range(shares.shape[1]):
        likely = torch.nonzero(shares[:, number] > least)[:, 0]
        likely = likely[shares[likely, number].argsort(descending=True)[: 4 * most]]
        own = boxes[likely] if boxes.dim() == 2 else boxes[likely, number]
        kept = best_boxes(own, shares[likely, number], limit, most)
        parts.append((own[kept], torch.full_like(kept, number), shares[likely[kept], number]))
    return Detections(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def mean_average_precision(found: Sequence[Detections], truth: Sequence[Truth], classes: int) -> float:
    """The measure of Pascal VOC 2007, 0 to 1: precision at eleven recalls, averaged, and over classes that are there.

    A box is right where it overlaps one of its class by at least a half that no better box has claimed; boxes on
    things marked as difficult count neither way (Everingham et al. 2010, IJCV 88, sections 3.4 and 4.2).
    """
    precisions = [value for number in range(classes) if (value := _average_precision(found, truth, number)) is not None]
    return sum(precisions) / len(precisions) if precisions else 0.0


def _average_precision(found: Sequence[Detections], truth: Sequence[Truth], number: int) -> float | None:
    """Of one class; None where no image shows it (but as difficult)."""
    there = [Truth(*(part[one.classes == number] for part in one)) for one in truth]
    count = sum(int((~one.difficult).sum()) for one in there)
    if not count:
        return None
    mine = [Detections(*(part[one.classes == number] for part in one)) for one in found]
    ranked = sorted(
        ((score, image, place) for image, one in enumerate(mine) for place, score in enumerate(one.scores.tolist())),
        reverse=True,
    )
    claimed = [[False] * len(one.boxes) for one in there]
    closest = [_closest(own.boxes, one.boxes) for own, one in zip(mine, there, strict=True)]
    right = wrong = 0
    recalls, precisions = [], []
    for _, image, place in ranked:
        close, best = closest[image][place]
        if close >= 0.5:
            if bool(there[image].difficult[best]):
                continue
            right += int(not claimed[image][best])
            wrong += int(claimed[image][best])
            claimed[image][best] = True
        else:
            wrong += 1
        recalls.append(right / count)
        precisions.append(right / (right + wrong))
    curve = list(zip(recalls, precisions, strict=True))
    highest = (max((value for recall, value in curve if recall >= at / 10 - 1e-9), default=0.0) for at in range(11))
    return sum(highest) / 11


def _closest(boxes: Tensor, others: Tensor) -> list[tuple[float, int]]:
    """Of each box the largest overlap with one of the others, and which that is; (0, -1) where there are none."""
    if not len(others):
        return [(0.0, -1)] * len(boxes)
    close, best = overlaps(boxes, others).max(1)
    return list(zip(close.tolist(), best.tolist(), strict=True))
