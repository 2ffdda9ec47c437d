"""A GRU network with attention that translates byte by byte: parallel text, or dates in words into ISO 8601.

Micikevicius et al. 2018 (arXiv 1710.03740, section 4.4) found that such networks need loss scaling in fp16, since the
gradients propagated through the recurrence are small. The products of the GRUs and of attention run in low precision;
the gates and the cross-entropy are fp32.

The network has a recurrent encoder and a recurrent decoder with attention to the encoder's states: Luong, Pham,
Manning, "Effective Approaches to Attention-based Neural Machine Translation", 2015, arXiv 1508.04025: global attention
with the score "general" (equations 5 to 8), here with GRUs (Cho et al. 2014, arXiv 1406.1078).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.data.parallel import BEGIN, PADDING, SYMBOLS, drawn_dates, pair_data, read_pairs
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adam, one_cycle


# -- the network -------------------------------------------------------------------------------------------------------
class Translator(nn.Module):
    """An encoder, a decoder and attention: from a text and a target to scores of each next symbol [N, T, symbols].

    The text is int64 [N, S] and the target int64 [N, T]; 0 is padding.
    """

    def __init__(self, symbols: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embed_read = nn.Embedding(symbols, width, padding_idx=0)
        self.embed_written = nn.Embedding(symbols, width, padding_idx=0)
        between = dropout if layers > 1 else 0.0
        self.read = nn.GRU(width, width, layers, batch_first=True, dropout=between)
        self.write = nn.GRU(width, width, layers, batch_first=True, dropout=between)
        self.compare = nn.Linear(width, width, bias=False)
        self.combine = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.choose = nn.Linear(width, symbols)

    def forward(self, text: Tensor, written: Tensor) -> Tensor:
        """Return the scores of the symbol after each target symbol, [N, T, symbols]."""
        read, last = self.read(self.drop(self.embed_read(text)))
        states, _ = self.write(self.drop(self.embed_written(written)), last)
        logits = torch.bmm(self.compare(states), read.transpose(1, 2))
        weights = logits.masked_fill((text == 0)[:, None, :], -1e4).softmax(dim=-1)
        context = torch.bmm(weights.to(read.dtype), read)
        scores: Tensor = self.choose(self.drop(torch.tanh(self.combine(torch.cat([context, states], dim=-1)))))
        return scores


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return the user's pairs of texts if a path is given, otherwise drawn dates in words and in ISO 8601."""
    pairs = read_pairs(path) if path is not None else drawn_dates(size.options["drawn"])
    return pair_data(pairs, size.options["length"], str(path) if path is not None else "drawn dates")


def make_model(size: Size) -> nn.Module:
    """Return a network with torch's initialisation; with the paper's, -0.1 to 0.1, it learns more slowly."""
    return Translator(SYMBOLS, size.options["width"], size.options["layers"], size.options["dropout"])


def _scores_and_targets(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return scores [N, length, symbols] and targets [N, length]; earlier targets are given (teacher forcing)."""
    text, translation = batch
    begin = torch.full_like(translation[:, :1], BEGIN)
    return model(text, torch.cat([begin, translation[:, :-1]], dim=1)), translation


def symbols(batch: Any) -> int:
    """Return the number of positions in the texts and their translations, including padding."""
    text, translation = batch
    return int(text.numel() + translation.numel())


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy of the next symbol, averaged over all positions without padding."""
    scores, translation = _scores_and_targets(model, batch)
    return nn.functional.cross_entropy(scores.flatten(0, 1), translation.flatten(), ignore_index=PADDING)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``accuracy``, ``exact`` and ``loss``, given the earlier target symbols.

    ``accuracy``: the share of correct symbols. ``exact``: the share of translations without an incorrect symbol.
    """
    correct = exact = positions = count = 0
    loss_sum = 0.0
    for batch in batches:
        scores, translation = _scores_and_targets(model, batch)
        scores, mask = scores.float(), translation != PADDING
        loss_sum += float(
            nn.functional.cross_entropy(
                scores.flatten(0, 1), translation.flatten(), ignore_index=PADDING, reduction="sum"
            )
        )
        hits = (scores.argmax(-1) == translation) | ~mask
        correct += int((hits & mask).sum())
        exact += int(hits.all(1).sum())
        positions += int(mask.sum())
        count += len(translation)
    return {"accuracy": correct / positions, "exact": exact / count, "loss": loss_sum / positions}


SEQ2SEQ = Recipe(
    name="seq2seq",
    summary="GRU with attention: translates, byte by byte",
    source="Luong, Pham, Manning 2015, arXiv 1508.04025; Micikevicius et al. 2018, arXiv 1710.03740, section 4.4",
    data="generated: dates in words, and in figures; --data DIR or FILE: parallel text (a pair a line, tab between)",
    sizes={
        "cpu": Size(15, 50, 0.01, 112_259, {"width": 64, "layers": 1, "dropout": 0.0, "length": 32, "drawn": 2000}),
        "full": Size(
            12, 128, 1e-3, 51_826_259, {"width": 1000, "layers": 4, "dropout": 0.2, "length": 50, "drawn": 30_000}
        ),
    },
    metric=Metric("accuracy"),
    load=load,
    make_model=make_model,
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=one_cycle,
    clip=5.0,
    unit="tokens",
    units=symbols,
)
