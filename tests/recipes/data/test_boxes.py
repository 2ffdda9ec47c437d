"""Boxes: overlaps, offsets and their inverse, suppression, and mAP as in Pascal VOC 2007 on worked cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowp.recipes.data.detection import (
    Detections,
    Truth,
    box_iou,
    decode_boxes,
    encode_boxes,
    mean_average_precision,
    nms,
)

SQUARE = torch.tensor([[0.0, 0.0, 2.0, 2.0]])


@pytest.mark.parametrize(
    ("box", "share"),
    [((0, 0, 2, 2), 1.0), ((1, 0, 3, 2), 1 / 3), ((2, 0, 4, 2), 0.0), ((0, 0, 1, 1), 0.25), ((1, 1, 1, 1), 0.0)],
)
def test_overlap_is_the_common_area_by_the_area_of_both(box: tuple[int, ...], share: float) -> None:
    assert float(box_iou(SQUARE, torch.tensor([box], dtype=torch.float32))[0, 0]) == pytest.approx(share)


@pytest.mark.parametrize("variances", [(1.0, 1.0), (0.1, 0.2)])
def test_boxes_come_back_from_their_offsets(variances: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 50, 2, generator=generator)
    boxes, anchors = (torch.cat([low, low + 0.1 + torch.rand(50, 2, generator=generator)], 1) for low in corners)
    assert torch.allclose(decode_boxes(encode_boxes(boxes, anchors, variances), anchors, variances), boxes, atol=1e-5)
    assert torch.equal(encode_boxes(anchors, anchors), torch.zeros(50, 4))


def test_a_box_that_overlaps_a_better_one_is_left_out() -> None:
    boxes = torch.tensor([[0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6], [0, 1, 2, 3]])
    scores = torch.tensor([0.8, 0.9, 0.1, 0.5])
    assert nms(boxes, scores, iou_threshold=0.5, max_count=9).tolist() == [1, 3, 2]
    assert nms(boxes, scores, iou_threshold=0.5, max_count=2).tolist() == [1, 3]
    assert nms(boxes[:0], scores[:0], iou_threshold=0.5, max_count=2).tolist() == []


def truth(*boxes: tuple[float, ...], difficult: tuple[bool, ...] = ()) -> Truth:
    marks = torch.tensor(difficult or [False] * len(boxes), dtype=torch.bool)
    return Truth(torch.tensor(boxes).view(-1, 4), torch.zeros(len(boxes), dtype=torch.int64), marks)


def found(boxes: list[tuple[float, ...]], scores: list[float], class_index: int = 0) -> Detections:
    return Detections(torch.tensor(boxes).view(-1, 4), torch.full((len(boxes),), class_index), torch.tensor(scores))


ONE, TWO, FAR = (0.0, 0.0, 2.0, 2.0), (4.0, 4.0, 6.0, 6.0), (8.0, 8.0, 9.0, 9.0)


@pytest.mark.parametrize(
    ("finding", "there", "expected"),
    [
        (found([ONE], [0.9]), truth(ONE), 1.0),
        (found([FAR], [0.9]), truth(ONE), 0.0),
        (found([], []), truth(ONE), 0.0),
        # One of two found, nothing wrong: precision 1 up to a recall of a half, which are 6 of the 11 points.
        (found([ONE], [0.9]), truth(ONE, TWO), 6 / 11),
        # A wrong one first: precision 1/2 and then 2/3, the higher of which holds for all lower recalls too.
        (found([FAR, ONE, TWO], [0.9, 0.8, 0.7]), truth(ONE, TWO), 2 / 3),
        # The same thing found twice is wrong once, and comes last: no harm.
        (found([ONE, ONE], [0.9, 0.8]), truth(ONE), 1.0),
        (found([ONE, ONE, TWO], [0.9, 0.8, 0.7]), truth(ONE, TWO), (6 * 1 + 5 * 2 / 3) / 11),
        # What is marked as difficult counts neither way.
        (found([TWO, ONE], [0.9, 0.8]), truth(ONE, TWO, difficult=(False, True)), 1.0),
    ],
)
def test_precision_is_averaged_over_eleven_recalls(finding: Detections, there: Truth, expected: float) -> None:
    assert mean_average_precision([finding], [there], 1) == pytest.approx(expected)


def test_a_class_that_is_not_there_is_left_out_of_the_mean_and_images_are_kept_apart() -> None:
    assert mean_average_precision([found([ONE], [0.9])], [truth(ONE)], 5) == 1.0
    assert mean_average_precision([found([ONE], [0.9], class_index=1)], [truth(ONE)], 5) == 0.0
    swapped = mean_average_precision([found([TWO], [0.9]), found([ONE], [0.9])], [truth(ONE), truth(TWO)], 1)
    assert swapped == 0.0
    assert mean_average_precision([found([], [])], [truth()], 3) == 0.0
    half, less = (0.0, 0.0, 1.0, 0.5), (0.0, 0.0, 1.0, 0.46875)
    for boxes, difficult, expected in (
        ([half], False, 1.0),
        ([less], False, 0.0),
        ([half, half], False, 1.0),
        ([less, half], False, 0.5),
    ):
        there = truth((0.0, 0.0, 1.0, 1.0), (8.0, 8.0, 9.0, 9.0), difficult=(difficult, True))
        finding = found(boxes, [0.9, 0.8][: len(boxes)])
        assert mean_average_precision([finding], [there], 1) == expected
    finding = found([half, half, FAR], [0.9, 0.8, 0.7])  # an overlap of a half has found the object, too
    assert mean_average_precision([finding], [truth((0.0, 0.0, 1.0, 1.0), FAR)], 1) == pytest.approx(28 / 33)
    there = truth((0.0, 0.0, 1.0, 1.0), (8.0, 8.0, 9.0, 9.0), difficult=(True, False))
    for box, expected in ((half, 1.0), (less, 0.5)):  # one that is difficult is left out, and another is an error
        finding = found([box, (8.0, 8.0, 9.0, 9.0)], [0.9, 0.8])
        assert mean_average_precision([finding], [there], 1) == expected


def test_only_the_order_of_scores_counts() -> None:
    scores: Tensor = torch.tensor([0.9, 0.8, 0.7])
    both = [
        mean_average_precision([found([ONE, FAR, TWO], factors.tolist())], [truth(ONE, TWO)], 1)
        for factors in (scores, scores / 100)
    ]
    assert both[0] == both[1] == pytest.approx((6 * 1 + 5 * 2 / 3) / 11)
