"""Photographs in one folder per class, as unpacked ImageNet: read from disk when a batch is requested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.errors import InvalidInput, Unavailable
from lowp.recipes.data.files import Published
from lowp.recipes.recipe import Data

__all__ = ["FolderExamples", "open_picture", "picture_tensor", "read_folders"]

IMAGENET = Published("images in a folder a class (ImageNet)", "https://www.image-net.org/download.php")
SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")

# Means and deviations of ImageNet's training images, as usual for bytes: 255 times those of 0 to 1.
with real_tensors():
    _MEAN = torch.tensor([123.675, 116.28, 103.53], device="cpu").view(3, 1, 1)
    _DEVIATION = torch.tensor([58.395, 57.12, 57.375], device="cpu").view(3, 1, 1)


class FolderExamples:
    """Batches ``(float32 [N, 3, side, side], labels)`` of the pictures in these files.

    The shorter side becomes 8/7 of `side`; the middle is cut out, or a random place, mirrored by chance, where there
    is a generator (Krizhevsky et al. 2012, section 4.1).
    """

    def __init__(self, files: Sequence[tuple[Path, int]], side: int) -> None:
        self.files, self.side = list(files), side

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read the pictures at `indices`."""
        chosen = [self.files[place] for place in indices.tolist()]
        images = torch.stack([self._read(path, generator) for path, _ in chosen])
        return (images.float() - _MEAN) / _DEVIATION, torch.tensor([label for _, label in chosen])

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


def open_picture(published: Published, source: Path | Any, name: object = None) -> Any:
    """A picture of any kind as a PIL image in RGB, from a file or a stream; raises InvalidInput for a broken one."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise Unavailable("pictures are read by Pillow, which is not installed: pip install 'lowp[recipes]'") from None
    try:
        with Image.open(source) as picture:
            return picture.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        path = Path(str(source if name is None else name))
        raise published.broken(path, f"cannot be read as a picture: {error}") from None


def picture_tensor(picture: Any) -> Tensor:
    """A PIL image in RGB as uint8 [3, height, width]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def read_folders(path: Path, side: int, classes: int) -> Data:
    """Pictures under train/CLASS/ and val/CLASS/ of a folder; raises InvalidInput where there are none.

    The classes are numbered by their names in order; there may be no more of them than the network has scores.
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
