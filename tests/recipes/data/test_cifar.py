"""CIFAR-10 is read in each published layout; missing, damaged or dangerous files raise clear errors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes.data.cifar import read_cifar10

RANDOM = np.random.default_rng(0)
PARTS = {
    name: (RANDOM.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8), RANDOM.integers(0, 10, 6))
    for name in ("data_batch_1", "data_batch_2", "test_batch")
}


def write_pickles(folder: Path, protocol: int = 2) -> None:
    folder.mkdir(parents=True)
    for name, (images, labels) in PARTS.items():
        values = np.asfortranarray(images.reshape(6, -1)) if name == "data_batch_2" else images.reshape(6, -1)
        content = {"batch_label": b"some", "labels": labels.tolist(), "data": values, "filenames": ["a.png"] * 6}
        (folder / name).write_bytes(pickle.dumps(content, protocol))


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, (images, labels) in PARTS.items():
        rows = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(6, -1)], 1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())


def write_npz(folder: Path, last: bool = True, columns: bool = False) -> None:
    folder.mkdir(parents=True)
    images = {name: part[0].transpose(0, 2, 3, 1) if last else part[0] for name, part in PARTS.items()}
    shape = (-1, 1) if columns else -1
    np.savez(
        folder / "my_cifar10.npz",
        x_train=np.concatenate([images["data_batch_1"], images["data_batch_2"]]),
        y_train=np.concatenate([PARTS["data_batch_1"][1], PARTS["data_batch_2"][1]]).reshape(shape),
        x_test=images["test_batch"],
        y_test=PARTS["test_batch"][1].reshape(shape),
    )


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "python batches": write_pickles,
    "python batches in protocol 0": lambda folder: write_pickles(folder, 0),
    "binary batches": write_binary,
    "npz with channels last": write_npz,
    "npz with labels in a column": lambda folder: write_npz(folder, columns=True),
    "npz with channels first": lambda folder: write_npz(folder, last=False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_images(layout: str, tmp_path: Path) -> None:
    LAYOUTS[layout](tmp_path / "cifar-10-batches-py")
    found = read_cifar10(tmp_path)
    images = np.concatenate([PARTS["data_batch_1"][0], PARTS["data_batch_2"][0]])
    assert torch.equal(found.images, torch.from_numpy(images))
    assert torch.equal(found.held_images, torch.from_numpy(PARTS["test_batch"][0]))
    assert found.held_labels.tolist() == PARTS["test_batch"][1].tolist()
    assert found.description == f"CIFAR-10 from {tmp_path / 'cifar-10-batches-py'}, 12 to train on and 6 held back"


def test_a_missing_set_says_what_was_looked_for_what_is_there_and_where_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InvalidInput) as caught:
        read_cifar10(tmp_path)
    assert str(caught.value) == (
        f"CIFAR-10: looked for data_batch_1 or data_batch_1.bin or *cifar10*.npz in {tmp_path}; it holds notes.txt. "
        "Get it from https://www.cs.toronto.edu/~kriz/cifar.html"
    )
    with pytest.raises(InvalidInput, match=r"nowhere; it is not there\. Get it from https"):
        read_cifar10(tmp_path / "nowhere")


class Dangerous:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run_it(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Dangerous(tmp_path / "run"), "labels": [1]}))
    with pytest.raises(
        InvalidInput, match=r"data_batch_1 is not a batch of CIFAR-10: .*it asks for .*, which no batch"
    ):
        read_cifar10(tmp_path)
    assert not (tmp_path / "run").exists()


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "cut binary": ("data_batch_1.bin", b"\x00" * 3000, "has 3,000 bytes, which is not a multiple of 3,073"),
    "label 10": ("data_batch_1.bin", b"\x0a" * 3073, "has labels that are not 0 to 9"),
    "cut pickle": ("data_batch_1", pickle.dumps({"data": 1})[:-3], "is not a batch of CIFAR-10"),
    "numbers": ("data_batch_1", pickle.dumps({"data": 1, "labels": [1]}), "its data is not an array"),
    "floats": (
        "data_batch_1",
        pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, 2),
        "an array that is not of bytes",
    ),
    "no zip": ("cifar10.npz", b"PK\x03\x04 but no more", "is not an .npz file"),
    "bad gzip": ("cifar10.npz.gz", b"\x1f\x8b\x08\x00 but no more", "cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong_with_it(case: str, tmp_path: Path) -> None:
    name, content, text = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"CIFAR-10: .*{name} .*{text}.* Get it again from https"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        (np.zeros((2, 32, 32, 3), np.uint8), [0, 9], None),
        (np.zeros((2, 32, 32, 3), np.uint8), [0, 10], "has labels that are not 0 to 9"),
        (np.zeros((2, 32, 32, 3), np.uint8), [-1, 9], "has labels that are not 0 to 9"),
        (np.zeros((2, 32, 32, 3), np.uint8), [0.0, 9.0], "has labels that are not 0 to 9"),
        (np.zeros((2, 32, 32, 3)), [0, 9], "has float64 images of shape (2, 3, 32, 32) for 2 labels"),
        (np.zeros((1, 3, 32, 32), np.uint8), [0, 9], "has uint8 images of shape (1, 3, 32, 32) for 2 labels"),
        (np.zeros((0, 3, 32, 32), np.uint8), [], "has uint8 images of shape (0, 3, 32, 32) for 0 labels"),
        (np.array([{}, {}]), [0, 9], "is not an .npz file: Object arrays cannot be loaded"),
    ],
)
def test_images_are_bytes_and_labels_0_to_9(images: Any, labels: Any, text: str | None, tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    if text is None:
        assert read_cifar10(tmp_path).held_labels.tolist() == labels
        return
    with pytest.raises(InvalidInput, match=rf"cifar10\.npz {re.escape(text)}"):
        read_cifar10(tmp_path)


def test_an_npz_without_its_arrays_lists_what_it_holds(tmp_path: Path) -> None:
    np.savez(tmp_path / "cifar10.npz", x_train=np.zeros(1), other=np.zeros(1))
    with pytest.raises(InvalidInput, match="has no y_train, x_test, y_test; it holds x_train, other"):
        read_cifar10(tmp_path)
