"""SSD and Faster R-CNN are the published ones, and their parts follow the papers on worked cases."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import lowp
from lowp.recipes import faster_rcnn, ssd
from lowp.recipes.data import detection as boxes_module
from lowp.recipes.data import shapes
from lowp.recipes.data.detection import Truth, box_iou, encode_boxes, mean_average_precision, select_detections
from lowp.recipes.faster_rcnn import FasterRCNN, region_anchors, region_features
from lowp.recipes.recipe import Recipe
from lowp.recipes.ssd import SSD, SSD300, default_boxes

SQUARE = torch.tensor([[0.2, 0.2, 0.6, 0.6]])
TRUTH = Truth(SQUARE, torch.tensor([4]), torch.tensor([False]))
NOTHING = Truth(SQUARE[:0], torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.bool))


@pytest.mark.parametrize(("layout", "side", "boxes"), [(SSD300, 300, 8732), (ssd.SMALL, 96, 828)])
def test_ssd_predicts_as_many_boxes_as_its_layout_has(layout: object, side: int, boxes: int) -> None:
    with torch.device("meta"):
        offsets, scores = SSD(layout)(torch.zeros(1, 3, side, side))  # type: ignore[arg-type]
    assert offsets.shape == (1, boxes, 4) and scores.shape == (1, boxes, 21)
    assert default_boxes(layout).shape == (boxes, 4)  # type: ignore[arg-type]


def test_default_boxes_lie_in_the_image_and_begin_at_its_top_left() -> None:
    boxes = default_boxes(ssd.SMALL)
    assert boxes.min() >= 0 and boxes.max() <= 1 and (boxes[:, 2:] > boxes[:, :2]).all()
    assert boxes[0].tolist() == pytest.approx([0, 0, 1 / 24 + 0.075, 1 / 24 + 0.075])
    assert boxes[4, 0] > boxes[0, 0] and boxes[4, 1] == boxes[0, 1]  # the next place is to the right


@pytest.mark.parametrize("layout", [SSD300, ssd.SMALL])
def test_default_boxes_have_the_sizes_and_ratios_of_the_paper(layout: ssd.SSDShape) -> None:
    """Two squares a position, and boxes of the ratio 2, of maps in the middle 3 too, upright and flat."""
    boxes, start = default_boxes(layout), 0
    assert layout is not SSD300 or layout.ratios == ((2,), *[(2, 3)] * 3, (2,), (2,))
    for place, (side, ratios) in enumerate(zip(layout.sides, layout.ratios, strict=True)):
        count, (size, following) = 2 + 2 * len(ratios), layout.sizes[place : place + 2]
        middle = start + (side // 2 * side + side // 2) * count
        shapes = boxes[middle : middle + count, 2:] - boxes[middle : middle + count, :2]
        narrow = [size, (size * following) ** 0.5, *(size / ratio**0.5 for ratio in ratios for _ in range(2))]
        assert sorted(shapes.amin(1).tolist()) == pytest.approx(sorted(narrow), rel=1e-4)
        assert sum((shapes[:, 0] > shapes[:, 1] * 1.01).tolist()) == len(ratios)
        start += side * side * count
    assert start == len(boxes)


def test_every_box_has_a_match_and_others_only_where_they_overlap_by_half() -> None:
    anchors = default_boxes(ssd.SMALL)
    classes, boxes = ssd.match_targets(anchors, TRUTH)
    close = box_iou(anchors, SQUARE)[:, 0]
    assert classes[close.argmax()] == 5 and torch.equal(boxes[0], SQUARE[0])
    assert torch.equal(classes > 0, (close > 0.5) | (close == close.max()))
    tiny = Truth(torch.tensor([[0.5, 0.5, 0.51, 0.51]]), TRUTH.classes, TRUTH.difficult)
    assert int((ssd.match_targets(anchors, tiny)[0] > 0).sum()) == 1
    assert not ssd.match_targets(anchors, NOTHING)[0].any()


def batch_of(truth: Truth) -> dict[str, torch.Tensor]:
    images = torch.zeros(1, 3, 96, 96)
    classes = truth.classes if len(truth.classes) else torch.tensor([-1])
    boxes = truth.boxes if len(truth.boxes) else torch.zeros(1, 4)
    return {"images": images, "boxes": boxes[None], "classes": classes[None], "difficult": (classes < 0)[None]}


def test_the_multibox_loss_is_zero_for_the_right_answer_and_counts_three_negatives_a_match() -> None:
    anchors = default_boxes(ssd.SMALL)
    classes, boxes = ssd.match_targets(anchors, TRUTH)
    offsets = encode_boxes(boxes, anchors, ssd.VARIANCES)[None]
    right = 50.0 * torch.nn.functional.one_hot(classes, 21)[None].float()
    assert float(ssd.detection_loss(offsets, right, batch_of(TRUTH))) == pytest.approx(0, abs=1e-6)
    # No preference: each of the matches and three times as many others cost log 21.
    level = ssd.detection_loss(offsets, torch.zeros_like(right), batch_of(TRUTH))
    assert float(level) == pytest.approx(4 * torch.tensor(21.0).log().item(), rel=1e-5)


def test_a_picture_without_boxes_has_a_finite_loss_and_gradients() -> None:
    torch.manual_seed(0)
    for recipe, module in ((ssd.SSD_RECIPE, ssd), (faster_rcnn.FASTER_RCNN, faster_rcnn)):
        model = recipe.make_model(recipe.size("cpu"))
        loss = module.loss(model, batch_of(NOTHING))  # type: ignore[attr-defined]
        torch.autograd.backward(loss)
        assert loss.isfinite()


def test_the_right_answer_has_a_map_of_one() -> None:
    anchors = default_boxes(ssd.SMALL)
    classes, boxes = ssd.match_targets(anchors, TRUTH)
    right = 50.0 * torch.nn.functional.one_hot(classes, 21)[None].float()
    (found,) = ssd.detections(encode_boxes(boxes, anchors, ssd.VARIANCES)[None], right)
    assert mean_average_precision([found], [TRUTH], 20) == 1.0
    assert len(found.classes) == 1


def test_boxes_of_each_class_are_found_where_each_class_has_its_own() -> None:
    boxes = torch.stack([SQUARE, SQUARE + 0.3], 1)  # one region, two classes, a box for each
    found = select_detections(boxes, torch.tensor([[0.3, 0.6]]), iou_threshold=0.5, max_count=5)
    assert torch.equal(found.boxes, torch.cat([SQUARE, SQUARE + 0.3]))
    assert found.classes.tolist() == [0, 1] and found.scores.tolist() == pytest.approx([0.3, 0.6])
    assert not len(select_detections(boxes, torch.tensor([[0.01, 0.02]]), iou_threshold=0.5, max_count=5).boxes)


@pytest.mark.parametrize("recipe", [ssd.SSD_RECIPE, faster_rcnn.FASTER_RCNN], ids=lambda recipe: recipe.name)
def test_boxes_are_compared_in_fp32_in_every_precision(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    same: list[bool] = []

    def compare(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result = box_iou(one, other)
        with torch.autocast("cpu", enabled=False):
            same.append(torch.equal(result, box_iou(one, other)))
        return result

    monkeypatch.setattr(boxes_module, "box_iou", compare)
    model = recipe.make_model(recipe.size("cpu")).eval()
    with lowp.autocast("flex16+5"), torch.no_grad():
        recipe.evaluate(model, [batch_of(TRUTH)])
    assert same and all(same) and not recwarn.list


def test_a_region_of_a_map_is_sampled_where_it_lies() -> None:
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    ramp = torch.stack([x, y])[None]
    pooled = region_features(ramp, [torch.tensor([[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 1.0, 1.0]])])
    assert pooled.shape == (2, 2, 7, 7)
    middles = 0.25 * 8 - 0.5 + (torch.arange(7) + 0.5) / 7 * 4
    assert torch.allclose(pooled[0, 0, 3], middles, atol=1e-4)
    assert torch.allclose(pooled[0, 1, :6, 0], (middles + 2)[:6], atol=1e-4)


def test_anchors_have_three_ratios_and_the_same_area() -> None:
    anchors = region_anchors(faster_rcnn.SMALL, 6, 6)
    sizes = (anchors[:, 2:] - anchors[:, :2]).view(36, 3, 3, 2)
    assert torch.allclose(sizes.prod(-1), torch.tensor([0.2, 0.35, 0.55])[:, None].square().expand(36, 3, 3))
    assert torch.allclose(sizes[0, 0, :, 0] / sizes[0, 0, :, 1], torch.tensor([0.5, 1.0, 2.0]))


def test_proposals_are_the_likely_boxes_without_doubles() -> None:
    anchors = torch.tensor([[0.1, 0.1, 0.4, 0.4], [0.1, 0.1, 0.4, 0.41], [0.6, 0.6, 1.2, 1.2]])
    scores = torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, -1.0]]])
    (boxes,) = faster_rcnn.proposals(scores, torch.zeros(1, 3, 4), anchors, max_count=5)
    expected = torch.tensor([[0.1, 0.1, 0.4, 0.41], [0.6, 0.6, 1.0, 1.0]])
    assert torch.allclose(boxes, expected)


def test_regions_to_learn_from_are_at_most_a_quarter_with_something() -> None:
    torch.manual_seed(0)
    wanted = torch.cat([torch.ones(50), torch.zeros(300), -torch.ones(10)]).long()
    chosen = faster_rcnn.sample_balanced(wanted, 64, 0.25)
    assert len(chosen) == len(set(chosen.tolist())) == 64
    assert int((wanted[chosen] == 1).sum()) == 16 and not (wanted[chosen] == -1).any()


def test_faster_rcnn_has_a_map_of_a_sixteenth_and_judges_every_region() -> None:
    network = FasterRCNN(faster_rcnn.SMALL).eval()
    with torch.no_grad():
        features = network.features(torch.zeros(2, 3, 96, 96))
        scores, offsets = network.propose(features)
        judged, moved = network.judge(features, [SQUARE, SQUARE.repeat(3, 1)])
    assert features.shape == (2, 64, 6, 6)
    assert scores.shape == (2, 324, 2) and offsets.shape == (2, 324, 4)
    assert judged.shape == (4, 21) and moved.shape == (4, 21, 4)


def test_faster_rcnn_learns_from_what_overlaps_much_or_little() -> None:
    anchors = torch.tensor(
        [[0.2, 0.2, 0.6, 0.6], [0.2, 0.2, 0.6, 0.5], [0.2, 0.2, 0.6, 0.4], [0.7, 0.7, 0.9, 0.9], [0.2, 0.2, 0.6, 0.31]]
    )  # of the square all, 3/4, 1/2, nothing, 0.275
    sampled, labels, positive, offsets = faster_rcnn.anchor_targets(anchors, TRUTH)
    assert dict(zip(sampled.tolist(), labels.tolist(), strict=True)) == {0: 1, 1: 1, 3: 0, 4: 0}
    assert torch.equal(offsets, encode_boxes(SQUARE.repeat(2, 1), anchors[positive])) and sorted(positive) == [0, 1]
    (only,) = faster_rcnn.anchor_targets(anchors[2:3], TRUTH)[2].tolist()
    assert only == 0  # the best of a box, however little it overlaps
    scores, moved = torch.zeros(5, 2), torch.zeros(5, 4)
    error = torch.cat([encode_boxes(SQUARE, anchors[place : place + 1]) for place in (0, 1)]).abs()
    smooth = torch.where(error < 1 / 9, 4.5 * error**2, error - 1 / 18).sum()
    assert faster_rcnn.region_loss(scores, moved, anchors, TRUTH).item() == pytest.approx(
        math.log(2) + smooth.item() / 4, rel=1e-5
    )


def test_the_second_stage_learns_from_regions_and_the_true_boxes() -> None:
    true = torch.tensor([[0.25, 0.25, 0.75, 0.75]])
    truth = Truth(true, torch.tensor([4]), torch.tensor([False]))
    half, less, apart = (0.25, 0.25, 0.75, 0.5), (0.25, 0.25, 0.75, 0.46875), (0.75, 0.75, 1.0, 1.0)
    boxes, labels, targets = faster_rcnn.region_targets(torch.tensor([half, less, apart]), truth)
    found = dict(zip(map(tuple, boxes.tolist()), labels.tolist(), strict=True))
    assert found == {half: 5, less: 0, apart: 0, tuple(true[0].tolist()): 5}
    assert torch.equal(targets, true.repeat(4, 1))
    scores, offsets = torch.zeros(4, 21), torch.zeros(4, 21, 4)
    rows = torch.nonzero(labels)[:, 0]
    wanted = encode_boxes(true.repeat(2, 1), boxes[rows], faster_rcnn.VARIANCES)
    for row, offset in zip(rows, wanted, strict=True):
        offsets[row, 5] = offset + 0.5  # of its own class alone
    parts = [(boxes[some], labels[some], targets[some]) for some in (slice(1), slice(1, None))]
    loss = faster_rcnn.class_loss(scores, offsets, parts)
    assert loss.item() == pytest.approx(math.log(21) + 2 * 4 * 0.125 / 4, rel=1e-5)


# -- drawn scenes -----------------------------------------------------------------------------------------------------
AREAS = {
    **{"disc": math.pi / 4, "ring": 0.65 * math.pi / 4, "square": 1.0, "frame": 1 - 0.55**2, "diamond": 0.5},
    **{"triangle": 0.5, "plus": 1 - 0.7**2, "saltire": 1 - 0.65**2, "stripes": 0.5, "hourglass": 0.5},
}
POINTS = {  # inside and outside, to the right and down from the middle
    "disc": ((0.7, 0.7), (0.8, 0.7)),
    "ring": ((0.6, 0.0), (0.5, 0.0)),
    "frame": ((0.0, -0.6), (0.5, 0.5)),
    "diamond": ((0.4, -0.5), (0.6, 0.5)),
    "triangle": ((0.7, 0.5), (0.7, 0.3)),
    "plus": ((0.9, 0.2), (0.4, 0.4)),
    "saltire": ((0.9, -0.8), (0.5, 0.1)),
    "stripes": ((0.9, 0.1), (0.9, 0.3)),
    "hourglass": ((0.2, -0.3), (0.3, 0.2)),
}

EDGES = {  # exactly on the edge
    "disc": [(1, 0), (0, 1)],
    "ring": [(1, 0)],
    "square": [(1, 0), (0, 1)],
    "frame": [(0.55, 0), (0, 0.55)],
    "diamond": [(0.5, 0.5)],
    "triangle": [(0.5, 0)],
    "plus": [(0.3, 0.9)],
    "saltire": [(0.35, 0), (0, 0.35)],
    "stripes": [(0, 0.2), (0, -0.2)],
    "hourglass": [(0.5, 0.5)],
}


def test_the_edge_of_a_figure_is_outside() -> None:
    found = {name: [bool(shapes.SHAPES[name](*map(np.array, place))) for place in EDGES[name]] for name in EDGES}
    assert found == {name: [False] * len(EDGES[name]) for name in shapes.SHAPES}


def test_a_figure_has_six_pixels_at_least() -> None:
    for seed in range(5):
        (box,) = shapes.draw_scene(np.random.default_rng(seed), 24, (0.1, 0.2), 1, 10, False).boxes
        assert (box[2:] - box[:2] == 6).all()


@pytest.mark.parametrize(("side", "step"), [(20, 2), (21, 1), (40, 1), (41, 1 / 2)])
def test_a_photograph_is_subsampled_while_it_fits_and_repeated_where_it_does_not(
    side: int, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.arange(40, dtype=torch.uint8)[:, None].expand(3, 40, 60)
    monkeypatch.setattr(shapes, "photographs", lambda: (rows, rows))
    for seed in range(4):
        piece = shapes._background(np.random.default_rng(seed), side, False)
        assert piece.shape == (3, side, side)
        assert (int(piece[0, -1, 0]) - int(piece[0, 0, 0])) / (side - 1) == pytest.approx(step, abs=0.02)


def test_half_of_the_photographs_are_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = torch.arange(24, dtype=torch.uint8).expand(3, 18, 24)
    monkeypatch.setattr(shapes, "photographs", lambda: (columns, columns))
    for drawn, expected in ((0.4375, [22, 20, 18]), (0.5, [18, 20, 22])):
        random = SimpleNamespace(integers=lambda bound: 0, random=lambda drawn=drawn: drawn)
        assert shapes._background(random, 3, True)[1, 1].tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", AREAS)
def test_figures_have_their_areas_and_lie_where_they_should(name: str) -> None:
    assert list(AREAS) == list(shapes.SHAPES)
    middle = (np.arange(400) + 0.5) / 200 - 1
    assert shapes.SHAPES[name](*np.meshgrid(middle, middle)).mean() == pytest.approx(AREAS[name], abs=0.01)
    for place, is_inside in zip(POINTS.get(name, ()), (True, False), strict=False):
        assert shapes.SHAPES[name](*map(np.array, place)) == is_inside


def test_a_scene_has_figures_of_its_sizes_that_overlap_little_on_a_part_of_a_photograph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = torch.arange(640).float().mul(255 / 639).to(torch.uint8).expand(3, 427, 640)
    monkeypatch.setattr(shapes, "photographs", lambda: (columns, columns))
    random, counts = np.random.default_rng(0), []
    for held in [False, True] * 20:
        empty = shapes._background(random, 96, held)
        assert empty.shape == (3, 96, 96) and (empty == empty[:1, :1]).all()
        low, high = sorted((int(empty[0, 0, 0]), int(empty[0, 0, -1])))
        assert (low >= 190, high <= 191) == (held, not held)  # to the right of three quarters
        # subsampled where 192 columns fit, of the part to train on
        assert high - low == pytest.approx((96 if held else 192) * 255 / 639, abs=3)
        scene = shapes.draw_scene(random, 96, (0.2, 0.5), 4, 3, held)
        counts.append(len(scene.kinds))
        assert scene.image.dtype == np.uint8 and set(scene.kinds) <= {0, 1, 2}
        sides = scene.boxes[:, 2:] - scene.boxes[:, :2]
        assert (sides >= 19).all() and (sides <= 48).all() and (sides.min(1) >= sides.max(1) * 2 // 3).all()
        assert (scene.boxes >= 0).all() and (scene.boxes <= 96).all()
        inside = np.zeros((96, 96), bool)
        for left, top, right, bottom in scene.boxes.astype(int):
            inside[top:bottom, left:right] = True
        assert not scene.outline[~inside].any() and set(np.unique(scene.outline)) - {0} <= set(scene.kinds + 1)
        for place, one in enumerate(scene.boxes):
            for other in scene.boxes[:place]:
                across = np.clip(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]), 0, None).prod()
                assert across <= 0.2 * min((box[2:] - box[:2]).prod() for box in (one, other)) + 1e-6
    assert min(counts) >= 1 and max(counts) == 4


def test_a_figure_is_drawn_in_its_box_in_a_colour_of_its_own_or_near_that_of_its_kind() -> None:
    random = np.random.default_rng(0)
    drawn = []
    for place in range(40):
        image, outline = np.full((3, 32, 32), 7, np.uint8), np.zeros((32, 32), np.int64)
        shapes._draw(random, image, outline, 2, (4, 8, 20, 28), coloured=place % 2 == 0)
        assert (outline[8:28, 4:20] == 3).all() and (outline == 3).sum() == 16 * 20
        assert (image[:, outline == 0] == 7).all()
        drawn.append(image[:, 8:28, 4:20].astype(float))
    near = np.stack([one.mean((1, 2)) for one in drawn[::2]])
    assert (near[:, :2] < 110).all() and (near[:, 2] > 150).all()  # blue
    free = np.stack([one.mean((1, 2)) for one in drawn[1::2]])
    assert free.std(0).min() > 45 and near.std(0).max() < 45
    noise = np.concatenate([one.std((1, 2)) for one in drawn[1::2]])
    assert np.median(noise) == pytest.approx(12, abs=1)


KINDS = ("red", "green", "blue", "yellow", "magenta", "cyan", "white", "black", "orange", "violet")
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "magenta": (1, 0, 1)}
COLOURS |= {"cyan": (0, 1, 1), "white": (1, 1, 1), "black": (0, 0, 0), "orange": (1, 0.5, 0), "violet": (0.5, 0, 1)}


@pytest.mark.parametrize("kind", range(10))
def test_figures_of_a_kind_have_its_colour(kind: int) -> None:
    random, seen = np.random.default_rng(0), []
    for _ in range(20):
        image, outline = np.zeros((3, 16, 16), np.uint8), np.zeros((16, 16), np.int64)
        shapes._draw(random, image, outline, kind, (0, 0, 16, 16), coloured=True)
        seen.append(image[:, outline == kind + 1].mean(1))
    assert np.mean(seen, 0) / 255 == pytest.approx(COLOURS[KINDS[kind]], abs=0.15)


def test_an_overlap_is_a_part_of_the_smaller_box() -> None:
    for other, part in (
        ((2, 1, 6, 9), 0.375),
        ((4, 0, 8, 4), 0.0),
        ((1, 1, 3, 3), 1.0),
        ((3, 3, 5, 4), 0.5),
        ((9, 9, 10, 10), 0.0),
    ):
        assert shapes._overlap((0, 0, 4, 4), other) == shapes._overlap(other, (0, 0, 4, 4)) == part


def test_boxes_are_kept_above_a_probability_and_each_class_has_its_most_likely_ones() -> None:
    boxes = torch.tensor([[place / 8, 0.0, place / 8 + 0.1, 0.1] for place in range(7)])
    likely = torch.tensor([[0.5, 0.25], [0.75, 0.5], [0.625, 0.875], [1.0, 0.0], [0.75, 0.5], [0.5, 0.5], [0.0, 1.0]])
    found = select_detections(boxes, likely, iou_threshold=0.5, max_count=2, min_score=0.5)
    assert found.classes.tolist() == [0, 0, 1, 1] and found.scores.tolist() == [1.0, 0.75, 1.0, 0.875]
    assert torch.equal(found.boxes[[0, 2, 3]], boxes[[3, 6, 2]])
    every = select_detections(boxes, likely, iou_threshold=0.5, max_count=9, min_score=0.5)
    assert every.classes.tolist() == [0] * 4 + [1] * 2 and every.scores.min() > 0.5
    near = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.5, 0.375]])  # by 1/2 and 3/4
    found = select_detections(near, torch.tensor([[0.75], [0.5], [0.625]]), iou_threshold=0.5, max_count=9)
    assert found.scores.tolist() == [0.75, 0.5]


@pytest.mark.parametrize(("doubles", "count"), [(7, 2), (8, 1), (9, 1)])
def test_the_most_likely_boxes_of_four_times_as_many_as_are_kept_are_looked_at(doubles: int, count: int) -> None:
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5]] * doubles + [[0.5, 0.5, 1.0, 1.0]])
    likely = torch.linspace(1.0, 0.5, doubles + 1)[:, None]
    assert len(select_detections(boxes, likely, iou_threshold=0.5, max_count=2).scores) == count


def test_of_each_picture_three_hard_negatives_are_counted_a_match() -> None:
    losses = torch.tensor(
        [[9.0, 1.0, 5.0, 3.0, 4.0, 2.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]
    )
    positive = torch.zeros(3, 6, dtype=torch.bool)
    positive[0, 0] = True
    positive[2, 3:5] = True
    counted = ssd.mine_negatives(losses, positive)
    assert counted.nonzero()[:, 1].tolist() == [0, 2, 3, 4, *range(6)]  # a match, and the three largest others
    assert counted.sum(1).tolist() == [4, 0, 6]


def test_the_multibox_loss_is_that_of_offsets_and_classes_a_match() -> None:
    anchors = default_boxes(ssd.SMALL)
    classes, boxes = ssd.match_targets(anchors, TRUTH)
    offsets = encode_boxes(boxes, anchors, ssd.VARIANCES)[None]
    matches = int((classes > 0).sum())
    right = 50.0 * torch.nn.functional.one_hot(classes, 21)[None].float()
    moved = torch.where((classes > 0)[:, None], offsets + torch.tensor([0.5, -0.5, 2.0, 0.0]), offsets + 100.0)
    loss = ssd.detection_loss(moved, right, batch_of(TRUTH))
    assert float(loss) == pytest.approx(0.125 + 0.125 + 1.5, rel=1e-4) and matches > 1
    level = ssd.detection_loss(offsets, torch.zeros_like(right), batch_of(NOTHING))
    assert float(level) == 0.0
