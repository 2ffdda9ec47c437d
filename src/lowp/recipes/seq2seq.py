"""A GRU network with attention that translates byte by byte: parallel text, or dates in words into ISO 8601.

Micikevicius et al. 2018 (arXiv 1710.03740, section 4.4) found that such networks need loss scaling in fp16, since the
gradients propagated through the recurrence are small. The products of the GRUs and of attention run in low precision;
the gates and the cross-entropy are fp32.

The network has a recurrent encoder and a recurrent decoder with attention to the encoder's states: Luong, Pham,
Manning, "Effective Approaches to Attention-based Neural Machine Translation", 2015, arXiv 1508.04025: global attention
with the score "general" (equations 5 to 8), here with GRUs (Cho et al. 2014, arXiv 1406.1078).
"""

import calendar
import datetime
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowp.recipes.data.files import Published, read_text
from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, adam, built, one_cycle


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


# -- data --------------------------------------------------------------------------------------------------------------
PARALLEL = Published(
    "parallel text", "https://www.manythings.org/anki (a pair a line, parted by a tab), or write such a file"
)
PADDING, BEGIN, END, SYMBOLS = 0, 1, 2, 259  # the other 256 are bytes
_FIRST_BYTE = 3
_HELD_SHARE = 0.1

Pair = tuple[str, str]


def read_pairs(path: Path) -> list[Pair]:
    """Return the first two tab-separated fields of each line of a file, or of the first .tsv or .txt file of a folder.

    Raises InvalidInput for a line with fewer fields, and for fewer than two pairs.
    """
    file = path if path.is_file() else PARALLEL.find(path, ["*.tsv", "*.txt"])
    pairs = []
    for line_number, line in enumerate(read_text(PARALLEL, file).splitlines(), 1):
        fields = line.split("\t")
        if line and (len(fields) < 2 or not fields[0] or not fields[1]):
            raise PARALLEL.broken(file, f"has no two texts separated by a tab in line {line_number}: {line[:40]!r}")
        if line:
            pairs.append((fields[0], fields[1]))
    if len(pairs) < 2:
        raise PARALLEL.broken(file, f"has {len(pairs)} pairs of texts, but 2 or more are needed")
    return pairs


def drawn_dates(count: int, seed: int = 0) -> list[Pair]:
    """Draw dates of 1950 to 2049 in words and in ISO 8601: ``("Tue, 3 May 2016", "2016-05-03")``, without doubles."""
    random = np.random.default_rng(seed)
    first = datetime.date(1950, 1, 1).toordinal()
    days = first + random.integers(0, 36_525, count)
    styles = random.integers(0, 5, count)
    pairs = [_date(int(day), int(style)) for day, style in zip(days, styles, strict=True)]
    return list(dict.fromkeys(pairs))


def _date(ordinal: int, style: int) -> Pair:
    date = datetime.date.fromordinal(ordinal)
    month, short = calendar.month_name[date.month], calendar.month_abbr[date.month]
    weekday = calendar.day_abbr[date.weekday()]
    written = (
        f"{date.day} {month} {date.year}",
        f"{month} {date.day}, {date.year}",
        f"{weekday}, {date.day} {short} {date.year}",
        f"{date.month}/{date.day}/{date.year % 100:02}" if date.year >= 2000 else f"{short} {date.day} {date.year}",
        f"the {date.day}. of {month.lower()} {date.year}",
    )
    return written[style], date.isoformat()


def pair_data(pairs: Sequence[Pair], length: int, source: str) -> Data:
    """Return examples ``(text, translation)``, int64 [N, length] each: bytes, an end symbol, and padding.

    Every tenth pair is for validation. Longer pairs are dropped; raises InvalidInput if fewer than two are left.
    """
    rows = [(_symbols(text), _symbols(translation)) for text, translation in pairs]
    rows = [row for row in rows if max(map(len, row)) <= length]
    if len(rows) < 2:
        raise PARALLEL.broken(Path(source), f"has no two pairs of up to {length - 1} bytes a text")
    columns = [torch.tensor([row[side] + [PADDING] * (length - len(row[side])) for row in rows]) for side in (0, 1)]
    held = torch.arange(len(rows)) % round(1 / _HELD_SHARE) == 0
    parts = [TensorExamples(*(column[mask] for column in columns)) for mask in (~held, held)]
    return Data(parts[0], parts[1], f"{source}: {len(parts[0]):,} pairs to train on, {len(parts[1]):,} held back")


def _symbols(text: str) -> list[int]:
    return [byte + _FIRST_BYTE for byte in text.encode()] + [END]


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return the user's pairs of texts if a path is given, otherwise drawn dates in words and in ISO 8601."""
    pairs = read_pairs(path) if path is not None else drawn_dates(size.options["drawn"])
    return pair_data(pairs, size.options["length"], str(path) if path is not None else "drawn dates")


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
    # with torch's initialisation; with the paper's, -0.1 to 0.1, it learns more slowly
    make_model=built(partial(Translator, SYMBOLS), "width", "layers", "dropout"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=adam,
    schedule=one_cycle,
    clip=5.0,
    unit="tokens",
    units=symbols,
)
