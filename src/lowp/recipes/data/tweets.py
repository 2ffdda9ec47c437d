"""Tweets, their sentiment, and the part of each that expresses it, from the competition's CSV file or drawn."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowp.recipes.data.files import Published, read_text
from lowp.recipes.data.wordpiece import WordPiece
from lowp.recipes.recipe import Data

TWEETS = Published(
    "tweets with sentiment", "https://www.kaggle.com/c/tweet-sentiment-extraction/data (train.csv), CC BY 4.0"
)
SENTIMENTS = ("neutral", "positive", "negative")
VOCABULARY_NAMES = ("vocab.txt", "*vocab*.txt", "vocab")
_HELD_SHARE = 0.1


class Tweet(NamedTuple):
    """A text, its sentiment, and the part `text[start:end]` that expresses it."""

    text: str
    sentiment: str
    start: int
    end: int


class SpanExamples:
    """Batches as dictionaries of int64: ``pieces`` and ``segments`` [N, length], ``start`` and ``end`` [N].

    A row of `pieces` has the start token, the sentiment, a separator, the text, a separator, and padding (id 0).
    `segments` is 1 for the text and the separator after it. `start` and `end` are the positions of the first and the
    last piece of the part to be found.
    """

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows["start"])

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return the rows at `indices`."""
        return {name: column[indices] for name, column in self.rows.items()}


def read_tweets(path: Path) -> list[Tweet]:
    """Read the tweets of train.csv whose selected text is a part of the text.

    Raises InvalidInput for a missing or damaged file, missing columns, unknown sentiments, and no such tweet.
    """
    file = TWEETS.find(path, ["train.csv", "*weet*.csv"])
    names = ("text", "selected_text", "sentiment")
    tweets = []
    try:
        reader = csv.DictReader(io.StringIO(read_text(TWEETS, file), newline=""), strict=True)
        missing = [name for name in names if name not in (reader.fieldnames or ())]
        if missing:
            columns = ", ".join(reader.fieldnames or ()) or "nothing"
            raise TWEETS.broken(file, f"has no column {', '.join(missing)}; it has {columns}")
        for row in reader:
            text, part, sentiment = (row[name] or "" for name in names)
            if sentiment not in SENTIMENTS:
                raise TWEETS.broken(file, f"has the sentiment {sentiment!r} in line {reader.line_num}")
            start = text.find(part)
            if part and start >= 0:
                tweets.append(Tweet(text, sentiment, start, start + len(part)))
    except csv.Error as error:
        raise TWEETS.broken(file, f"is not CSV: {error}") from None
    if not tweets:
        raise TWEETS.broken(file, "has no row with a text and a part of it")
    return tweets


def drawn_tweets(count: int, seed: int = 0) -> list[Tweet]:
    """Draw `count` sentences from lists of phrases, 40 % of them neutral as in the real set.

    The part of a neutral sentence is all of it. The part of another one is a phrase of its sentiment, at a random
    position; some of these have a phrase of the opposite sentiment too, so that the sentiment has to be read.
    """
    random = np.random.default_rng(seed)
    return [_draw(random) for _ in range(count)]


_FEELINGS = {
    "positive": "so happy|love it|really great|thank you|best day ever|awesome|good luck|very nice|feeling good".split(
        "|"
    ),
    "negative": "so sad|hate it|really bad|i am sick|worst day ever|awful|feeling lonely|very tired|it hurts".split(
        "|"
    ),
}
_PLAIN = (
    "today i am going to the office|just had lunch with my sister|the train to work|watching a movie at home"
    "|on my way to school|reading about the weather|now listening to the radio|my phone is on the table"
    "|we drove to town this morning|waiting for the new season|back from the garden|she told me about her trip"
).split("|")


def _draw(random: np.random.Generator) -> Tweet:
    sentiment = SENTIMENTS[int(random.choice(3, p=[0.405, 0.312, 0.283]))]
    parts = [_PLAIN[index] for index in random.choice(len(_PLAIN), int(random.integers(1, 4)), replace=False)]
    opposite = {"positive": "negative", "negative": "positive"}.get(sentiment, "")
    if opposite and random.random() < 0.3:
        parts.append(str(random.choice(_FEELINGS[opposite])))
    if sentiment == "neutral":
        text = ", ".join(parts)
        return Tweet(text, sentiment, 0, len(text))
    feeling = str(random.choice(_FEELINGS[sentiment]))
    parts.append(feeling)
    order = random.permutation(len(parts))
    text = ", ".join(parts[index] for index in order) + str(random.choice(["", "!", " ..."]))
    start = text.index(feeling)
    return Tweet(text, sentiment, start, start + len(feeling))


def span_data(tweets: Sequence[Tweet], vocabulary: WordPiece, length: int, source: str) -> Data:
    """Return the tweets as examples; every tenth is for validation.

    Tweets are truncated to `length` pieces, and dropped if the part begins after that.
    """
    rows = [row for tweet in tweets if (row := _row(tweet, vocabulary, length)) is not None]
    names = ("pieces", "segments", "start", "end")
    columns = {name: torch.tensor([row[index] for row in rows]) for index, name in enumerate(names)}
    held = torch.arange(len(rows)) % round(1 / _HELD_SHARE) == 0
    parts = [SpanExamples({name: column[mask] for name, column in columns.items()}) for mask in (~held, held)]
    description = f"{source}, {vocabulary.size:,} pieces: {len(parts[0]):,} to train on, {len(parts[1]):,} held back"
    return Data(parts[0], parts[1], description)


def _row(tweet: Tweet, vocabulary: WordPiece, length: int) -> tuple[list[int], list[int], int, int] | None:
    """Return pieces, segments, start and end of a tweet; None if its part begins after `length` pieces."""
    question = [vocabulary.start, *(piece.id for piece in vocabulary.pieces(tweet.sentiment)), vocabulary.separator]
    pieces = vocabulary.pieces(tweet.text)[: length - len(question) - 1]
    inside = [position for position, piece in enumerate(pieces) if piece.end > tweet.start and piece.start < tweet.end]
    if not inside:
        return None
    ids = [*question, *(piece.id for piece in pieces), vocabulary.separator]
    segments = [0] * len(question) + [1] * (len(pieces) + 1)
    padding = length - len(ids)
    ids += [vocabulary.padding] * padding
    segments += [0] * padding
    return ids, segments, len(question) + inside[0], len(question) + inside[-1]
