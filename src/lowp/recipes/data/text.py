"""Text as bytes, from the user's file or from Python's own documentation."""

from __future__ import annotations

import codecs
import importlib
import importlib.util
import io
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import Tensor

from lowp.recipes.data.files import Published, read_bytes
from lowp.recipes.recipe import Data

TEXT = Published(
    "a text file",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt (tiny Shakespeare), or "
    "take any text",
)
# File names of a set with separate training and validation files (WikiText), and of a single text.
_DIVIDED = (("*train*.txt", "*train.tokens"), ("*valid*.txt", "*valid.tokens", "*test*.txt"))
_UNDIVIDED = ("input.txt", "*.txt")
_HELD_SHARE = 0.1
_MODULES = (
    "argparse",
    "datetime",
    "decimal",
    "doctest",
    "logging",
    "pathlib",
    "random",
    "statistics",
    "typing",
    "unittest",
)


class Passages:
    """Passages of a text as batches ``(bytes int64 [N, length], the byte after each int64 [N, length])``.

    Passage i begins at i * length; with a generator, at a random position less than `length` bytes later.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the passages at `indices`."""
        starts = indices * self.length
        if generator is not None:
            starts = starts + torch.randint(self.length, starts.shape, generator=generator)
        starts = starts.clamp(max=len(self.text) - 1 - self.length)
        positions = starts[:, None] + torch.arange(self.length)
        return self.text[positions].long(), self.text[positions + 1].long()


def read_passages(path: Path, length: int) -> Data:
    """Read a text, whose last tenth is for validation, or a folder with training and validation files.

    Raises InvalidInput if there is no text, or if it is too short for a passage of `length` bytes.
    """
    parts = [TEXT.find_or_none(path, names) for names in _DIVIDED]
    if parts[0] is not None and parts[1] is not None and path.is_dir():
        training, held = (read_bytes(TEXT, part) for part in parts if part is not None)
        return text_data(training, held, length, f"{parts[0].name} and {parts[1].name} from {path}")
    file = path if path.is_file() else TEXT.find(path, _UNDIVIDED)
    content = read_bytes(TEXT, file)
    if len(content) * _HELD_SHARE < length + 2:
        raise TEXT.broken(file, f"has {len(content):,} bytes, and {round((length + 2) / _HELD_SHARE):,} are needed")
    cut = round(len(content) * (1 - _HELD_SHARE))
    return text_data(content[:cut], content[cut:], length, str(file))


def text_data(training: bytes, held: bytes, length: int, source: str) -> Data:
    """Return a training and a validation text as passages of `length` bytes."""
    parts = [Passages(torch.frombuffer(bytearray(text), dtype=torch.uint8), length) for text in (training, held)]
    return Data(parts[0], parts[1], f"{source}: {len(training):,} bytes to train on, {len(held):,} held back")


def pythons_text(max_bytes: int) -> tuple[bytes, bytes, str]:
    """Return training text, validation text, at most `max_bytes` bytes together, and their description.

    They are the Zen of Python, the docstrings of some modules, and the reference shown by help(): English with
    examples. They differ between versions of Python.
    """
    with redirect_stdout(io.StringIO()):
        zen = codecs.decode(importlib.import_module("this").s, "rot13")
    texts = [zen, *(importlib.import_module(name).__doc__ or "" for name in _MODULES)]
    if importlib.util.find_spec("pydoc_data.topics") is not None:
        topics = importlib.import_module("pydoc_data.topics").topics
        texts += [topics[name] for name in sorted(topics)]
    content = "\n\n".join(texts).encode("ascii", "replace")[:max_bytes]
    cut = round(len(content) * (1 - _HELD_SHARE))
    return content[:cut], content[cut:], "Python's own documentation"
