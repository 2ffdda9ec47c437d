"""Images with one label each: kept as bytes, standardised and augmented when a batch is requested."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowp.recipes.recipe import Data

__all__ = ["ImageExamples", "LabelledImages", "image_data"]


class LabelledImages(NamedTuple):
    """A classification set: uint8 images [N, channels, height, width], int64 labels [N], to train and to validate on.

    `description` says what it is and where it is from.
    """

    images: Tensor
    labels: Tensor
    held_images: Tensor
    held_labels: Tensor
    classes: tuple[str, ...]
    description: str


class ImageExamples:
    """Images and labels as batches ``(float32 images, labels)``: channels less their mean, by their deviation.

    Given a generator, an image is mirrored by chance and cut from one that is wider by `padding` zeros on each side,
    at a random place (He et al. 2016, arXiv 1512.03385, section 4.2).
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor, padding: int = 0) -> None:
        self.images, self.labels = images, labels
        self.mean, self.deviation = mean.view(-1, 1, 1), deviation.view(-1, 1, 1)
        self.padding = padding

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The images at `indices` and their labels."""
        images = (self.images[indices].float() - self.mean) / self.deviation
        if generator is not None and self.padding:
            images = _shifted(_mirrored(images, generator), self.padding, generator)
        return images, self.labels[indices]


def image_data(source: LabelledImages, padding: int = 0) -> Data:
    """The set as examples, standardised with the statistics of its training images; only these are augmented."""
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
    """Each image cut out of its padded self at a random place."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, [padding] * 4)
    tops, lefts = torch.randint(2 * padding + 1, (2, count), generator=generator)
    rows = (tops.view(-1, 1) + torch.arange(height)).view(count, 1, height, 1)
    columns = (lefts.view(-1, 1) + torch.arange(width)).view(count, 1, 1, width)
    place = torch.arange(count).view(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1]).view(1, -1, 1, 1)
    return padded[place, channels, rows, columns]
