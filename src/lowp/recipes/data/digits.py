"""Handwritten digits: those included in scikit-learn, 1797 images of 8x8, and MNIST from its published idx files."""

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowp.recipes.data.files import Published, optional, read_bytes
from lowp.recipes.data.images import LabelledImages

TRAINING = 1257  # 70 %
HELD_BACK = 540


def read_digits() -> tuple[Tensor, Tensor]:
    """Return grey values 0 to 16, fp32 [1797, 64], and labels int64 [1797], in a fixed random order.

    The first `TRAINING` are the training set. Raises Unavailable without scikit-learn.
    """
    with optional("the digits are embedded in scikit-learn"):
        from sklearn.datasets import load_digits
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order], torch.from_numpy(labels).long()[order]


# -- MNIST -------------------------------------------------------------------------------------------------------------
MNIST = Published("MNIST", "https://yann.lecun.com/exdb/mnist or https://ossci-datasets.s3.amazonaws.com/mnist")
_BYTES = 8


def read_mnist(path: Path) -> LabelledImages:
    """Read MNIST, or another set in its layout such as Fashion-MNIST, from a folder with the four idx files.

    Raises InvalidInput for missing or damaged files.
    """
    parts = []
    for split in ("train", "t10k"):
        images_file, labels_file = (
            MNIST.find(path, [f"{split}-{name}", f"{split}-{name.replace('-idx', '.idx')}"])
            for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        images, labels = read_idx(images_file, 3), read_idx(labels_file, 1)
        if len(images) != len(labels) or not len(labels):
            raise MNIST.broken(labels_file, f"has {len(labels)} labels for {len(images)} images")
        if np.max(labels) > 9:
            raise MNIST.broken(labels_file, "has labels that are not 0 to 9")
        if images.shape[1:] != (28, 28):
            raise MNIST.broken(images_file, f"has images of {images.shape[1]}x{images.shape[2]}, not 28x28")
        parts += [torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64))]
    description = f"MNIST from {path}, {len(parts[1]):,} to train on and {len(parts[3]):,} held back"
    return LabelledImages(parts[0], parts[1], parts[2], parts[3], description)


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the uint8 array in an idx file; raise InvalidInput for another kind of file or a wrong length.

    LeCun, Cortes, Burges, "The MNIST database of handwritten digits": a file has two zero bytes, the element type (8
    for uint8), the number of dimensions, each dimension as a big-endian uint32, and the elements.
    """
    raw = read_bytes(MNIST, path)
    if len(raw) < 4 + 4 * dimensions or raw[:4] != bytes([0, 0, _BYTES, dimensions]):
        expected = bytes([0, 0, _BYTES, dimensions]).hex(" ")
        raise MNIST.broken(
            path, f"begins with {raw[:4].hex(' ') or 'nothing'}, but an idx file of this kind begins with {expected}"
        )
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    content = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if content.size != int(np.prod(shape, dtype=np.int64)):
        raise MNIST.broken(path, f"declares {'x'.join(map(str, shape))} values but has {content.size:,}")
    array: npt.NDArray[np.uint8] = content.reshape(shape).copy()
    return array


def enlarged_digits() -> LabelledImages:
    """Return scikit-learn's 8x8 digits, enlarged to 24x24 with a margin of 2: 1257 for training, 540 for validation."""
    digits, labels = read_digits()
    grey = digits.view(-1, 1, 8, 8) / 16 * 255
    large = torch.nn.functional.interpolate(grey, size=(24, 24), mode="bilinear", align_corners=False)
    images = torch.nn.functional.pad(large, [2] * 4).round().to(torch.uint8)
    description = f"scikit-learn's digits enlarged to 28x28, {TRAINING:,} to train on and {HELD_BACK} held back"
    return LabelledImages(images[:TRAINING], labels[:TRAINING], images[TRAINING:], labels[TRAINING:], description)
