"""Tweets and WordPiece: the published numbers of pieces, the positions of their characters, and errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes.bert import Tweet, WordPiece, drawn_tweets, evaluate, read_tweets, span_data, words_of

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PIECES = [
    *SPECIAL,
    "un",
    "##aff",
    "##able",
    "want",
    "##want",
    "##ed",
    "run",
    "##ning",
    ",",
    "cafe",
    "neutral",
    "positive",
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unaffable", ["un", "##aff", "##able"]),
        ("UNwanted, running", ["un", "##want", "##ed", ",", "run", "##ning"]),
        ("wanted xunning", ["want", "##ed", "[UNK]"]),
        ("Café", ["cafe"]),
        ("  \t\n ", []),
        ("", []),
    ],
)
def test_a_word_is_cut_into_the_longest_pieces_from_the_left(text: str, expected: list[str]) -> None:
    assert [PIECES[piece.id] for piece in WordPiece(PIECES).pieces(text)] == expected


def test_a_piece_knows_its_characters() -> None:
    text = "so UNwanted, caf\u00e9!"
    found = [text[piece.start : piece.end] for piece in WordPiece(PIECES).pieces(text)]
    assert found == ["so", "UN", "want", "ed", ",", "caf\u00e9", "!"]


def test_words_are_split_at_spaces_punctuation_and_chinese_characters() -> None:
    assert words_of("It's $5,\u00a0you\u4e2dme") == ["it", "'", "s", "$", "5", ",", "you", "\u4e2d", "me"]


def test_a_built_vocabulary_has_pieces_for_every_word_of_its_texts() -> None:
    built = WordPiece.build(["aaa bb bb bb cab"], max_size=100)
    names = list(built.ids)
    assert names[:4] == SPECIAL and "bb" in names and "cab" not in names
    assert built.unknown not in [piece.id for piece in built.pieces("cab bbaa")]


def test_a_vocabulary_file_is_read_in_its_order_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(PIECES) + "\n")
    assert WordPiece.read(file, 100).ids == WordPiece(PIECES).ids
    with pytest.raises(InvalidInput, match=r"vocab\.txt has 16 lines, and the network embeds 10"):
        WordPiece.read(file, 10)
    file.write_text("hello\n")
    with pytest.raises(InvalidInput, match=r"has no \[PAD\], \[UNK\], \[CLS\], \[SEP\] among its 1 lines"):
        WordPiece.read(file, 100)


CSV = """textID,text,selected_text,sentiment
a1,"I want, cafe",want,positive
a2,,,neutral
a3,running cafe,running cafe,neutral
"""


def test_rows_without_a_text_are_left_out_and_parts_have_places(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    tweets = read_tweets(tmp_path)
    assert [(tweet.text[tweet.start : tweet.end], tweet.sentiment) for tweet in tweets] == [
        ("want", "positive"),
        ("running cafe", "neutral"),
    ]
    data = span_data([tweets[1], *tweets], WordPiece(PIECES), 12, "some")
    batch = data.training.batch(torch.arange(2))
    numbers = [PIECES[number] for number in batch["pieces"][0].tolist()]
    assert numbers == ["[CLS]", "positive", "[SEP]", "[UNK]", "want", ",", "cafe", "[SEP]", *["[PAD]"] * 4]
    assert batch["segments"][0].tolist() == [0] * 3 + [1] * 5 + [0] * 4
    assert batch["start"].tolist() == [4, 3] and batch["end"].tolist() == [4, 5]
    assert data.description == "some, 16 pieces: 2 to train on, 1 held back"


def test_a_long_text_is_cut_and_left_out_where_its_part_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('text,selected_text,sentiment\n"cafe cafe want",want,positive\n')
    tweets = read_tweets(tmp_path) * 3
    assert len(span_data(tweets, WordPiece(PIECES), 7, "").training) == 2
    assert len(span_data(tweets, WordPiece(PIECES), 6, "").training) == 0


def test_every_tenth_text_is_for_validation() -> None:
    data = span_data([Tweet("want", "positive", 0, 4)] * 21, WordPiece(PIECES), 12, "")
    assert (len(data.training), len(data.validation)) == (18, 3)


def test_a_word_of_more_than_a_hundred_characters_is_unknown() -> None:
    built = WordPiece.build(["a"], max_size=9)
    assert [len(built.pieces("a" * length)) for length in (99, 100, 101)] == [99, 100, 1]


def test_a_vocabulary_may_have_as_many_pieces_as_the_network_embeds(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    assert list(WordPiece.read(tmp_path / "vocab.txt", len(PIECES)).ids) == PIECES
    with pytest.raises(InvalidInput, match="has 16 lines, and the network embeds 15"):
        WordPiece.read(tmp_path / "vocab.txt", len(PIECES) - 1)


def test_a_part_has_no_piece_that_only_touches_it() -> None:
    places = []
    for part in (",", "cafe", "want"):
        tweets = [Tweet("cafe,want", "positive", start := "cafe,want".index(part), start + len(part))]
        batch = span_data(tweets * 2, WordPiece(PIECES), 12, "").training.batch(torch.arange(1))
        places.append((int(batch["start"]), int(batch["end"])))
    assert places == [(4, 4), (3, 3), (5, 5)]


BROKEN = {
    "column": ("text,sentiment\nx,neutral\n", "has no column selected_text; it has text, sentiment"),
    "sentiment": (CSV.replace("positive", "glad"), "has the sentiment 'glad' in line 2"),
    "empty": ("", "has no column text, selected_text, sentiment; it has nothing"),
    "no rows": ("text,selected_text,sentiment\n", "has no row with a text and a part of it"),
    "cut line": (CSV + "a4,x\n", "has 4 columns, but line 5 has a different number"),
    "quote": ('text,selected_text,sentiment\n"x"y,x,neutral\n', "is not CSV"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong_with_it(case: str, tmp_path: Path) -> None:
    content, text = BROKEN[case]
    (tmp_path / "train.csv").write_text(content)
    with pytest.raises(InvalidInput, match=rf"tweets with sentiment: .*train\.csv {text}.* Get it again from https"):
        read_tweets(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(b"text\xff")
    with pytest.raises(InvalidInput, match=r"train\.csv is not UTF-8 text: byte 4 is 0xff"):
        read_tweets(tmp_path)


def test_drawn_tweets_have_the_sentiments_of_the_real_ones_and_a_part() -> None:
    tweets = drawn_tweets(2000)
    shares = [sum(tweet.sentiment == name for tweet in tweets) / 2000 for name in ("neutral", "positive", "negative")]
    assert shares == pytest.approx([0.405, 0.312, 0.283], abs=0.03)
    assert all(0 <= tweet.start < tweet.end <= len(tweet.text) for tweet in tweets)
    assert tweets == drawn_tweets(2000) != drawn_tweets(2000, seed=1)
    parts = {(tweet.sentiment, tweet.text[tweet.start : tweet.end]) for tweet in tweets}
    assert {text for kind, text in parts if kind == "neutral"} == {
        tweet.text for tweet in tweets if tweet.sentiment == "neutral"
    }
    assert {kind: sum(one == kind for one, _ in parts) for kind in ("positive", "negative")} == {
        **{"positive": 9, "negative": 9}
    }
    assert ("positive", "so happy") in parts and ("negative", "so sad") in parts
    both = sum("so happy" in tweet.text for tweet in tweets if tweet.sentiment == "negative")
    assert both == pytest.approx(0.3 / 9 * 0.283 * 2000, abs=12)  # an opposite feeling in three of ten
    assert {len(tweet.text.split(", ")) for tweet in tweets} == {1, 2, 3, 4, 5}
    ends = {tweet.text[-1] for tweet in tweets if tweet.sentiment != "neutral"}
    assert {"!", "."} < ends and not any(
        tweet.text.endswith(("!", ".")) for tweet in tweets if not tweet.start and tweet.sentiment == "neutral"
    )


def test_a_vocabulary_has_characters_first_and_then_words_by_their_number() -> None:
    built = WordPiece.build(["b cab b ab ba b ab ba cab a"], max_size=100, min_count=2)
    names = [*SPECIAL, *"abc", "##a", "##b", "##c", "ab", "ba", "cab"]  # each once, though "b" is a word, too
    assert built.ids == {name: place for place, name in enumerate(names)}
    assert list(WordPiece.build(["ab ab ab cd cd"], max_size=13, min_count=2).ids)[-1] == "ab"
    assert (
        "cab" not in WordPiece.build(["cab cab"], max_size=100).ids and "cab" in WordPiece.build(["cab " * 3], 100).ids
    )


def test_the_part_that_is_found_is_compared_with_the_true_one() -> None:
    def batch(segments: list[list[int]], found: list[tuple[int, int]], true: list[tuple[int, int]]) -> dict[str, Any]:
        scores = torch.zeros(len(found), 4, 2)
        scores[:, 0] = 9.0  # of what is not of the text
        for row, ends in enumerate(found):
            for index, place in enumerate(ends):
                scores[row, place, index] = 2.0
        start, end = torch.tensor(true).unbind(1)
        return {"pieces": scores, "segments": torch.tensor(segments), "start": start, "end": end}

    batches = [
        batch([[0, 1, 1, 1], [0, 1, 1, 0]], [(1, 3), (2, 1)], [(1, 2), (2, 2)]),  # an end is no earlier than its start
        batch([[0, 1, 1, 1]] * 2, [(1, 1), (2, 3)], [(3, 3), (2, 3)]),
    ]
    found = evaluate(cast(torch.nn.Module, lambda pieces, segments: pieces), batches)
    three, two = math.log(math.exp(2) + 2), math.log(math.exp(2) + 1)
    assert found["overlap"] == pytest.approx((2 / 3 + 1 + 0 + 1) / 4) and found["exact"] == 1 / 2
    assert found["loss"] == pytest.approx(((three - 2) * 3 + three + (two - 2) + two + three + three) / 4)
