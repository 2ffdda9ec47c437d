"""Text as words of a vocabulary of fixed size, from the user's file or drawn with the frequencies of a language."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from lowp.recipes.data.files import read_bytes
from lowp.recipes.data.text import TEXT
from lowp.recipes.recipe import Data

_HELD_SHARE = 0.1
_WORD = re.compile(r"\w+|[^\w\s]")


class Contexts:
    """Contexts of a text as batches ``(words int64 [N, context], the word after them int64 [N])``."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(len(self.text) - self.context, 0)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the contexts that begin at `indices`, and the words after them."""
        positions = indices[:, None] + torch.arange(self.context)
        return self.text[positions], self.text[indices + self.context]


def drawn_words(vocabulary: int, drawn: tuple[int, int], context: int) -> Data:
    """Draw words with frequencies that fall with their rank (Zipf's law in the form of Mandelbrot 1953).

    Half of the words are determined by the word before them; the others are independent. `drawn`: the numbers of
    training and validation examples.
    """
    generator = torch.Generator().manual_seed(0)
    frequencies = 1 / (torch.arange(vocabulary) + 2.7)
    successors = torch.multinomial(frequencies, vocabulary, True, generator=generator)
    count = sum(drawn) + 2 * context
    independent = torch.multinomial(frequencies, count, True, generator=generator).tolist()
    is_successor = (torch.rand(count, generator=generator) < 0.5).tolist()
    words = [independent[0]]
    for index in range(1, count):
        words.append(int(successors[words[-1]]) if is_successor[index] else independent[index])
    text, cut = torch.tensor(words), drawn[0] + context
    source = f"drawn words, {vocabulary:,} different ones: {drawn[0]:,} to train on, {drawn[1]:,} held back"
    return Data(Contexts(text[:cut], context), Contexts(text[cut:], context), source)


def read_words(path: Path, vocabulary: int, context: int) -> Data:
    """Read a text, whose last tenth is for validation.

    Index 0 stands for all words beyond the `vocabulary` - 1 most frequent. Raises InvalidInput if there is no text, or
    if it is too short.
    """
    file = path if path.is_file() else TEXT.find(path, ("input.txt", "*.txt"))
    words = _WORD.findall(read_bytes(TEXT, file).decode("utf-8", errors="replace").lower())
    if len(words) * _HELD_SHARE < context + 2:
        raise TEXT.broken(file, f"has {len(words):,} words, and {round((context + 2) / _HELD_SHARE):,} are needed")
    indices = {word: rank + 1 for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    text = torch.tensor([indices.get(word, 0) for word in words])
    cut = round(len(text) * (1 - _HELD_SHARE))
    source = f"{file}: {cut:,} words to train on, {len(text) - cut:,} held back, {len(indices):,} different ones"
    return Data(Contexts(text[:cut], context), Contexts(text[cut:], context), source)
