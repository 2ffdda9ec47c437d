"""WordPiece: words of a text as pieces of a vocabulary, with the characters that each piece stands for.

Devlin et al. 2019 (BERT), after Wu et al. 2016, arXiv 1609.08144, section 4.1: a word is cut into the longest pieces
that the vocabulary has, from the left; pieces that continue a word begin with ##.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lowp.recipes.data.files import Published, read_text

__all__ = ["Piece", "WordPiece"]

VOCABULARY = Published("a WordPiece vocabulary", "https://huggingface.co/google-bert/bert-base-uncased (vocab.txt)")
PADDING, UNKNOWN, START, SEPARATOR = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_LONGEST_WORD = 100  # a longer one is unknown, as in BERT


class Piece(NamedTuple):
    """A number of the vocabulary, and from which to before which character of the text it stands."""

    number: int
    start: int
    end: int


class WordPiece:
    """A vocabulary: the pieces in the order of their numbers. Text is taken in small letters, without accents."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.numbers = {piece: number for number, piece in enumerate(pieces)}
        self.size = len(pieces)
        self.padding, self.unknown, self.start, self.separator = (
            self.numbers[special] for special in (PADDING, UNKNOWN, START, SEPARATOR)
        )

    @classmethod
    def read(cls, path: Path, most: int) -> WordPiece:
        """A vocabulary file, a piece a line, of `most` pieces at most; raises InvalidInput."""
        pieces = read_text(VOCABULARY, path).split("\n")
        pieces = [piece.rstrip("\r") for piece in (pieces[:-1] if not pieces[-1] else pieces)]
        missing = [special for special in (PADDING, UNKNOWN, START, SEPARATOR) if special not in pieces]
        if missing:
            raise VOCABULARY.broken(path, f"has no {', '.join(missing)} among its {len(pieces):,} lines")
        if len(pieces) > most:
            raise VOCABULARY.broken(path, f"has {len(pieces):,} lines, and the network embeds {most:,}")
        return cls(pieces)

    @classmethod
    def build(cls, texts: Iterable[str], most: int, least: int = 3) -> WordPiece:
        """A vocabulary of these texts: all their characters, and words that are there `least` times, frequent first.

        The characters are there alone and as continuations, so that every word of the texts has pieces.
        """
        words = Counter(word for text in texts for word, _, _ in words_of(text))
        characters = sorted({character for word in words for character in word})
        pieces = [PADDING, UNKNOWN, START, SEPARATOR, *characters, *(f"##{character}" for character in characters)]
        frequent = sorted((-count, word) for word, count in words.items() if count >= least and len(word) > 1)
        return cls([*pieces, *(word for _, word in frequent)][:most])

    def pieces(self, text: str) -> list[Piece]:
        """The pieces of a text; a word without pieces is one unknown piece."""
        return [piece for word, start, end in words_of(text) for piece in self._cut(word, start, end)]

    def _cut(self, word: str, start: int, end: int) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        # Where a letter became several or none, its place in the text is only known to be within the word.
        exact = len(word) == end - start
        while at < len(word) <= _LONGEST_WORD:
            mark = "##" if at else ""
            fitting = (stop for stop in range(len(word), at, -1) if mark + word[at:stop] in self.numbers)
            stop = next(fitting, at)
            if stop == at:
                break
            place = (start + at, start + stop) if exact else (start, end)
            pieces.append(Piece(self.numbers[mark + word[at:stop]], *place))
            at = stop
        return pieces if at == len(word) else [Piece(self.unknown, start, end)]


def words_of(text: str) -> Iterable[tuple[str, int, int]]:
    """The words of a text, small and without accents, with their places; each mark of punctuation is a word."""
    begin = None
    for place, character in enumerate(text + " "):
        apart = _is_mark(character)
        if character.isspace() or apart or unicodedata.category(character) in ("Cc", "Cf"):
            if begin is not None:
                yield from _plain(text, begin, place)
                begin = None
            if apart:
                yield character, place, place + 1
        elif begin is None:
            begin = place


def _plain(text: str, begin: int, end: int) -> Iterable[tuple[str, int, int]]:
    word = unicodedata.normalize("NFD", text[begin:end].lower())
    word = "".join(character for character in word if unicodedata.category(character) != "Mn")
    if word:
        yield word, begin, end


def _is_mark(character: str) -> bool:
    """Punctuation, and every other mark of ASCII such as $ and ~; Chinese characters are words of their own too."""
    code = ord(character)
    in_ascii = 33 <= code < 127 and not character.isalnum()
    return in_ascii or unicodedata.category(character).startswith("P") or 0x4E00 <= code <= 0x9FFF
