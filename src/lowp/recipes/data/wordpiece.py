"""WordPiece: splits the words of a text into the pieces of a vocabulary, with the characters of each piece.

Devlin et al. 2019 (BERT), after Wu et al. 2016, arXiv 1609.08144, section 4.1: a word is split from the left into the
longest pieces in the vocabulary; pieces that continue a word begin with ##. The library `tokenizers`, a dependency of
transformers, splits as BERT's own program does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowp.errors import Unavailable
from lowp.recipes.data.files import Published, read_text

VOCABULARY = Published("a WordPiece vocabulary", "https://huggingface.co/google-bert/bert-base-uncased (vocab.txt)")
PADDING, UNKNOWN, START, SEPARATOR = "[PAD]", "[UNK]", "[CLS]", "[SEP]"


class Piece(NamedTuple):
    """The vocabulary id of a piece, and its characters `text[start:end]`."""

    id: int
    start: int
    end: int


class WordPiece:
    """A vocabulary of pieces in the order of their ids. Text is lowercased and stripped of accents.

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
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [Piece(id, *span) for id, span in zip(encoding.ids, encoding.offsets, strict=True)]


def words_of(text: str) -> list[str]:
    """Return the words of a text, lowercased and without accents; each punctuation character is a word."""
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
