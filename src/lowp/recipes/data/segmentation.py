"""Images with masks of class indices per pixel, from two folders or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowp.recipes.data.files import Published
from lowp.recipes.data.folders import SUFFIXES, open_picture, picture_tensor
from lowp.recipes.data.shapes import draw_scene, in_words
from lowp.recipes.recipe import Data

MASKED = Published(
    "pictures with masks",
    "https://www.kaggle.com/datasets/residentmario/segmented-bob-ross-images, or make two folders of your own: "
    "images/ and masks/, with the same file names; the grey value of a mask's pixel is its class",
)
_IMAGES, _MASKS = ("images", "JPEGImages"), ("masks", "labels", "annotations", "SegmentationClass")
_HELD_SHARE = 0.2


class MaskedExamples:
    """Images and masks as batches ``(float32 [N, 3, side + 2 border, side + 2 border], int64 [N, side, side])``.

    Images have values of -1 to 1, and are padded by reflection on each side, since the network's convolutions have no
    padding. With a generator, images and masks are flipped horizontally at random.
    """

    def __init__(self, images: Tensor, masks: Tensor, border: int) -> None:
        self.images, self.masks, self.border = images, masks, border

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at `indices` and their masks."""
        images, masks = self.images[indices].float() / 127.5 - 1, self.masks[indices].long()
        if generator is not None:
            flip = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
            masks = torch.where(flip.view(-1, 1, 1), masks.flip(2), masks)
        return torch.nn.functional.pad(images, [self.border] * 4, mode="reflect"), masks


def drawn_masks(side: int, border: int, classes: int, training: int, held: int, seed: int = 0) -> Data:
    """Draw crops of photographs with 3 to 6 figures; class 0 is background, the others are kinds of figures."""
    parts = []
    for size, is_held in ((training, False), (held, True)):
        random = np.random.default_rng([seed, is_held])
        scenes = [
            draw_scene(random, side, (0.25, 0.5), int(random.integers(3, 7)), classes - 1, is_held, True)
            for _ in range(size)
        ]
        images = torch.from_numpy(np.stack([scene.image for scene in scenes]))
        outlines = torch.from_numpy(np.stack([scene.outline for scene in scenes]).astype(np.uint8))
        parts.append(MaskedExamples(images, outlines, border))
    return Data(parts[0], parts[1], in_words(training, held))


def read_masked(path: Path, side: int, border: int, classes: int) -> Data:
    """Read the images in images/ and the masks of the same names in masks/ (or labels/ …), resized to `side` pixels.

    Every fifth image is for validation. A class index is the rank of a grey value among those of all masks. Raises
    InvalidInput for more than `classes` grey values, a missing mask, or a damaged file.
    """
    image_folder, mask_folder = MASKED.find(path, _IMAGES), MASKED.find(path, _MASKS)
    files = sorted(file for file in image_folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise MASKED.missing(image_folder, [f"*{suffix}" for suffix in SUFFIXES])
    masks_by_stem = {file.stem: file for file in mask_folder.iterdir()}
    images, masks = [], []
    for file in files:
        if file.stem not in masks_by_stem:
            raise MASKED.missing(mask_folder, [f"{file.stem}.png"])
        images.append(picture_tensor(open_picture(MASKED, file).resize((side, side))))
        masks.append(_mask(masks_by_stem[file.stem], side))
    class_indices = _class_indices(mask_folder, masks, classes)
    held = torch.arange(len(files)) % round(1 / _HELD_SHARE) == 0
    pictures = torch.stack(images)
    description = f"{len(files)} pictures with masks from {path}, {int(held.sum())} of them held back"
    return Data(
        MaskedExamples(pictures[~held], class_indices[~held], border),
        MaskedExamples(pictures[held], class_indices[held], border),
        description,
    )


def _mask(path: Path, side: int) -> npt.NDArray[Any]:
    """Return a mask's grey values or palette indices at `side` x `side` nearest pixels; values are not blended."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            values = np.array(picture)
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise MASKED.broken(path, f"cannot be read as a picture: {error}") from None
    if values.ndim != 2:
        raise MASKED.broken(path, f"has {values.shape[-1]} values a pixel, but a mask has one, the class")
    rows, columns = (((np.arange(side) + 0.5) * length / side).astype(int) for length in values.shape)
    picked: npt.NDArray[Any] = values[rows[:, None], columns[None, :]]
    return picked


def _class_indices(folder: Path, masks: Sequence[npt.NDArray[Any]], classes: int) -> Tensor:
    """Return the rank of each grey value among all of them, uint8 [N, side, side]."""
    stacked = np.stack(masks)
    values, indices = np.unique(stacked, return_inverse=True)
    if len(values) > classes:
        raise MASKED.broken(folder, f"has {len(values)} values in its masks, but the network has {classes} classes")
    return torch.from_numpy(indices.reshape(stacked.shape).astype(np.uint8))
