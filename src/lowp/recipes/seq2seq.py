"""A GRU network with attention that translates, byte by byte: dates into ISO 8601 where no parallel text is given.

Micikevicius et al. 2018 (arXiv 1710.03740, section 4.4) found that such networks need loss scaling in fp16: the
gradients that come back through the recurrence are small. The products of the GRUs and of attention compute in few
bits; the gates and the cross-entropy do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.recipes.data.parallel import BEGIN, PADDING, SYMBOLS, drawn_dates, pair_data, read_pairs
from lowp.recipes.networks.seq2seq import Translator
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adam, one_cycle


def load(size: Size, path: Path | None) -> Data:
    """The user's pairs of texts, or dates as people write them and as ISO 8601 does."""
    pairs = read_pairs(path) if path is not None else drawn_dates(size.options["drawn"])
    return pair_data(pairs, size.options["length"], str(path) if path is not None else "drawn dates")


def make_model(size: Size) -> nn.Module:
    """torch's own initialisation, which learns sooner than the -0.1 to 0.1 of the paper at this size."""
    return Translator(SYMBOLS, size.options["width"], size.options["layers"], size.options["dropout"])


def _scores_and_targets(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Scores [N, length, symbols] with what is to be written given up to each place (teacher forcing)."""
    text, translation = batch
    begin = torch.full_like(translation[:, :1], BEGIN)
    return model(text, torch.cat([begin, translation[:, :-1]], dim=1)), translation


def symbols(batch: Any) -> int:
    """The number of places in the texts and their translations, padding too."""
    text, translation = batch
    return int(text.numel() + translation.numel())


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of the next byte, averaged over all places before the padding."""
    scores, translation = _scores_and_targets(model, batch)
    return nn.functional.cross_entropy(scores.flatten(0, 1), translation.flatten(), ignore_index=PADDING)


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """``accuracy``: the share of bytes that are right, given those before; ``exact``: of whole translations."""
    right = exact = places = count = 0
    summed = 0.0
    for batch in batches:
        scores, translation = _scores_and_targets(model, batch)
        scores, real = scores.float(), translation != PADDING
        summed += float(
            nn.functional.cross_entropy(
                scores.flatten(0, 1), translation.flatten(), ignore_index=PADDING, reduction="sum"
            )
        )
        hits = (scores.argmax(-1) == translation) | ~real
        right += int((hits & real).sum())
        exact += int(hits.all(1).sum())
        places += int(real.sum())
        count += len(translation)
    return {"accuracy": right / places, "exact": exact / count, "loss": summed / places}


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
