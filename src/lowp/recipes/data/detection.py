"""Images with boxes, from Pascal VOC's layout (a folder or a zip file) or drawn; and the evaluation of a detector."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.recipes.data.boxes import Detections, Truth, mean_average_precision, no_autocast_no_grad
from lowp.recipes.data.files import Published
from lowp.recipes.data.images import open_picture, picture_tensor
from lowp.recipes.data.shapes import draw_scene, in_words
from lowp.recipes.recipe import Data

VOC = Published("Pascal VOC", "http://host.robots.ox.ac.uk/pascal/VOC/voc2007 (or BCCD, in the same layout)")
VOC_CLASSES = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor"
).split()

# The mean of ImageNet's training images that the pre-trained VGG-16 subtracts; their standard deviation is about 58.
with real_tensors():
    _MEAN = torch.tensor([123.68, 116.78, 103.94], device="cpu").view(3, 1, 1)
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
            flip = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
            mirrored = torch.stack([1 - boxes[..., 2], boxes[..., 1], 1 - boxes[..., 0], boxes[..., 3]], -1)
            boxes = torch.where(flip.view(-1, 1, 1), mirrored, boxes)
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


def boxes_from(path: Path | None, side: int, classes: int, drawn: tuple[int, int]) -> Data:
    """Return a data set in Pascal VOC's layout if a path is given, otherwise drawn scenes with ten kinds of figures.

    `drawn`: the numbers of drawn training and validation scenes.
    """
    return draw_boxes(side, 10, *drawn) if path is None else read_voc(path, side, classes)


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
        self.zip: zipfile.ZipFile | None = None
        if packed is None:
            self.root = VOC.find(path, ["ImageSets"]).parent
            return
        self.path = packed
        try:
            self.zip = zipfile.ZipFile(packed)
        except (zipfile.BadZipFile, OSError) as error:
            raise VOC.broken(packed, f"is not a zip file: {error}") from None
        inside = [name for name in self.zip.namelist() if "ImageSets/Main/" in name]
        if not inside:
            raise VOC.missing(packed, ["ImageSets/Main"])
        self.prefix = inside[0].partition("ImageSets/Main/")[0]

    def read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes() if self.zip is None else self.zip.read(self.prefix + name)
        except (OSError, KeyError, zipfile.BadZipFile):
            raise VOC.missing(self.path, [name]) from None

    def image_set(self, sets: Sequence[str]) -> list[str]:
        """Return the image names of the first of these sets that exists."""
        for image_set in sets:
            name = f"ImageSets/Main/{image_set}.txt"
            exists = (self.root / name).exists() if self.zip is None else self.prefix + name in self.zip.namelist()
            if exists:
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
