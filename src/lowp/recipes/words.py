"""A neural language model over words: predicts the next word of a large vocabulary from the last three.

Its softmax over 20,000 words is difficult in low precision. The gradient of a word that does not follow is about a
20,000th of that of the word that does, and Adam makes updates of the same size for both; under a shared exponent the
smaller ones are rounded to zero (docs/flexpoint.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.classification import score_metrics
from lowp.recipes.data.words import drawn_words, read_words
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adam, constant


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


def load(size: Size, path: Path | None) -> Data:
    """Return the user's text if a path is given, otherwise drawn words."""
    vocabulary, context = size.options["vocabulary"], size.options["context"]
    if path is not None:
        return read_words(path, vocabulary, context)
    return drawn_words(vocabulary, size.options["drawn"], context)


def make_model(size: Size) -> nn.Module:
    """Return a network of this size."""
    return NextWord(*(size.options[name] for name in ("vocabulary", "width", "hidden", "context")))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy of the next word, averaged over the batch."""
    words, following = batch
    return nn.functional.cross_entropy(model(words), following)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``nats_per_word`` and ``loss``, the cross-entropy, and ``accuracy``, the share of correct words."""
    metrics = score_metrics((model(words), following) for words, following in batches)
    return {"nats_per_word": metrics["loss"], **metrics}


WORDS = Recipe(
    name="words",
    summary="neural language model over words: a softmax over a vocabulary of 20,000",
    source="Bengio et al. 2003, A Neural Probabilistic Language Model, JMLR 3; full: the size for its AP News",
    data="drawn with the frequencies of a language; --data DIR or FILE: a text",
    sizes={
        "cpu": Size(
            1,
            256,
            1e-2,
            1_303_104,
            {"vocabulary": 20_000, "width": 32, "hidden": 32, "context": 3, "drawn": (15_360, 2_048)},
        ),
        "full": Size(
            5,
            256,
            1e-3,
            3_660_864,
            {"vocabulary": 17_964, "width": 100, "hidden": 100, "context": 5, "drawn": (1_000_000, 100_000)},
        ),
    },
    metric=Metric("nats_per_word", higher_is_better=False, share=False),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=constant,
    unit="words",
)
