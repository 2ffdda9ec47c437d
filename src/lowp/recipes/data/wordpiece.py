"""WordPiece: words of a text as pieces of a vocabulary, with the characters that each piece stands for.

Devlin et al. 2019 (BERT), after Wu et al. 2016, arXiv 1609.08144, section 4.1: a word is cut into the longest pieces
that the vocabulary has, from the left; pieces that continue a word begin with ##. The library `tokenizers`, which
transformers brings along, splits and cuts as BERT's own program does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowp.errors import Unavailable
from lowp.recipes.data.files import Published, read_text

__all__ = ["Piece", "WordPiece"]

VOCABULARY = Published("a WordPiece vocabulary", "https://huggingface.co/google-bert/bert-base-uncased (vocab.txt)")
PADDING, UNKNOWN, START, SEPARATOR = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class Piece(NamedTuple):
    """A number of the vocabulary, and from which to before which character of the text it stands."""

    number: int
    start: int
    end: int


class WordPiece:
    """A vocabulary: the pieces in the order of their numbers. Text is taken in small letters, without accents.

    Raises Unavailable where `tokenizers` is not installed.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.numbers = {piece: number for number, piece in enumerate(pieces)}
        self.size = len(pieces)
        self.padding, self.unknown, self.start, self.separator = (
            self.numbers[special] for special in (PADDING, UNKNOWN, START, SEPARATOR)
        )
        tokenizers = _tokenizers()
        self._tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(self.numbers, unk_token=UNKNOWN, max_input_chars_per_word=100)
        )
        self._tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()

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
        words = Counter(word for text in texts for word in words_of(text))
        characters = sorted({character for word in words for character in word})
        pieces = [PADDING, UNKNOWN, START, SEPARATOR, *characters, *(f"##{character}" for character in characters)]
        frequent = sorted((-count, word) for word, count in words.items() if count >= least and len(word) > 1)
        return cls([*pieces, *(word for _, word in frequent)][:most])

    def pieces(self, text: str) -> list[Piece]:
        """The pieces of a text; a word without pieces is one unknown piece."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [Piece(number, *place) for number, place in zip(found.ids, found.offsets, strict=True)]


def words_of(text: str) -> list[str]:
    """The words of a text, small and without accents; each mark of punctuation is a word."""
    tokenizers = _tokenizers()
    plain = tokenizers.normalizers.BertNormalizer().normalize_str(text)
    return [word for word, _ in tokenizers.pre_tokenizers.BertPreTokenizer().pre_tokenize_str(plain)]


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise Unavailable(
            "text is cut into pieces by tokenizers, which is not installed: pip install 'lowp[recipes]'"
        ) from None
    return tokenizers
