"""Boxes and Pascal VOC's metric, images with boxes in its layout or drawn, and the evaluation of a detector.

A box is left, top, right, bottom, in any unit; a tensor of boxes is float [N, 4]. torchvision.ops has `box_iou`, `nms`
and `batched_nms` too; each of its releases requires one release of torch, so lowp does not depend on it.
"""

import io
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.recipes.data.files import Published
from lowp.recipes.data.images import mirrored, open_picture, picture_tensor
from lowp.recipes.data.shapes import draw_scene, in_words
from lowp.recipes.recipe import Data, Size


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
    nearest = [_nearest(found.boxes, truth.boxes) for found, truth in zip(detections, truths, strict=True)]
    matched: set[tuple[int, int]] = set()
    is_true: list[bool] = []
    for _, image, detection in ranked:
        overlap, index = nearest[image][detection]
        if overlap >= 0.5 and bool(truths[image].difficult[index]):
            continue
        is_true.append(overlap >= 0.5 and (image, index) not in matched)
        if overlap >= 0.5:
            matched.add((image, index))
    true_positives = np.cumsum(is_true)
    recall, precision = true_positives / count, true_positives / np.arange(1, len(is_true) + 1)
    highest = [float(precision[recall >= at / 10 - 1e-9].max(initial=0.0)) for at in range(11)]
    return sum(highest) / len(highest)


def _nearest(boxes: Tensor, truths: Tensor) -> list[tuple[float, int]]:
    """Return, for each box, its largest overlap with a true box and the index of that; (0, -1) without true boxes."""
    if not len(truths):
        return [(0.0, -1)] * len(boxes)
    overlap, index = box_iou(boxes, truths).max(1)
    return list(zip(overlap.tolist(), index.tolist(), strict=True))


VOC = Published("Pascal VOC", "http://host.robots.ox.ac.uk/pascal/VOC/voc2007 (or BCCD, in the same layout)")
VOC_CLASSES = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor"
).split()

# The mean of ImageNet's training images that the pre-trained VGG-16 subtracts; their standard deviation is about 58.
with real_tensors():
    _MEAN = torch.tensor([123.68, 116.78, 103.94], device="cpu").view(3, 1, 1)
# -- images with boxes -------------------------------------------------------------------------------------------------
_DEVIATION = 58.0
_PADDING = -1  # the class index of padding


class BoxExamples:
    """Images and boxes as batches: dictionaries of tensors, padded to the largest number of boxes of an image.

    ``images``: float [N, 3, side, side], normalised. ``boxes``: float [N, M, 4], as fractions of the side. ``classes``:
    class indices int64 [N, M], -1 for padding. ``difficult``: bool [N, M]. With a generator, images are flipped
    horizontally at random.
    """

    def __init__(self, images: Tensor, truth: Sequence[Truth]) -> None:
        self.images, self.truth = images, list(truth)

    def __len__(self) -> int:
        return len(self.truth)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the images at `indices` and their boxes."""
        truths = [self.truth[index] for index in indices.tolist()]
        max_count = max([1, *(len(truth.classes) for truth in truths)])
        boxes = torch.zeros(len(truths), max_count, 4)
        classes = torch.full((len(truths), max_count), _PADDING)
        difficult = torch.zeros(len(truths), max_count, dtype=torch.bool)
        for row, truth in enumerate(truths):
            count = len(truth.classes)
            boxes[row, :count], classes[row, :count], difficult[row, :count] = truth
        images = (self.images[indices].float() - _MEAN) / _DEVIATION
        if generator is not None:
            images, flip = mirrored(images, generator)
            flipped = torch.stack([1 - boxes[..., 2], boxes[..., 1], 1 - boxes[..., 0], boxes[..., 3]], -1)
            boxes = torch.where(flip.view(-1, 1, 1), flipped, boxes)
        return {"images": images, "boxes": boxes, "classes": classes, "difficult": difficult}


def truths_of(batch: dict[str, Tensor], scale: float = 1.0) -> list[Truth]:
    """Return the objects in each image of a batch, without padding, their boxes multiplied by `scale`."""
    rows = zip(batch["boxes"] * scale, batch["classes"], batch["difficult"], strict=True)
    return [Truth(*(part[row[1] != _PADDING] for part in row)) for row in rows]


def evaluate_detector(
    batches: Iterable[dict[str, Tensor]],
    detect: Callable[[dict[str, Tensor]], tuple[Tensor, list[Detections]]],
    classes: int,
) -> dict[str, float]:
    """Return ``mAP``, the mean average precision of Pascal VOC 2007 (0 to 1), and the mean ``loss`` of an image.

    `detect` returns the loss of a batch and the detections of each of its images.
    """
    detections: list[Detections] = []
    truths: list[Truth] = []
    loss_sum = 0.0
    for batch in batches:
        loss, detected = detect(batch)
        loss_sum += float(loss) * len(detected)
        detections += detected
        with no_autocast_no_grad(loss.device):
            truths += [Truth(*(part.cpu() for part in truth)) for truth in truths_of(batch)]
    with no_autocast_no_grad(torch.device("cpu")):
        return {"mAP": mean_average_precision(detections, truths, classes), "loss": loss_sum / len(truths)}


def load(network: str, size: Size, path: Path | None) -> Data:
    """Return a data set in Pascal VOC's layout if a path is given, otherwise drawn scenes with ten kinds of figures.

    `network`: the option of the size that has the number of classes.
    """
    side, classes = size.options["side"], size.options[network].classes
    return draw_boxes(side, 10, *size.options["images"]) if path is None else read_voc(path, side, classes)


def draw_boxes(side: int, classes: int, training: int, held: int, seed: int = 0) -> Data:
    """Draw scenes with one to four figures of 20 to 60 % of the side: counts and sizes as in Pascal VOC."""
    parts = []
    for size, is_held in ((training, False), (held, True)):
        random = np.random.default_rng([seed, is_held])
        kinds = min(classes, 10)
        counts = random.choice([1, 2, 3, 4], size, p=[0.4, 0.25, 0.2, 0.15])
        scenes = [draw_scene(random, side, (0.2, 0.6), int(count), kinds, is_held, True) for count in counts]
        truths = [
            Truth(
                torch.from_numpy(scene.boxes) / side,
                torch.from_numpy(scene.kinds),
                torch.zeros(len(scene.kinds), dtype=torch.bool),
            )
            for scene in scenes
        ]
        parts.append(BoxExamples(torch.from_numpy(np.stack([scene.image for scene in scenes])), truths))
    return Data(parts[0], parts[1], in_words(training, held))


# -- Pascal VOC -------------------------------------------------------------------------------------------------------
def read_voc(path: Path, side: int, classes: int) -> Data:
    """Read the image sets trainval (or train) and test (or val) of a folder in VOC's layout, or of a zip file of one.

    Images are resized to `side` x `side`. The class indices are those of VOC's twenty classes if the labels are among
    these and `classes` is at least 20, otherwise those of the sorted labels. Raises InvalidInput for missing or damaged
    files, and for more than `classes` labels.
    """
    files = _Files(path)
    names = [files.image_set(sets) for sets in (("trainval", "train"), ("test", "val"))]
    objects = {name: files.objects(name) for part in names for name in part}
    present = sorted({label for rows in objects.values() for label, _, _ in rows})
    labels = VOC_CLASSES if set(present) <= set(VOC_CLASSES) and classes >= len(VOC_CLASSES) else present
    if not 0 < len(present) <= classes:
        raise VOC.broken(path, f"has {len(present)} classes, but this size of the network has {classes}")
    parts = []
    for part in names:
        images = torch.stack([picture_tensor(files.picture(name).resize((side, side))) for name in part])
        parts.append(BoxExamples(images, [_truth(objects[name], labels) for name in part]))
    counts = f"{len(parts[0]):,} pictures to train on and {len(parts[1]):,} held back"
    return Data(parts[0], parts[1], f"{len(present)} classes from {path}, {counts}")


Object = tuple[str, tuple[float, ...], bool]


def _truth(rows: Sequence[Object], labels: Sequence[str]) -> Truth:
    boxes = torch.tensor([box for _, box, _ in rows], dtype=torch.float32).view(-1, 4)
    return Truth(
        boxes,
        torch.tensor([labels.index(label) for label, _, _ in rows], dtype=torch.int64),
        torch.tensor([difficult for _, _, difficult in rows], dtype=torch.bool),
    )


class _Files:
    """The files under ImageSets/Main, Annotations and JPEGImages, in a folder or in a zip file, at any depth."""

    def __init__(self, path: Path) -> None:
        self.path = path
        packed = path if path.is_file() else None
        if packed is None and VOC.find_or_none(path, ["ImageSets"]) is None:
            packed = VOC.find(path, ["ImageSets", "*VOC*.zip", "*voc*.zip"])
        if packed is None:
            self.root: Path | zipfile.Path = VOC.find(path, ["ImageSets"]).parent
            return
        self.path = packed
        try:
            archive = zipfile.ZipFile(packed)
        except (zipfile.BadZipFile, OSError) as error:
            raise VOC.broken(packed, f"is not a zip file: {error}") from None
        inside = [name for name in archive.namelist() if "ImageSets/Main/" in name]
        if not inside:
            raise VOC.missing(packed, ["ImageSets/Main"])
        self.root = zipfile.Path(archive, inside[0].partition("ImageSets/Main/")[0])

    def read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except (OSError, KeyError, zipfile.BadZipFile):
            raise VOC.missing(self.path, [name]) from None

    def image_set(self, sets: Sequence[str]) -> list[str]:
        """Return the image names of the first of these sets that exists."""
        for image_set in sets:
            name = f"ImageSets/Main/{image_set}.txt"
            if (self.root / name).exists():
                lines = self.read(name).decode("utf-8", "replace").splitlines()
                images = [line.split()[0] for line in lines if line.strip()]
                if not images:
                    raise VOC.broken(self.path, f"has no pictures in {name}")
                return images
        raise VOC.missing(self.path, [f"ImageSets/Main/{image_set}.txt" for image_set in sets])

    def objects(self, name: str) -> list[Object]:
        """Return the label, the box as fractions of the image's sides, and the difficult mark of each object."""
        try:
            tree = ElementTree.fromstring(self.read(f"Annotations/{name}.xml"))
            width, height = (float(tree.findtext(f"size/{side}") or "") for side in ("width", "height"))
            return [_object(node, width, height) for node in tree.iter("object")]
        except (ElementTree.ParseError, ValueError, ZeroDivisionError) as error:
            raise VOC.broken(self.path, f"has an annotation of {name} that cannot be read: {error}") from None

    def picture(self, name: str) -> Any:
        return open_picture(VOC, io.BytesIO(self.read(f"JPEGImages/{name}.jpg")), f"{self.path}: {name}.jpg")


def _object(node: ElementTree.Element, width: float, height: float) -> Object:
    """Return the object of an annotation node.

    VOC counts pixels from 1 and includes the right and bottom edges, so only left and top are reduced by 1.
    """
    edges = [float(node.findtext(f"bndbox/{edge}") or "") for edge in ("xmin", "ymin", "xmax", "ymax")]
    sizes = (width, height, width, height)
    fractions = [(edge - (index < 2)) / size for index, (edge, size) in enumerate(zip(edges, sizes, strict=True))]
    box = tuple(min(max(fraction, 0.0), 1.0) for fraction in fractions)
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError(f"an empty box {edges}")
    return node.findtext("name") or "", box, (node.findtext("difficult") or "0").strip() == "1"
