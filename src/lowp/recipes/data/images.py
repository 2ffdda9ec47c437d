"""Labelled images, stored as uint8, and normalised and augmented when a batch is requested."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.recipes.recipe import Data


class LabelledImages(NamedTuple):
    """A classification set: uint8 images [N, channels, height, width] and int64 labels [N], training and validation.

    `description` states its content and source.
    """

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor
    classes: tuple[str, ...]
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
            images = _shifted(_mirrored(images, generator), self.padding, generator)
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


def _mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    flip = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)


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
