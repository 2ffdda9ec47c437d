"""A neural language model over words: predicts the next word of a large vocabulary from the last three.

Its softmax over 20,000 words is difficult in low precision. The gradient of a word that does not follow is about a
20,000th of that of the word that does, and Adam makes updates of the same size for both; under a shared exponent the
smaller ones are rounded to zero (docs/flexpoint.md).
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.classification import loss, score_metrics
from lowp.recipes.data.files import read_bytes
from lowp.recipes.gpt import TEXT
from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, adam, built, constant


# -- the network -------------------------------------------------------------------------------------------------------
class NextWord(nn.Module):
    """Embeddings of the last words, one hidden layer with tanh, and scores of all words (Bengio et al. 2003)."""

    def __init__(self, vocabulary: int, width: int, hidden: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(context * width, hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Return scores [N, vocabulary] of the word that follows words int64 [N, context]."""
        return self.head(torch.tanh(self.hidden(self.embedding(words).flatten(1))))  # type: ignore[no-any-return]


# -- data --------------------------------------------------------------------------------------------------------------
_HELD_SHARE = 0.1
_WORD = re.compile(r"\w+|[^\w\s]")


def contexts(text: Tensor, context: int) -> TensorExamples:
    """Return the contexts of a text: batches ``(words int64 [N, context], the word after them int64 [N])``."""
    windows = text.unfold(0, context + 1, 1)
    return TensorExamples(windows[:, :-1], windows[:, -1])


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
    return Data(contexts(text[:cut], context), contexts(text[cut:], context), source)


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
    return Data(contexts(text[:cut], context), contexts(text[cut:], context), source)


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return the user's text if a path is given, otherwise drawn words."""
    vocabulary, context = size.options["vocabulary"], size.options["context"]
    if path is not None:
        return read_words(path, vocabulary, context)
    return drawn_words(vocabulary, size.options["drawn"], context)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``nats_per_word`` and ``loss``, the cross-entropy, and ``accuracy``, the share of correct words."""
    metrics = score_metrics((model(words), following) for words, following in batches)
    return {"nats_per_word": metrics["loss"], **metrics}


_SMALL = {"vocabulary": 20_000, "width": 32, "hidden": 32, "context": 3, "drawn": (15_360, 2_048)}
_FULL = {"vocabulary": 17_964, "width": 100, "hidden": 100, "context": 5, "drawn": (1_000_000, 100_000)}

WORDS = Recipe(
    name="words",
    summary="neural language model over words: a softmax over a vocabulary of 20,000",
    source="Bengio et al. 2003, A Neural Probabilistic Language Model, JMLR 3; full: the size for its AP News",
    data="drawn with the frequencies of a language; --data DIR or FILE: a text",
    sizes={"cpu": Size(1, 256, 1e-2, 1_303_104, _SMALL), "full": Size(5, 256, 1e-3, 3_660_864, _FULL)},
    metric=Metric("nats_per_word", higher_is_better=False, share=False),
    load=load,
    make_model=built(NextWord, "vocabulary", "width", "hidden", "context"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=constant,
    unit="words",
)
