"""Labelled images: stored as uint8 and augmented when a batch is requested, or read from a folder per class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.errors import InvalidInput
from lowp.recipes.data.files import Published, optional
from lowp.recipes.recipe import Data


class LabelledImages(NamedTuple):
    """A classification set: uint8 images [N, channels, height, width] and int64 labels [N], training and validation.

    `description` states its content and source.
    """

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor
    description: str


class ImageExamples:
    """Images and labels as batches ``(float32 images, labels)``, normalised per channel: (x - mean) / deviation.

    With a generator and a `padding`, images are flipped horizontally at random, padded by zeros on each side, and
    randomly cropped to their size (He et al. 2016, arXiv 1512.03385, section 4.2).
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor, padding: int = 0) -> None:
        self.images, self.labels = images, labels
        self.mean, self.deviation = mean.view(-1, 1, 1), deviation.view(-1, 1, 1)
        self.padding = padding

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at `indices` and their labels."""
        images = (self.images[indices].float() - self.mean) / self.deviation
        if generator is not None and self.padding:
            images = _shifted(mirrored(images, generator)[0], self.padding, generator)
        return images, self.labels[indices]


def image_data(source: LabelledImages, padding: int = 0) -> Data:
    """Return the set as examples, normalised with the statistics of its training images; only these are augmented."""
    deviation, mean = torch.std_mean(source.images.float(), dim=(0, 2, 3))
    deviation = deviation.clamp(min=1.0)  # for constant channels
    return Data(
        ImageExamples(source.images, source.labels, mean, deviation, padding),
        ImageExamples(source.held_images, source.held_labels, mean, deviation),
        source.description,
    )


def mirrored(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the images [N, channels, H, W], each flipped horizontally or not, and bool [N], true where it is."""
    flip = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images), flip


def _shifted(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Return a random crop of each image after padding, of the image's own size."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [padding] * 4)
    tops, lefts = torch.randint(2 * padding + 1, (2, count), generator=generator)
    rows = (tops.view(-1, 1) + torch.arange(height)).view(count, 1, height, 1)
    columns = (lefts.view(-1, 1) + torch.arange(width)).view(count, 1, 1, width)
    index = torch.arange(count).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1]).view(1, -1, 1, 1)
    return padded[index, channels, rows, columns]


IMAGENET = Published("images in a folder a class (ImageNet)", "https://www.image-net.org/download.php")
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

# The usual means and standard deviations of ImageNet's training images, multiplied by 255.
with real_tensors():
    _MEAN = torch.tensor([123.675, 116.28, 103.53], device="cpu").view(3, 1, 1)
    _DEVIATION = torch.tensor([58.395, 57.12, 57.375], device="cpu").view(3, 1, 1)


# -- one folder per class ----------------------------------------------------------------------------------------------
class FolderExamples:
    """Image files as batches ``(normalised images float32 [N, 3, side, side], labels int64 [N])``.

    The shorter side of an image is resized to 8/7 of `side`, and the centre is cropped. With a generator, the crop is
    random and images are flipped horizontally at random (Krizhevsky et al. 2012, section 4.1).
    """

    def __init__(self, files: Sequence[tuple[Path, int]], side: int) -> None:
        self.files, self.side = list(files), side

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the images at `indices`."""
        files = [self.files[index] for index in indices.tolist()]
        images = torch.stack([self._read(path, generator) for path, _ in files])
        return (images.float() - _MEAN) / _DEVIATION, torch.tensor([label for _, label in files])

    def _read(self, path: Path, generator: torch.Generator | None) -> Tensor:
        picture = open_picture(IMAGENET, path)
        factor = self.side * 8 / 7 / min(picture.size)
        pixels = picture_tensor(picture.resize([max(self.side, round(length * factor)) for length in picture.size]))
        spare = [length - self.side for length in pixels.shape[1:]]
        if generator is None:
            top, left = (room // 2 for room in spare)
        else:
            top, left = (int(torch.randint(room + 1, (), generator=generator)) for room in spare)
            if torch.rand((), generator=generator) < 0.5:
                pixels = pixels.flip(2)
        return pixels[:, top : top + self.side, left : left + self.side]


def open_picture(published: Published, source: Path | Any, name: object = None, is_coloured: bool = True) -> Any:
    """Return an image file or stream as a PIL image, in RGB unless it stays as it is; InvalidInput if it is damaged.

    `name` replaces the path in the error message. Raises Unavailable without Pillow.
    """
    with optional("pictures are read by Pillow"):
        from PIL import Image
    try:
        with Image.open(source) as picture:
            return picture.convert("RGB") if is_coloured else picture.copy()
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        path = Path(str(source if name is None else name))
        raise published.broken(path, f"cannot be read as a picture: {error}") from None


def picture_tensor(picture: Any) -> Tensor:
    """Return a PIL image in RGB as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read_folders(path: Path, side: int, classes: int) -> Data:
    """Read the images under train/CLASS/ and val/CLASS/ of a folder.

    Class indices follow the sorted folder names. Raises InvalidInput without images, and for more than `classes`
    folders.
    """
    training, held = (IMAGENET.find(path, [name]) for name in ("train", "val"))
    names = sorted(folder.name for folder in training.iterdir() if folder.is_dir())
    if not 0 < len(names) <= classes:
        raise InvalidInput(
            f"{training} has {len(names)} classes (folders): this size of the network takes 1 to {classes}"
        )
    parts = [_files(folder, names) for folder in (training, held)]
    description = f"{len(names)} classes from {path}, {len(parts[0]):,} to train on and {len(parts[1]):,} held back"
    return Data(FolderExamples(parts[0], side), FolderExamples(parts[1], side), description)


def _files(folder: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    files = [
        (file, label)
        for label, name in enumerate(names)
        for file in sorted((folder / name).glob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise IMAGENET.missing(folder, [f"CLASS/*{suffix}" for suffix in SUFFIXES])
    return files
