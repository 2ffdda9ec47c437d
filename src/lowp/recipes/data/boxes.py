"""Boxes: intersection over union, offsets to anchors, non-maximum suppression, and the metric of Pascal VOC 2007.

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


class Truth(NamedTuple):
    """The objects in an image: boxes [M, 4], class indices int64 [M], and bool [M], True for a difficult object."""

    boxes: Tensor
    classes: Tensor
    difficult: Tensor


class Detections(NamedTuple):
    """The objects that a network detected in an image: boxes [K, 4], class indices int64 [K], and scores [K]."""

    boxes: Tensor
    classes: Tensor
    scores: Tensor


@contextmanager
def no_autocast_no_grad(device: torch.device) -> Iterator[None]:
    """Disable autocast on the CPU and on `device`, and gradients.

    For boxes, matches and targets: they are fp32 or indices in every precision, and nothing is differentiated by them.
    """
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False), torch.no_grad():
        yield


def box_iou(boxes1: Tensor, boxes2: Tensor) -> Tensor:
    """Return the intersection over union of each of `boxes1` [N, 4] with each of `boxes2` [M, 4]: [N, M].

    It is 0 for two empty boxes.
    """
    low = torch.maximum(boxes1[:, None, :2], boxes2[None, :, :2])
    high = torch.minimum(boxes1[:, None, 2:], boxes2[None, :, 2:])
    intersection = (high - low).clamp(min=0).prod(2)
    area1, area2 = ((boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1) for boxes in (boxes1, boxes2))
    return intersection / (area1[:, None] + area2[None, :] - intersection).clamp(min=1e-12)


def match_anchors(anchors: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each anchor, its largest overlap with a box and the index of that box: [N] and int64 [N].

    The anchor with the largest overlap with a box is matched to it, with an overlap of 2. `boxes` must not be empty.
    """
    iou = box_iou(anchors, boxes)
    overlap, index = iou.max(1)
    best_anchors = iou.argmax(0)
    overlap[best_anchors] = 2.0
    index[best_anchors] = torch.arange(len(best_anchors), device=best_anchors.device)
    return overlap, index


def encode_boxes(boxes: Tensor, anchors: Tensor, variances: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the offsets [..., 4] of `boxes` from `anchors`, divided by `variances`.

    An offset is the distance of the centres in sizes of the anchor, and the logarithm of the ratio of the sizes
    (Girshick 2015, arXiv 1504.08083; Liu et al. 2016, arXiv 1512.02325, equation 2).
    """
    centre, size = _centre_and_size(boxes)
    anchor_centre, anchor_size = _centre_and_size(anchors)
    shift, log_ratio = (centre - anchor_centre) / anchor_size, torch.log(size / anchor_size)
    return torch.cat([shift / variances[0], log_ratio / variances[1]], dim=-1)


def decode_boxes(offsets: Tensor, anchors: Tensor, variances: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the boxes [..., 4] at the given offsets from `anchors`: the inverse of `encode_boxes`.

    A box is at most 60 times as large as its anchor.
    """
    anchor_centre, anchor_size = _centre_and_size(anchors)
    centre = anchor_centre + offsets[..., :2] * variances[0] * anchor_size
    half = torch.exp((offsets[..., 2:] * variances[1]).clamp(max=4.1)) * anchor_size / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    return (boxes[..., :2] + boxes[..., 2:]) / 2, (boxes[..., 2:] - boxes[..., :2]).clamp(min=1e-6)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, max_count: int) -> Tensor:
    """Return the indices int64 [K] of at most `max_count` boxes by falling score (non-maximum suppression).

    A box that overlaps a selected box with a higher score by more than `iou_threshold` is discarded.
    """
    order = scores.argsort(descending=True)
    overlaps = (box_iou(boxes[order], boxes[order]) > iou_threshold).cpu().numpy()
    suppressed = np.zeros(len(order), dtype=bool)
    selected: list[int] = []
    for rank in range(len(order)):
        if not suppressed[rank]:
            selected.append(rank)
            if len(selected) == max_count:
                break
            suppressed |= overlaps[rank]
    return order[torch.tensor(selected, dtype=torch.int64, device=order.device)]


def select_detections(
    boxes: Tensor, probabilities: Tensor, iou_threshold: float, max_count: int, min_score: float = 0.05
) -> Detections:
    """Return the detections of an image, on the CPU: per class at most `max_count`, after non-maximum suppression.

    `boxes` are [N, 4], or [N, classes, 4] if each class has boxes of its own; `probabilities` are [N, classes]. Boxes
    with a probability of `min_score` or less are discarded.
    """
    parts = []
    for class_index in range(probabilities.shape[1]):
        candidates = torch.nonzero(probabilities[:, class_index] > min_score)[:, 0]
        candidates = candidates[probabilities[candidates, class_index].argsort(descending=True)[: 4 * max_count]]
        class_boxes = boxes[candidates] if boxes.dim() == 2 else boxes[candidates, class_index]
        selected = nms(class_boxes, probabilities[candidates, class_index], iou_threshold, max_count)
        scores = probabilities[candidates[selected], class_index]
        parts.append((class_boxes[selected], torch.full_like(selected, class_index), scores))
    return Detections(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def mean_average_precision(detections: Sequence[Detections], truths: Sequence[Truth], classes: int) -> float:
    """Return the mean average precision of Pascal VOC 2007, 0 to 1, averaged over the classes present in `truths`.

    Average precision is the mean over eleven recalls of the highest precision at that recall or above. A detection is a
    true positive if it overlaps an object of its class by at least a half and no detection with a higher score has
    matched that object; detections of difficult objects are ignored (Everingham et al. 2010, IJCV 88, sections 3.4 and
    4.2). Return 0 without objects.
    """
    values = [_average_precision(detections, truths, class_index) for class_index in range(classes)]
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


def _average_precision(detections: Sequence[Detections], truths: Sequence[Truth], class_index: int) -> float | None:
    """Return the average precision of one class; None if no image has an object of it that is not difficult."""
    truths = [Truth(*(part[truth.classes == class_index] for part in truth)) for truth in truths]
    count = sum(int((~truth.difficult).sum()) for truth in truths)
    if not count:
        return None
    detections = [Detections(*(part[found.classes == class_index] for part in found)) for found in detections]
    ranked = sorted(
        (
            (score, image, detection)
            for image, found in enumerate(detections)
            for detection, score in enumerate(found.scores.tolist())
        ),
        reverse=True,
    )
    matched = [[False] * len(truth.boxes) for truth in truths]
    nearest = [_nearest(found.boxes, truth.boxes) for found, truth in zip(detections, truths, strict=True)]
    true_positives = false_positives = 0
    recalls, precisions = [], []
    for _, image, detection in ranked:
        overlap, index = nearest[image][detection]
        if overlap >= 0.5:
            if bool(truths[image].difficult[index]):
                continue
            true_positives += int(not matched[image][index])
            false_positives += int(matched[image][index])
            matched[image][index] = True
        else:
            false_positives += 1
        recalls.append(true_positives / count)
        precisions.append(true_positives / (true_positives + false_positives))
    curve = list(zip(recalls, precisions, strict=True))
    highest = (max((value for recall, value in curve if recall >= at / 10 - 1e-9), default=0.0) for at in range(11))
    return sum(highest) / 11


def _nearest(boxes: Tensor, truths: Tensor) -> list[tuple[float, int]]:
    """Return, for each box, its largest overlap with a true box and the index of that; (0, -1) without true boxes."""
    if not len(truths):
        return [(0.0, -1)] * len(boxes)
    overlap, index = box_iou(boxes, truths).max(1)
    return list(zip(overlap.tolist(), index.tolist(), strict=True))
