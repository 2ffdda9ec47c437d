"""BERT, trained to find the part of a tweet that expresses its sentiment: its first and its last piece.

The model is the unmodified BertModel of transformers, built from a configuration without a download. Its linear layers
and its attention compute in low precision because they are called inside the precision's region. The published run on
a T4 took 20 minutes in mixed precision, and 55 in fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lowp.recipes.data.files import Published, optional, read_columns, read_text
from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, adamw_where, linear_decay, tokens_of

PIECES = 30_522  # the vocabulary size of bert-base-uncased; a smaller vocabulary uses the first ids


# -- the network -------------------------------------------------------------------------------------------------------
class SpanNetwork(nn.Module):
    """BERT with one linear layer on its last two hidden states, which gives start and end scores of each piece.

    With the size of bert-base (12 layers, width 768) it has 109,485,314 parameters. Raises Unavailable without
    transformers.
    """

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        with optional("the model is transformers' BertModel"):
            from transformers import BertConfig, BertModel
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


# -- data --------------------------------------------------------------------------------------------------------------
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


def read_tweets(path: Path) -> list[Tweet]:
    """Read the tweets of train.csv whose selected text is a part of the text.

    Raises InvalidInput for a missing or damaged file, missing columns, unknown sentiments, and no such tweet.
    """
    file = TWEETS.find(path, ["train.csv", "*weet*.csv"])
    lines, *columns = read_columns(TWEETS, file, ("text", "selected_text", "sentiment"))
    tweets = []
    for line, text, part, sentiment in zip(lines, *columns, strict=True):
        if sentiment not in SENTIMENTS:
            raise TWEETS.broken(file, f"has the sentiment {sentiment!r} in line {line}")
        start = text.find(part)
        if part and start >= 0:
            tweets.append(Tweet(text, sentiment, start, start + len(part)))
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
    "positive": "so happy|love it|really great|thank you|best day ever|awesome|good luck|very nice|feeling good",
    "negative": "so sad|hate it|really bad|i am sick|worst day ever|awful|feeling lonely|very tired|it hurts",
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
        parts.append(str(random.choice(_FEELINGS[opposite].split("|"))))
    if sentiment == "neutral":
        text = ", ".join(parts)
        return Tweet(text, sentiment, 0, len(text))
    feeling = str(random.choice(_FEELINGS[sentiment].split("|")))
    parts.append(feeling)
    order = random.permutation(len(parts))
    text = ", ".join(parts[index] for index in order) + str(random.choice(["", "!", " ..."]))
    start = text.index(feeling)
    return Tweet(text, sentiment, start, start + len(feeling))


def span_data(tweets: Sequence[Tweet], vocabulary: WordPiece, length: int, source: str) -> Data:
    """Return the tweets as examples; every tenth is for validation.

    Batches are dictionaries of int64: ``pieces`` and ``segments`` [N, length], ``start`` and ``end`` [N]. A row of
    `pieces` has the start token, the sentiment, a separator, the text, a separator, and padding (id 0). `segments` is 1
    for the text and the separator after it. `start` and `end` are the positions of the first and the last piece of the
    part to be found. Tweets are truncated to `length` pieces, and dropped if the part begins after that.
    """
    rows = [row for tweet in tweets if (row := _row(tweet, vocabulary, length)) is not None]
    names = ("pieces", "segments", "start", "end")
    columns = {name: torch.tensor([row[index] for row in rows]) for index, name in enumerate(names)}
    held = torch.arange(len(rows)) % round(1 / _HELD_SHARE) == 0
    parts = [TensorExamples(**{name: column[mask] for name, column in columns.items()}) for mask in (~held, held)]
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


VOCABULARY = Published("a WordPiece vocabulary", "https://huggingface.co/google-bert/bert-base-uncased (vocab.txt)")
PADDING, UNKNOWN, START, SEPARATOR = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class Piece(NamedTuple):
    """The vocabulary id of a piece, and its characters `text[start:end]`."""

    id: int
    start: int
    end: int


class WordPiece:
    """A vocabulary of pieces in the order of their ids. Text is lowercased and stripped of accents.

    Devlin et al. 2019 (BERT), after Wu et al. 2016, arXiv 1609.08144, section 4.1: a word is split from the left into
    the longest pieces in the vocabulary; pieces that continue a word begin with ##. The library `tokenizers`, a
    dependency of transformers, splits as BERT's own program does.

    Raises Unavailable if `tokenizers` is not installed.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.ids = {piece: id for id, piece in enumerate(pieces)}
        self.size = len(pieces)
        self.padding, self.unknown, self.start, self.separator = (
            self.ids[special] for special in (PADDING, UNKNOWN, START, SEPARATOR)
        )
        tokenizers = _tokenizers()
        self._tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(self.ids, unk_token=UNKNOWN, max_input_chars_per_word=100)
        )
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()

    @classmethod
    def read(cls, path: Path, max_size: int) -> WordPiece:
        """Read a vocabulary file with one piece per line.

        Raises InvalidInput for more than `max_size` pieces, or without one of the four special ones.
        """
        pieces = read_text(VOCABULARY, path).split("\n")
        pieces = [piece.rstrip("\r") for piece in (pieces[:-1] if not pieces[-1] else pieces)]
        missing = [special for special in (PADDING, UNKNOWN, START, SEPARATOR) if special not in pieces]
        if missing:
            raise VOCABULARY.broken(path, f"has no {', '.join(missing)} among its {len(pieces):,} lines")
        if len(pieces) > max_size:
            raise VOCABULARY.broken(path, f"has {len(pieces):,} lines, and the network embeds {max_size:,}")
        return cls(pieces)

    @classmethod
    def build(cls, texts: Iterable[str], max_size: int, min_count: int = 3) -> WordPiece:
        """Build a vocabulary of at most `max_size` pieces from texts.

        It has every character, alone and as a continuation, so that every word of the texts can be split, and then the
        words that occur at least `min_count` times, the most frequent first.
        """
        words = Counter(word for text in texts for word in words_of(text))
        characters = sorted({character for word in words for character in word})
        pieces = [PADDING, UNKNOWN, START, SEPARATOR, *characters, *(f"##{character}" for character in characters)]
        frequent = sorted((-count, word) for word, count in words.items() if count >= min_count and len(word) > 1)
        return cls([*pieces, *(word for _, word in frequent)][:max_size])

    def pieces(self, text: str) -> list[Piece]:
        """Split a text into pieces; a word that cannot be split is one unknown piece."""
        encoding = self._tokenizer.encode(text)
        return [Piece(id, *span) for id, span in zip(encoding.ids, encoding.offsets, strict=True)]


def words_of(text: str) -> list[str]:
    """Return the words of a text, lowercased and without accents; each punctuation character is a word."""
    tokenizers = _tokenizers()
    plain = tokenizers.normalizers.BertNormalizer().normalize_str(text)
    return [word for word, _ in tokenizers.pre_tokenizers.BertPreTokenizer().pre_tokenize_str(plain)]


def _tokenizers() -> Any:
    with optional("text is cut into pieces by tokenizers"):
        import tokenizers
    return tokenizers


# -- the recipe --------------------------------------------------------------------------------------------------------
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
