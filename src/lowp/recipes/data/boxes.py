"""Boxes around things: how far two overlap, offsets from one to another, the best of many, and the VOC 2007 measure.

A box is left, top, right, bottom, in any unit; a tensor of boxes is float [N, 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Found", "Truth", "best_boxes", "decoded", "encoded", "mean_average_precision", "overlaps"]


class Truth(NamedTuple):
    """What an image shows: boxes [M, 4], classes int64 [M] from 0, and which of them are marked as difficult."""

    boxes: Tensor
    classes: Tensor
    difficult: Tensor


class Found(NamedTuple):
    """What a network found in an image: boxes [K, 4], classes int64 [K], and scores [K]."""

    boxes: Tensor
    classes: Tensor
    scores: Tensor


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Intersection by union of each box with each other one: [N, M], 0 where both are empty."""
    low, high = torch.maximum(one[:, None, :2], other[None, :, :2]), torch.minimum(one[:, None, 2:], other[None, :, 2:])
    common = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (one, other)]
    return common / (areas[0][:, None] + areas[1][None, :] - common).clamp(min=1e-12)


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
    clash = (overlaps(boxes[order], boxes[order]) > limit).cpu()
    dropped = torch.zeros(len(order), dtype=torch.bool)
    kept: list[int] = []
    for place in range(len(order)):
        if not dropped[place]:
            kept.append(place)
            if len(kept) == most:
                break
            dropped |= clash[place]
    return order[torch.tensor(kept, dtype=torch.int64, device=order.device)]


def mean_average_precision(found: Sequence[Found], truth: Sequence[Truth], classes: int) -> float:
    """The measure of Pascal VOC 2007, 0 to 1: precision at eleven recalls, averaged, and over classes that are there.

    A box is right where it overlaps one of its class by at least a half that no better box has claimed; boxes on
    things marked as difficult count neither way (Everingham et al. 2010, IJCV 88, sections 3.4 and 4.2).
    """
    precisions = [value for number in range(classes) if (value := _average_precision(found, truth, number)) is not None]
    return sum(precisions) / len(precisions) if precisions else 0.0


def _average_precision(found: Sequence[Found], truth: Sequence[Truth], number: int) -> float | None:
    """Of one class; None where no image shows it (but as difficult)."""
    there = [Truth(*(part[one.classes == number] for part in one)) for one in truth]
    count = sum(int((~one.difficult).sum()) for one in there)
    if not count:
        return None
    mine = [Found(*(part[one.classes == number] for part in one)) for one in found]
    ranked = sorted(
        ((float(score), image, place) for image, one in enumerate(mine) for place, score in enumerate(one.scores)),
        reverse=True,
    )
    claimed = [torch.zeros(len(one.boxes), dtype=torch.bool) for one in there]
    right = wrong = 0
    recalls, precisions = [], []
    for _, image, place in ranked:
        close = overlaps(mine[image].boxes[place : place + 1], there[image].boxes)[0]
        best = int(close.argmax()) if len(close) else -1
        if best >= 0 and close[best] >= 0.5:
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
