"""Faster R-CNN on VGG-16: a detector with two stages, which trains as well in fp16 with loss scaling as in fp32.

In the published run (Micikevicius et al. 2018, arXiv 1710.03740, table 2) mAP is 69.1 in fp32, 68.6 in fp16 without
loss scaling and 69.7 with it. The convolutions and the large linear layers compute in low precision; the four losses
are fp32; boxes and their matches are fp32 in every precision.

A first stage proposes regions of an image, and a second stage classifies each of them: Ren, He, Girshick, Sun, "Faster
R-CNN", 2015, arXiv 1506.01497, on VGG-16. Regions are resampled to 7x7 by bilinear interpolation (RoIAlign: He et al.
2017, arXiv 1703.06870, section 3), without rounding coordinates.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.recipes.data import detection
from lowp.recipes.detection import VARIANCES, WIDTHS, by_anchor, detector, initialise, stage
from lowp.recipes.recipe import Size, built

# -- the network -------------------------------------------------------------------------------------------------------
POOLED = 7  # side of a region's pooled map
_SAMPLES = 2  # samples averaged along each side of a position of that map


class Shape(NamedTuple):
    """The hyperparameters of Faster R-CNN.

    `layers`: convolutions of each VGG stage. `share`: factor of VGG's widths. `sizes`: sizes of the anchors as
    fractions of the image. `classes`: number of classes, without background.
    """

    layers: tuple[int, ...]
    share: float
    sizes: tuple[float, ...]
    classes: int


class FasterRCNN(nn.Module):
    """Faster R-CNN: call `features`, `propose` and `judge` in this order. Boxes are fractions of the image.

    With the widths of VGG-16, three anchor sizes and 20 classes it has 137,078,239 parameters.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        widths = [3, *(round(width * shape.share) for width in WIDTHS)]
        parts: list[nn.Module] = []
        for level, layers in enumerate(shape.layers):
            parts += [nn.MaxPool2d(2)] if level else []
            parts.append(stage(widths[level], widths[level + 1], layers))
        self.convolutions = nn.Sequential(*parts)
        anchors, hidden = 3 * len(shape.sizes), round(4096 * shape.share)
        self.region = nn.Sequential(nn.Conv2d(widths[5], widths[5], 3, padding=1), nn.ReLU())
        self.region_scores = nn.Conv2d(widths[5], 2 * anchors, 1)
        self.region_offsets = nn.Conv2d(widths[5], 4 * anchors, 1)
        self.hidden = nn.Sequential(
            nn.Flatten(),
            nn.Linear(widths[5] * POOLED**2, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
        )
        self.scores = nn.Linear(hidden, shape.classes + 1)
        self.offsets = nn.Linear(hidden, 4 * (shape.classes + 1))
        initialise([*self.convolutions.modules(), *self.region.modules(), *self.hidden.modules()])
        for layer, deviation in (
            (self.region_scores, 0.01),
            (self.region_offsets, 0.01),
            (self.scores, 0.01),
            (self.offsets, 0.001),
        ):
            nn.init.normal_(layer.weight, std=deviation)

    def features(self, images: Tensor) -> Tensor:
        """Return the feature map [N, channels, H / 16, W / 16] of images [N, 3, H, W]."""
        output: Tensor = self.convolutions(images)
        return output

    def propose(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores [N, anchors, 2] (background, object) and offsets [N, anchors, 4] of `region_anchors`."""
        x = self.region(features)
        return by_anchor(self.region_scores(x), 2), by_anchor(self.region_offsets(x), 4)

    def judge(self, features: Tensor, boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return scores [regions, classes + 1] and offsets [regions, classes + 1, 4] for the boxes of all images."""
        x = self.hidden(region_features(features, boxes))
        return self.scores(x), self.offsets(x).view(len(x), -1, 4)


def region_features(features: Tensor, boxes: list[Tensor]) -> Tensor:
    """Pool the boxes of all images from their feature maps: [regions, channels, 7, 7].

    Each value is the mean of 2 x 2 bilinear samples of the map (RoIAlign).
    """
    side = POOLED * _SAMPLES
    with detection.no_autocast_no_grad(features.device):
        steps = (torch.arange(side, device=features.device) + 0.5) / side
    pooled = []
    for image, regions in zip(features, boxes, strict=True):
        with detection.no_autocast_no_grad(features.device):
            low, size = regions[:, :2, None], (regions[:, 2:] - regions[:, :2])[:, :, None]
            points = 2 * (low + size * steps) - 1  # [regions, (x, y), side] in -1 to 1: coordinates of grid_sample
            x = points[:, 0, None, :].expand(-1, side, -1)
            y = points[:, 1, :, None].expand(-1, -1, side)
            grid = torch.stack([x, y], -1).reshape(1, len(regions) * side, side, 2).to(image.dtype)
        sampled = nn.functional.grid_sample(image[None], grid, align_corners=False, padding_mode="border")
        by_region = sampled[0].view(image.shape[0], len(regions), side, side).transpose(0, 1)
        pooled.append(nn.functional.avg_pool2d(by_region, _SAMPLES))
    return torch.cat(pooled)


def region_anchors(shape: Shape, height: int, width: int) -> Tensor:
    """Return the anchors [anchors, 4] of a `height` x `width` map: all sizes in three aspect ratios per position."""
    shapes = torch.tensor([(size * ratio**0.5, size / ratio**0.5) for size in shape.sizes for ratio in (0.5, 1.0, 2.0)])
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    centres = torch.stack([x, y], -1).view(-1, 1, 2)
    return torch.cat([centres - shapes / 2, centres + shapes / 2], -1).view(-1, 4)


# -- the recipe --------------------------------------------------------------------------------------------------------
ANCHORS_SAMPLED, REGIONS_SAMPLED = 256, 64  # per image, in the losses of the first and of the second stage
PROPOSED = 100  # regions per image in evaluation

VGG_16 = Shape(layers=(2, 2, 3, 3, 3), share=1.0, sizes=(0.2, 0.4, 0.8), classes=20)
SMALL = Shape(layers=(1, 1, 2, 2, 1), share=0.125, sizes=(0.2, 0.35, 0.55), classes=20)


# -- the two stages ---------------------------------------------------------------------------------------------------
def proposals(scores: Tensor, offsets: Tensor, anchors: Tensor, max_count: int) -> list[Tensor]:
    """Return at most `max_count` boxes per image by falling score, after non-maximum suppression at 0.7."""
    proposed = []
    for probabilities, image_offsets in zip(scores.float().softmax(-1)[..., 1], offsets.float(), strict=True):
        first = probabilities.argsort(descending=True)[: 4 * max_count]
        boxes = detection.decode_boxes(image_offsets[first], anchors[first]).clamp(0, 1)
        proposed.append(boxes[detection.nms(boxes, probabilities[first], iou_threshold=0.7, max_count=max_count)])
    return proposed


def sample_balanced(labels: Tensor, count: int, positive_share: float) -> Tensor:
    """Return the indices of at most `count` labels, drawn at random; negative labels are never drawn.

    At most `positive_share` of `count` are indices of labels above 0; the rest are indices of labels that are 0.
    """
    positive, negative = (torch.nonzero(mask)[:, 0] for mask in (labels > 0, labels == 0))
    positive = positive[torch.randperm(len(positive))[: round(count * positive_share)].to(labels.device)]
    negative = negative[torch.randperm(len(negative))[: count - len(positive)].to(labels.device)]
    return torch.cat([positive, negative])


def anchor_targets(anchors: Tensor, truth: detection.Truth) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample anchors of an image for the loss, with their targets.

    Return the indices of the sampled anchors, their labels (1 for object, 0 for background), the indices of those
    labelled 1, and the target offsets of these. An anchor is labelled 1 if it overlaps a box by more than 0.7 or has
    the largest overlap with a box, 0 if it overlaps all boxes by less than 0.3; others are not sampled.
    """
    overlap, index = detection.match_anchors(anchors, truth.boxes)
    labels = torch.full((len(anchors),), -1, device=anchors.device)
    labels[overlap < 0.3] = 0
    labels[overlap > 0.7] = 1
    sampled = sample_balanced(labels, ANCHORS_SAMPLED, 0.5)
    positive = sampled[labels[sampled] == 1]
    return sampled, labels[sampled], positive, detection.encode_boxes(truth.boxes[index[positive]], anchors[positive])


def region_loss(scores: Tensor, offsets: Tensor, anchors: Tensor, truth: detection.Truth) -> Tensor:
    """Compute the first stage's loss of one image: cross-entropy of the labels, smooth L1 of the objects' offsets."""
    with detection.no_autocast_no_grad(scores.device):
        sampled, labels, positive, target_offsets = anchor_targets(anchors, truth)
    offset_loss = nn.functional.smooth_l1_loss(offsets[positive].float(), target_offsets, reduction="sum", beta=1 / 9)
    return nn.functional.cross_entropy(scores[sampled].float(), labels) + offset_loss / len(sampled)


def region_targets(boxes: Tensor, truth: detection.Truth) -> tuple[Tensor, Tensor, Tensor]:
    """Sample regions of an image for the loss of the second stage.

    Return the regions, the target class of each (0 for background, else 1 + the class index), and its target box.
    """
    boxes = torch.cat([boxes, truth.boxes])  # the true ones too, since few objects are proposed at first
    overlap, index = detection.box_iou(boxes, truth.boxes).max(1)
    labels = torch.where(overlap >= 0.5, truth.classes[index] + 1, 0)
    sampled = sample_balanced(labels, REGIONS_SAMPLED, 0.25)
    return boxes[sampled], labels[sampled], truth.boxes[index[sampled]]


class Proposed(NamedTuple):
    """The output of the first stage: the feature map of the images, and scores and offsets of the anchors on it."""

    features: Tensor
    scores: Tensor
    offsets: Tensor
    anchors: Tensor


def propose(network: Any, images: Tensor) -> Proposed:
    """Run the first stage."""
    features = network.features(images)
    with detection.no_autocast_no_grad(features.device):
        anchors = region_anchors(network.shape, *features.shape[-2:]).to(features.device)
    scores, offsets = network.propose(features)
    return Proposed(features, scores, offsets, anchors)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the losses of both stages, averaged over the images with objects."""
    return both_losses(model, propose(model, batch["images"]), batch)


def both_losses(network: Any, first: Proposed, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss of the first stage plus that of the second, which runs on the first one's proposals.

    It is 0 for a batch without objects.
    """
    features, scores, offsets, anchors = first
    with detection.no_autocast_no_grad(features.device):
        truths = detection.truths_of(batch)
        images = [image for image, truth in enumerate(truths) if len(truth.boxes)]
    if not images:
        zero: Tensor = 0.0 * scores.float().sum()
        return zero
    region_losses = [region_loss(scores[image], offsets[image], anchors, truths[image]) for image in images]
    with detection.no_autocast_no_grad(features.device):
        proposed = proposals(scores[images], offsets[images], anchors, 2 * REGIONS_SAMPLED)
        regions = [region_targets(boxes, truths[image]) for boxes, image in zip(proposed, images, strict=True)]
    class_scores, class_offsets = network.judge(features[images], [boxes for boxes, _, _ in regions])
    total: Tensor = torch.stack(region_losses).mean() + class_loss(class_scores, class_offsets, regions)
    return total


def class_loss(scores: Tensor, offsets: Tensor, regions: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Compute the second stage's loss: cross-entropy of the classes, smooth L1 of the offsets of the true classes."""
    with detection.no_autocast_no_grad(scores.device):
        boxes, labels, target_boxes = (torch.cat(parts) for parts in zip(*regions, strict=True))
        positive = torch.nonzero(labels)[:, 0]
        target_offsets = detection.encode_boxes(target_boxes[positive], boxes[positive], VARIANCES)
    class_offsets = offsets.float()[positive, labels[positive]]
    offset_loss = nn.functional.smooth_l1_loss(class_offsets, target_offsets, reduction="sum")
    return nn.functional.cross_entropy(scores.float(), labels) + offset_loss / len(labels)


# -- evaluation -------------------------------------------------------------------------------------------------------
def detections(network: Any, first: Proposed) -> list[detection.Detections]:
    """Return the detections of each image: boxes with a probability above 5 %, after suppression at 0.3."""
    with detection.no_autocast_no_grad(first.features.device):
        regions = proposals(first.scores, first.offsets, first.anchors, PROPOSED)
    scores, offsets = network.judge(first.features, regions)
    with detection.no_autocast_no_grad(scores.device):
        probabilities = scores.float().softmax(-1)[:, 1:]
        boxes = detection.decode_boxes(offsets[:, 1:].float(), torch.cat(regions)[:, None], VARIANCES).clamp(0, 1)
        counts = [len(part) for part in regions]
        pairs = zip(torch.split(boxes, counts), torch.split(probabilities, counts), strict=True)
        return [detection.select_detections(*pair, iou_threshold=0.3, max_count=PROPOSED) for pair in pairs]


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``mAP``, as in Pascal VOC 2007 (0 to 1), and ``loss``, whose regions are sampled as in training."""
    network: Any = model

    def detect(batch: dict[str, Tensor]) -> tuple[Tensor, list[detection.Detections]]:
        first = propose(network, batch["images"])
        return both_losses(network, first, batch), detections(network, first)

    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same regions at every evaluation
        return detection.evaluate_detector(batches, detect, network.shape.classes)


FASTER_RCNN = detector(
    name="faster-rcnn",
    summary="Faster R-CNN on VGG-16: finds things in two steps",
    source="Ren et al. 2015, arXiv 1506.01497; Micikevicius et al. 2018, arXiv 1710.03740, table 2",
    sizes={
        "cpu": Size(12, 8, 1e-3, 2_070_735, {"shape": SMALL, "side": 96, "images": (400, 80)}),
        "full": Size(30, 2, 1e-4, 137_078_239, {"shape": VGG_16, "side": 600, "images": (200, 40)}),
    },
    load=partial(detection.load, "shape"),
    make_model=built(FasterRCNN, "shape"),
    loss=loss,
    evaluate=evaluate,
)
