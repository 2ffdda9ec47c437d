"""Text as words of a vocabulary of fixed size: a file of the user's, or words drawn with a language's frequencies."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from lowp.recipes.data.files import read_bytes
from lowp.recipes.data.text import TEXT
from lowp.recipes.recipe import Data

__all__ = ["Contexts", "drawn_words", "read_words"]

_HELD_SHARE = 0.1
_WORD = re.compile(r"\w+|[^\w\s]")


class Contexts:
    """Batches ``(the words before int64 [N, context], the word that follows int64 [N])`` of a text [length]."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return max(len(self.text) - self.context, 0)

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """The places at `indices`."""
        places = indices[:, None] + torch.arange(self.context)
        return self.text[places], self.text[indices + self.context]


def drawn_words(vocabulary: int, drawn: tuple[int, int], context: int) -> Data:
    """Words whose frequency falls with their rank (Zipf's law, as Mandelbrot 1953 has it), to train on and held back.

    Half of them are the one word that belongs behind the word before: what there is to be learnt.
    """
    generator = torch.Generator().manual_seed(0)
    shares = 1 / (torch.arange(vocabulary) + 2.7)
    behind = torch.multinomial(shares, vocabulary, True, generator=generator)
    count = sum(drawn) + 2 * context
    free = torch.multinomial(shares, count, True, generator=generator).tolist()
    belongs = (torch.rand(count, generator=generator) < 0.5).tolist()
    words = [free[0]]
    for index in range(1, count):
        words.append(int(behind[words[-1]]) if belongs[index] else free[index])
    text, cut = torch.tensor(words), drawn[0] + context
    source = f"drawn words, {vocabulary:,} different ones: {drawn[0]:,} to train on, {drawn[1]:,} held back"
    return Data(Contexts(text[:cut], context), Contexts(text[cut:], context), source)


def read_words(path: Path, vocabulary: int, context: int) -> Data:
    """A text of the user's, its last tenth held back; words beyond the most frequent are one. Raises InvalidInput."""
    file = path if path.is_file() else TEXT.find(path, ("input.txt", "*.txt"))
    words = _WORD.findall(read_bytes(TEXT, file).decode("utf-8", errors="replace").lower())
    if len(words) * _HELD_SHARE < context + 2:
        raise TEXT.broken(file, f"has {len(words):,} words, and {round((context + 2) / _HELD_SHARE):,} are needed")
    numbers = {word: index + 1 for index, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    text = torch.tensor([numbers.get(word, 0) for word in words])
    cut = round(len(text) * (1 - _HELD_SHARE))
    source = f"{file}: {cut:,} words to train on, {len(text) - cut:,} held back, {len(numbers):,} different ones"
    return Data(Contexts(text[:cut], context), Contexts(text[cut:], context), source)
