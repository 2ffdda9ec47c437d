"""UNet: classifies every pixel of an image into nine classes.

The convolutions and the transposed convolutions run in low precision; batch normalisation and the cross-entropy over
all pixels are fp32. Most of its memory is that of activations, which 16 bits halve: the published measurement on a T4
has 4.26 GB in fp32 and 2.67 GB in mixed precision.

Without padding every convolution shrinks the feature map, and skip connections are cropped to its size: Ronneberger,
Fischer, Brox, "U-Net", 2015, arXiv 1505.04597, figure 1, with four of the five levels, and batch normalisation after
each ReLU. The output for an image of 256x256 are scores of its central 164x164 pixels.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lowp.recipes.classification import loss
from lowp.recipes.data.files import Published
from lowp.recipes.data.images import SUFFIXES, mirrored, open_picture, picture_tensor
from lowp.recipes.data.shapes import draw_scene, in_words
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adam, built, constant

CLASSES = 9


# -- the network -------------------------------------------------------------------------------------------------------
class UNet(nn.Module):
    """UNet: from float images [N, 3, side, side] to scores [N, classes, smaller side, smaller side].

    `widths`: channels of each level; with (64, 128, 256, 512) and 9 classes it has 7,703,497 parameters.
    """

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512), classes: int = CLASSES) -> None:
        super().__init__()
        channels = [3, *widths]
        self.down = nn.ModuleList(_two_convolutions(*pair) for pair in itertools.pairwise(channels))
        self.shrink = nn.MaxPool2d(2)
        upward = list(itertools.pairwise(reversed(widths)))
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(deep, high, 2, stride=2) for deep, high in upward)
        self.up = nn.ModuleList(_two_convolutions(2 * high, high) for _, high in upward)
        self.classify = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the images' central pixels."""
        x, skipped = images, []
        for level, convolutions in enumerate(self.down):
            x = convolutions(x if level == 0 else self.shrink(x))
            skipped.append(x)
        for enlarge, convolutions, skip in zip(self.enlarge, self.up, skipped[-2::-1], strict=True):
            x = enlarge(x)
            x = convolutions(torch.cat([_centre_crop(skip, x.shape[-1]), x], dim=1))
        scores: Tensor = self.classify(x)
        return scores


def _two_convolutions(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3),
        nn.ReLU(),
        nn.BatchNorm2d(out_channels),
        nn.Conv2d(out_channels, out_channels, 3),
        nn.ReLU(),
        nn.BatchNorm2d(out_channels),
    )


def _centre_crop(x: Tensor, side: int) -> Tensor:
    start = (x.shape[-1] - side) // 2
    return x[:, :, start : start + side, start : start + side]


# -- data --------------------------------------------------------------------------------------------------------------
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
            images, flip = mirrored(images, generator)
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
    stacked = np.stack(masks)
    values, ranks = np.unique(stacked, return_inverse=True)
    if len(values) > classes:
        raise MASKED.broken(
            mask_folder, f"has {len(values)} values in its masks, but the network has {classes} classes"
        )
    class_indices = torch.from_numpy(ranks.reshape(stacked.shape).astype(np.uint8))
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
    values = np.array(open_picture(MASKED, path, is_coloured=False))
    if values.ndim != 2:
        raise MASKED.broken(path, f"has {values.shape[-1]} values a pixel, but a mask has one, the class")
    rows, columns = (((np.arange(side) + 0.5) * length / side).astype(int) for length in values.shape)
    picked: npt.NDArray[Any] = values[rows[:, None], columns[None, :]]
    return picked


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return the user's images and masks if a path is given, otherwise drawn ones.

    Images are padded by the border that the unpadded convolutions remove.
    """
    side, border = size.options["side"], size.options["border"]
    if path is not None:
        return read_masked(path, side, border, CLASSES)
    return drawn_masks(side, border, CLASSES, *size.options["images"])


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``accuracy``, the share of correct pixels, ``mean_overlap``, the mean IoU of the classes, and ``loss``.

    A class that is neither in the masks nor predicted is left out of the mean.
    """
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    loss_sum, count = 0.0, 0
    for images, masks in batches:
        scores = model(images).float()
        loss_sum += float(nn.functional.cross_entropy(scores, masks)) * len(images)
        count += len(images)
        pairs = masks.flatten() * CLASSES + scores.argmax(1).flatten()
        confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES).cpu()
    correct = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - correct
    iou = correct[union > 0] / union[union > 0]
    return {
        "accuracy": float(correct.sum() / confusion.sum()),
        "mean_overlap": float(iou.mean()),
        "loss": loss_sum / count,
    }


UNET = Recipe(
    name="unet",
    summary="UNet: a class for every pixel of a picture",
    source="Ronneberger, Fischer, Brox 2015, arXiv 1505.04597; sizes as in A. Bilogur's guide to mixed precision, 2020",
    data="generated: eight figures drawn on scikit-learn's photographs; --data DIR: images/ and masks/",
    sizes={
        "cpu": Size(6, 4, 5e-3, 121_601, {"widths": (8, 16, 32, 64), "side": 68, "border": 46, "images": (300, 50)}),
        "full": Size(
            50, 8, 1e-3, 7_703_497, {"widths": (64, 128, 256, 512), "side": 164, "border": 46, "images": (200, 50)}
        ),
    },
    classes=1,
    metric=Metric("mean_overlap"),
    load=load,
    make_model=built(UNet, "widths"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=constant,
    unit="images",
)
