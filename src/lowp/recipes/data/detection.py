"""Pictures with boxes: Pascal VOC's layout, unpacked or in a zip file, or drawn scenes; and how well they are found."""

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
from lowp.recipes.data.boxes import Detections, Truth, mean_average_precision, outside
from lowp.recipes.data.files import Published
from lowp.recipes.data.folders import open_picture, picture_tensor
from lowp.recipes.data.shapes import draw_scene, in_words
from lowp.recipes.recipe import Data

__all__ = ["VOC_CLASSES", "BoxExamples", "boxes_from", "drawn_boxes", "measured", "read_voc", "truths"]

VOC = Published("Pascal VOC", "http://host.robots.ox.ac.uk/pascal/VOC/voc2007 (or BCCD, in the same layout)")
VOC_CLASSES = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor"
).split()

# Means of ImageNet's training images, as the pre-trained VGG-16 has it; divided by a deviation of about 58.
with real_tensors():
    _MEAN = torch.tensor([123.68, 116.78, 103.94], device="cpu").view(3, 1, 1)
_DEVIATION = 58.0
_EMPTY = -1  # the class of what fills up a row


class BoxExamples:
    """Batches as dictionaries: ``images`` float [N, 3, side, side], ``boxes`` [N, M, 4] as shares of the side.

    ``classes`` int64 [N, M] from 0, -1 where an image has fewer boxes than others; ``difficult`` bool [N, M].
    Mirrored by chance where there is a generator.
    """

    def __init__(self, images: Tensor, truth: Sequence[Truth]) -> None:
        self.images, self.truth = images, list(truth)

    def __len__(self) -> int:
        return len(self.truth)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The pictures at `indices` and their boxes."""
        chosen = [self.truth[place] for place in indices.tolist()]
        most = max([1, *(len(one.classes) for one in chosen)])
        boxes = torch.zeros(len(chosen), most, 4)
        classes = torch.full((len(chosen), most), _EMPTY)
        difficult = torch.zeros(len(chosen), most, dtype=torch.bool)
        for row, one in enumerate(chosen):
            count = len(one.classes)
            boxes[row, :count], classes[row, :count], difficult[row, :count] = one
        images = (self.images[indices].float() - _MEAN) / _DEVIATION
        if generator is not None:
            flip = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
            mirrored = torch.stack([1 - boxes[..., 2], boxes[..., 1], 1 - boxes[..., 0], boxes[..., 3]], -1)
            boxes = torch.where(flip.view(-1, 1, 1), mirrored, boxes)
        return {"images": images, "boxes": boxes, "classes": classes, "difficult": difficult}


def truths(batch: dict[str, Tensor], scale: float = 1.0) -> list[Truth]:
    """What each image of a batch shows, without what fills rows up, its boxes times `scale`."""
    rows = zip(batch["boxes"] * scale, batch["classes"], batch["difficult"], strict=True)
    return [Truth(*(part[row[1] != _EMPTY] for part in row)) for row in rows]


def measured(
    batches: Iterable[dict[str, Tensor]],
    detect: Callable[[dict[str, Tensor]], tuple[Tensor, list[Detections]]],
    classes: int,
) -> dict[str, float]:
    """``mAP`` as in Pascal VOC 2007, 0 to 1, and the mean ``loss``; `detect` gives a batch's loss and what it finds."""
    found: list[Detections] = []
    there: list[Truth] = []
    summed = 0.0
    for batch in batches:
        loss, found_here = detect(batch)
        summed += float(loss) * len(found_here)
        found += found_here
        with outside(loss.device):
            there += [Truth(*(part.cpu() for part in truth)) for truth in truths(batch)]
    with outside(torch.device("cpu")):
        return {"mAP": mean_average_precision(found, there, classes), "loss": summed / len(there)}


def boxes_from(path: Path | None, side: int, classes: int, drawn: tuple[int, int]) -> Data:
    """Pascal VOC (or another set in its layout) where a path is given, else drawn scenes of ten kinds.

    `drawn` are how many of these to train on and to hold back.
    """
    return drawn_boxes(side, 10, *drawn) if path is None else read_voc(path, side, classes)


def drawn_boxes(side: int, classes: int, training: int, held: int, seed: int = 0) -> Data:
    """Scenes with one to four figures of 20 to 60 % of the side, the numbers and sizes usual in Pascal VOC."""
    parts = []
    for number, is_held in ((training, False), (held, True)):
        random = np.random.default_rng([seed, is_held])
        kinds = min(classes, 10)
        counts = random.choice([1, 2, 3, 4], number, p=[0.4, 0.25, 0.2, 0.15])
        scenes = [draw_scene(random, side, (0.2, 0.6), int(count), kinds, is_held, True) for count in counts]
        truth = [
            Truth(
                torch.from_numpy(scene.boxes) / side,
                torch.from_numpy(scene.kinds),
                torch.zeros(len(scene.kinds), dtype=torch.bool),
            )
            for scene in scenes
        ]
        parts.append(BoxExamples(torch.from_numpy(np.stack([scene.image for scene in scenes])), truth))
    return Data(parts[0], parts[1], in_words(training, held))


# -- Pascal VOC -------------------------------------------------------------------------------------------------------
def read_voc(path: Path, side: int, classes: int) -> Data:
    """The sets trainval (or train) and test (or val) of a folder in VOC's layout or a zip file of one.

    Pictures are brought to `side` by `side`. The classes are VOC's twenty where these are all there is, else the names
    found, in order. Raises InvalidInput for what is missing or broken, or more than `classes` classes.
    """
    files = _Files(path)
    names = [files.image_set(wanted) for wanted in (("trainval", "train"), ("test", "val"))]
    objects = {name: files.objects(name) for part in names for name in part}
    found = sorted({label for rows in objects.values() for label, _, _ in rows})
    labels = VOC_CLASSES if set(found) <= set(VOC_CLASSES) and classes >= len(VOC_CLASSES) else found
    if not 0 < len(found) <= classes:
        raise VOC.broken(path, f"has {len(found)} classes, but this size of the network has {classes}")
    parts = []
    for part in names:
        images = torch.stack([picture_tensor(files.picture(name).resize((side, side))) for name in part])
        parts.append(BoxExamples(images, [_truth(objects[name], labels) for name in part]))
    words = f"{len(found)} classes from {path}, {len(parts[0]):,} pictures to train on and {len(parts[1]):,} held back"
    return Data(parts[0], parts[1], words)


Object = tuple[str, tuple[float, ...], bool]


def _truth(rows: Sequence[Object], labels: Sequence[str]) -> Truth:
    boxes = torch.tensor([box for _, box, _ in rows], dtype=torch.float32).view(-1, 4)
    return Truth(
        boxes,
        torch.tensor([labels.index(label) for label, _, _ in rows], dtype=torch.int64),
        torch.tensor([difficult for _, _, difficult in rows], dtype=torch.bool),
    )


class _Files:
    """ImageSets/Main, Annotations and JPEGImages, in a folder or in a zip file, at any depth."""

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

    def image_set(self, wanted: Sequence[str]) -> list[str]:
        for which in wanted:
            name = f"ImageSets/Main/{which}.txt"
            there = (self.root / name).exists() if self.zip is None else self.prefix + name in self.zip.namelist()
            if there:
                lines = self.read(name).decode("utf-8", "replace").splitlines()
                found = [line.split()[0] for line in lines if line.strip()]
                if not found:
                    raise VOC.broken(self.path, f"has no pictures in {name}")
                return found
        raise VOC.missing(self.path, [f"ImageSets/Main/{which}.txt" for which in wanted])

    def objects(self, name: str) -> list[Object]:
        """Label, box as shares of the picture, and whether it is marked as difficult."""
        try:
            tree = ElementTree.fromstring(self.read(f"Annotations/{name}.xml"))
            width, height = (float(tree.findtext(f"size/{side}") or "") for side in ("width", "height"))
            return [_object(node, width, height) for node in tree.iter("object")]
        except (ElementTree.ParseError, ValueError, ZeroDivisionError) as error:
            raise VOC.broken(self.path, f"has an annotation of {name} that cannot be read: {error}") from None

    def picture(self, name: str) -> Any:
        return open_picture(VOC, io.BytesIO(self.read(f"JPEGImages/{name}.jpg")), f"{self.path}: {name}.jpg")


def _object(node: ElementTree.Element, width: float, height: float) -> Object:
    """VOC counts pixels from 1, and the right and bottom ones are inside."""
    edges = [float(node.findtext(f"bndbox/{edge}") or "") for edge in ("xmin", "ymin", "xmax", "ymax")]
    sizes = (width, height, width, height)
    shares = [(edge - (place < 2)) / size for place, (edge, size) in enumerate(zip(edges, sizes, strict=True))]
    box = tuple(min(max(share, 0.0), 1.0) for share in shares)
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError(f"an empty box {edges}")
    return node.findtext("name") or "", box, (node.findtext("difficult") or "0").strip() == "1"
