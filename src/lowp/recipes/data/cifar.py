"""CIFAR-10 from the published python or binary batches, or from one .npz file; no pickled code is executed.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009: 50,000 and 10,000 images of 32x32 in ten
classes; a row of a batch is 1024 red values, 1024 green, 1024 blue, each from the top left row by row.
"""

import io
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lowp.errors import InvalidInput
from lowp.recipes.data.files import Published, read_bytes
from lowp.recipes.data.images import LabelledImages

CIFAR10 = Published("CIFAR-10", "https://www.cs.toronto.edu/~kriz/cifar.html")

_VALUES = 3 * 32 * 32
_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_LOOKED_FOR = ("data_batch_1", "data_batch_1.bin", "*cifar10*.npz")

Bytes = npt.NDArray[np.uint8]
Part = tuple[Bytes, npt.NDArray[np.int64]]  # images [N, 3, 32, 32], labels [N]


def read_cifar10(path: Path) -> LabelledImages:
    """Read CIFAR-10 from a folder with its batches or with a .npz file, or from the .npz file itself.

    Training batches that are missing are skipped. A .npz file has x_train, y_train, x_test and y_test, with uint8
    images [N, 32, 32, 3] or [N, 3, 32, 32]. Raises InvalidInput for missing or damaged files.
    """
    first = CIFAR10.find(path, _LOOKED_FOR)
    name = first.name.removesuffix(".gz")
    if name.endswith(".npz"):
        training, held = _from_npz(first)
    else:
        ending, read = (".bin", _from_binary) if name.endswith(".bin") else ("", _from_pickle)
        files = [CIFAR10.find_or_none(first.parent, [batch + ending]) for batch in _BATCHES]
        training = _joined([read(file) for file in files if file is not None])
        held = read(CIFAR10.find(first.parent, [f"test_batch{ending}"]))
    description = f"CIFAR-10 from {first.parent}, {len(training[1]):,} to train on and {len(held[1]):,} held back"
    images, labels, held_images, held_labels = (torch.from_numpy(part) for part in (*training, *held))
    return LabelledImages(images, labels, held_images, held_labels, description)


def _joined(parts: Sequence[Part]) -> Part:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _from_npz(path: Path) -> tuple[Part, Part]:
    try:
        with np.load(io.BytesIO(read_bytes(CIFAR10, path)), allow_pickle=False) as arrays:
            missing = [name for name in ("x_train", "y_train", "x_test", "y_test") if name not in arrays]
            if missing:
                raise CIFAR10.broken(path, f"has no {', '.join(missing)}; it holds {', '.join(arrays) or 'nothing'}")
            return tuple(_part(path, arrays[f"x_{split}"], arrays[f"y_{split}"]) for split in ("train", "test"))  # type: ignore[return-value]
    except InvalidInput:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError) as error:  # ValueError: an array of objects
        raise CIFAR10.broken(path, f"is not an .npz file: {error}") from None


def _from_binary(path: Path) -> Part:
    """Read rows of one label and 3072 values (the published "binary version")."""
    raw = np.frombuffer(read_bytes(CIFAR10, path), np.uint8)
    if len(raw) % (1 + _VALUES) or not len(raw):
        raise CIFAR10.broken(path, f"has {len(raw):,} bytes, which is not a multiple of {1 + _VALUES:,}")
    rows = raw.reshape(-1, 1 + _VALUES)
    return _part(path, rows[:, 1:], rows[:, 0])


def _from_pickle(path: Path) -> Part:
    """Read a pickled dictionary with the values ``data`` and ``labels``; no other code of the pickle is executed."""
    try:
        content = _ArraysOnly(io.BytesIO(read_bytes(CIFAR10, path)), encoding="latin-1").load()
        values, labels = content["data"], content["labels"]
        pixels = values.values() if isinstance(values, _Array) else None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CIFAR10.broken(path, f"is not a batch of CIFAR-10: {error!r}") from None
    if pixels is None or not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise CIFAR10.broken(
            path, "is not a batch of CIFAR-10: its data is not an array or its labels are not a list of integers"
        )
    return _part(path, pixels, np.asarray(labels))


def _part(path: Path, images: npt.NDArray[Any], labels: npt.NDArray[Any]) -> Part:
    """Return images as [N, 3, 32, 32] and labels, after checking shapes, dtypes and the range of the labels."""
    if images.ndim == 4 and images.shape[-1] == 3:
        images = images.transpose(0, 3, 1, 2)
    labels = labels.ravel()
    if images.dtype != np.uint8 or images.size != len(labels) * _VALUES or not len(labels):
        raise CIFAR10.broken(path, f"has {images.dtype} images of shape {images.shape} for {len(labels)} labels")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 9:
        raise CIFAR10.broken(path, "has labels that are not 0 to 9")
    return np.array(images.reshape(len(labels), 3, 32, 32), order="C"), labels.astype(np.int64)


# -- pickles ----------------------------------------------------------------------------------------------------------
class _ArraysOnly(pickle.Unpickler):
    """An unpickler for dictionaries, lists, numbers, text and arrays of bytes; it refuses all other globals by name.

    NumPy's functions are not called either: stand-ins receive the parts of a pickled array.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name with which NumPy pickles an array; raise UnpicklingError for other names."""
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 needs")
        return _STAND_INS[module, name]


class _ElementType:
    def __init__(self, name: str = "", *rest: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which do not matter for bytes."""


class _Array:
    def __init__(self, *rest: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def values(self) -> Bytes:
        """Return the array; raise ValueError if its elements are not bytes."""
        _, shape, element, fortran, raw = self.state
        if getattr(element, "name", None) != "u1":
            raise ValueError("an array that is not of bytes")
        raw = raw.encode("latin-1") if isinstance(raw, str) else raw
        pixels: Bytes = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
        return pixels


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes as {encoding}")
    return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): object,  # a pickle names it but does not call it
    ("numpy", "dtype"): _ElementType,
    ("_codecs", "encode"): _encoded,  # how Python 3 writes bytes in protocol 2
}
