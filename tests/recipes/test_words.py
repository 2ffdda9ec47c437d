"""Texts of words: the rare ones share an index, and the last tenth is held back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes.words import read_words


def test_the_most_frequent_words_have_the_smallest_indices_and_rare_ones_share_zero(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("A b a b a, " * 20)
    data = read_words(tmp_path, vocabulary=3, context=2)
    words, following = data.training.batch(torch.arange(4))
    assert words.tolist() == [[1, 2], [2, 1], [1, 2], [2, 1]] and following.tolist() == [1, 2, 1, 0]
    assert (len(data.training), len(data.validation)) == (106, 10)
    assert data.description.endswith("108 words to train on, 12 held back, 2 different ones")


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one two three")
    with pytest.raises(InvalidInput, match=r"short\.txt has 3 words, and 50 are needed"):
        read_words(tmp_path / "short.txt", vocabulary=3, context=3)
