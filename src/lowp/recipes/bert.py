"""BERT, trained to find the part of a tweet that expresses its sentiment: its first and its last piece.

The model is the unmodified BertModel of transformers, built from a configuration without a download. Its linear layers
and its attention compute in low precision because they are called inside the precision's region. The published run on
a T4 took 20 minutes in mixed precision, and 55 in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.errors import Unavailable
from lowp.recipes.data.tweets import VOCABULARY_NAMES, drawn_tweets, read_tweets, span_data
from lowp.recipes.data.wordpiece import VOCABULARY, WordPiece
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adamw_where, linear_decay, tokens_of

PIECES = 30_522  # the vocabulary size of bert-base-uncased; a smaller vocabulary uses the first ids


class SpanNetwork(nn.Module):
    """BERT with one linear layer on its last two hidden states, which gives start and end scores of each piece.

    With the size of bert-base (12 layers, width 768) it has 109,485,314 parameters. Raises Unavailable without
    transformers.
    """

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertModel
        except ImportError:
            raise Unavailable(
                "the model is transformers' BertModel, which is not installed: pip install 'lowp[recipes]'"
            ) from None
        self.bert = BertModel(
            BertConfig(
                vocab_size=PIECES,
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=4 * width,
            )
        )
        self.drop = nn.Dropout(dropout)
        self.places = nn.Linear(2 * width, 2)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, pieces: Tensor, segments: Tensor) -> Tensor:
        """Return scores [N, length, 2] of pieces and segments int64 [N, length]; padding (id 0) is masked."""
        output = self.bert(pieces, (pieces != 0).long(), segments, output_hidden_states=True)
        scores: Tensor = self.places(self.drop(torch.cat(output.hidden_states[-2:], dim=-1)))
        return scores


def load(size: Size, path: Path | None) -> Data:
    """Return tweets from the user's path, or drawn sentences; build a vocabulary if the folder has none."""
    length = size.options["length"]
    tweets = read_tweets(path) if path is not None else drawn_tweets(size.options["drawn"])
    file = VOCABULARY.find_or_none(path, VOCABULARY_NAMES) if path is not None and path.is_dir() else None
    if file is not None:
        vocabulary = WordPiece.read(file, PIECES)
    else:
        vocabulary = WordPiece.build((f"{tweet.sentiment} {tweet.text}" for tweet in tweets), PIECES, min_count=1)
    return span_data(tweets, vocabulary, length, f"tweets from {path}" if path is not None else "drawn sentences")


def make_model(size: Size) -> nn.Module:
    """Return a network of this size with BERT's initialisation, without pre-trained weights."""
    options = size.options
    network = SpanNetwork(options["layers"], options["width"], options["heads"], dropout=0.1)
    network.bert.pooler.requires_grad_(False)  # BERT has it for whole texts; here nothing reads its result
    return network


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the sum of the cross-entropies of start and end, averaged over the batch."""
    scores = model(batch["pieces"], batch["segments"])
    start, end = (nn.functional.cross_entropy(scores[..., index], batch[name]) for index, name in _ENDS)
    return start + end


_ENDS = ((0, "start"), (1, "end"))


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``overlap``, ``exact`` and ``loss``.

    ``overlap``: the mean Jaccard index of the pieces of the predicted and the true part. ``exact``: the share of texts
    whose predicted start and end are correct.
    """
    overlap, exact, loss_sum, count = 0.0, 0, 0.0, 0
    for batch in batches:
        scores = model(batch["pieces"], batch["segments"]).float().masked_fill(batch["segments"][..., None] == 0, -1e4)
        for index, name in _ENDS:
            loss_sum += float(nn.functional.cross_entropy(scores[..., index], batch[name], reduction="sum"))
        start, end = scores.argmax(1).unbind(1)
        end = torch.maximum(start, end)
        intersection = (torch.minimum(end, batch["end"]) - torch.maximum(start, batch["start"]) + 1).clamp(min=0)
        union = (end - start + 1) + (batch["end"] - batch["start"] + 1) - intersection
        overlap += float((intersection / union).sum())
        exact += int(((start == batch["start"]) & (end == batch["end"])).sum())
        count += len(start)
    return {"overlap": overlap / count, "exact": exact / count, "loss": loss_sum / count}


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: not to biases and layer normalisations."""
    return not name.endswith("bias") and "LayerNorm" not in name


BERT = Recipe(
    name="bert",
    summary="BERT: finds the part of a tweet that shows its sentiment",
    source="Devlin et al. 2019, arXiv 1810.04805; sizes as in A. Bilogur's guide to mixed precision, 2020",
    data="generated: sentences with feelings; --data DIR: Tweet Sentiment Extraction (train.csv, perhaps vocab.txt)",
    sizes={
        "cpu": Size(4, 32, 3e-4, 11_171_586, {"layers": 4, "width": 256, "heads": 4, "length": 48, "drawn": 1500}),
        "full": Size(
            5, 64, 3e-5, 109_485_314, {"layers": 12, "width": 768, "heads": 12, "length": 128, "drawn": 27_480}
        ),
    },
    classes=1,
    metric=Metric("overlap"),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=partial(adamw_where, _decays, weight_decay=0.001),
    schedule=linear_decay,
    unit="tokens",
    units=tokens_of,
)
