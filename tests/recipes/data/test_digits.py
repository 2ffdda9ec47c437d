"""MNIST's idx files are read, compressed or not, and errors name what is wrong with one."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes.data.digits import enlarged_digits, read_mnist

RANDOM = np.random.default_rng(0)
FILES = {
    "train-images-idx3-ubyte": RANDOM.integers(0, 256, (5, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": RANDOM.integers(0, 10, 5).astype(np.uint8),
    "t10k-images-idx3-ubyte": RANDOM.integers(0, 256, (3, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": RANDOM.integers(0, 10, 3).astype(np.uint8),
}


def idx(array: npt.NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder: Path, packed: bool = False, changed: dict[str, bytes] | None = None) -> None:
    for name, array in FILES.items():
        content = (changed or {}).get(name, idx(array))
        (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_the_four_files_give_images_and_labels(packed: bool, tmp_path: Path) -> None:
    write(tmp_path, packed)
    found = read_mnist(tmp_path)
    assert torch.equal(found.images[:, 0], torch.from_numpy(FILES["train-images-idx3-ubyte"]))
    assert found.held_labels.tolist() == FILES["t10k-labels-idx1-ubyte"].tolist()
    assert found.description == f"MNIST from {tmp_path}, 5 to train on and 3 held back"


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "no idx": ("train-images-idx3-ubyte", b"hello world, no idx at all", "begins with 68 65 6c 6c, but an idx file"),
    "empty": ("train-images-idx3-ubyte", b"", "begins with nothing"),
    "cut": ("t10k-images-idx3-ubyte", idx(FILES["t10k-images-idx3-ubyte"])[:-1], "declares 3x28x28 values but has"),
    "huge": (
        "t10k-labels-idx1-ubyte",
        bytes([0, 0, 8, 1]) + b"\xff" * 4 + b"1",
        "declares 4294967295 values but has 1",
    ),
    "labels": ("t10k-labels-idx1-ubyte", idx(np.array([1, 2], np.uint8)), "has 2 labels for 3 images"),
    "label 10": ("t10k-labels-idx1-ubyte", idx(np.array([1, 2, 10], np.uint8)), "has labels that are not 0 to 9"),
    "no label": ("t10k-labels-idx1-ubyte", idx(np.zeros(0, np.uint8)), "has 0 labels for 3 images"),
    "cut head": (
        "train-images-idx3-ubyte",
        idx(FILES["train-images-idx3-ubyte"])[:15],
        "begins with 00 00 08 03, but an idx file of this kind begins with 00 00 08 03",
    ),
    "other size": ("t10k-images-idx3-ubyte", idx(np.zeros((3, 8, 8), np.uint8)), "has images of 8x8, not 28x28"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong_with_it(case: str, tmp_path: Path) -> None:
    name, content, text = BROKEN[case]
    write(tmp_path, changed={name: content})
    with pytest.raises(InvalidInput, match=rf"MNIST: .*{name} {text}.* Get it again from https"):
        read_mnist(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(InvalidInput, match=r"MNIST: looked for t10k-labels-idx1-ubyte or t10k-labels.idx1-ubyte in"):
        read_mnist(tmp_path)


def test_the_enlarged_digits_have_the_size_of_mnist_and_all_ten_digits() -> None:
    found = enlarged_digits()
    assert found.images.shape == (1257, 1, 28, 28) and found.held_images.shape == (540, 1, 28, 28)
    assert found.images.max() > 240 and not found.images[..., 0].any()
    assert found.held_labels.unique().tolist() == list(range(10))


def test_images_and_labels_of_both_parts_are_those_of_the_files(tmp_path: Path) -> None:
    write(tmp_path)
    found = read_mnist(tmp_path)
    images, labels, held_images, held_labels = (torch.from_numpy(one) for one in FILES.values())
    assert torch.equal(found.images, images[:, None]) and torch.equal(found.held_images, held_images[:, None])
    assert torch.equal(found.labels, labels.long()) and torch.equal(found.held_labels, held_labels.long())
    assert found.description == f"MNIST from {tmp_path}, 5 to train on and 3 held back"
