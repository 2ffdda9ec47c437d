"""Parallel text: pairs of a text and its translation, from a file or drawn as dates in words and in ISO 8601."""

from __future__ import annotations

import calendar
import datetime
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lowp.recipes.data.files import Published, read_text
from lowp.recipes.recipe import Data, TensorExamples

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
