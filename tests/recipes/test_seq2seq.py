"""Parallel text: pairs are read from lines with tabs, and dates are generated in two notations."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes import seq2seq
from lowp.recipes.seq2seq import drawn_dates, pair_data, read_pairs


@pytest.mark.parametrize("name", ["fra.txt", "pairs.tsv"])
def test_the_first_two_fields_of_a_line_are_a_pair(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("Go.\tVa !\tCC-BY 2.0\n\nRun!\tCours\u202f!\n")
    assert read_pairs(tmp_path) == read_pairs(tmp_path / name) == [("Go.", "Va !"), ("Run!", "Cours\u202f!")]


def test_a_line_without_a_tab_and_a_file_without_pairs_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pairs.txt"
    file.write_text("a\tb\nno tab here\n")
    with pytest.raises(InvalidInput, match=r"no two texts separated by a tab in line 2: 'no tab here'\. Get it again"):
        read_pairs(tmp_path)
    file.write_text("a\tb\n")
    with pytest.raises(InvalidInput, match=r"has 1 pairs of texts, but 2 or more are needed"):
        read_pairs(tmp_path)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"parallel text: looked for \*\.tsv or \*\.txt in .*; it holds nothing"):
        read_pairs(tmp_path)


def test_texts_are_bytes_with_an_end_and_long_pairs_are_left_out() -> None:
    data = pair_data([("held", "x"), ("ab", "\u00e9"), ("far too long", "x")], 5, "some")
    text, translation = data.training.batch(torch.arange(1))
    assert text.tolist() == [[100, 101, 2, 0, 0]] and translation.tolist() == [[198, 172, 2, 0, 0]]
    assert data.description == "some: 1 pairs to train on, 1 held back"
    with pytest.raises(InvalidInput, match="no two pairs of up to 1 bytes a text"):
        pair_data([("ab", "c")], 2, "some")


def test_drawn_dates_are_different_and_written_in_full() -> None:
    pairs = drawn_dates(500)
    assert pairs == drawn_dates(500) and len(set(pairs)) == len(pairs) > 480
    for text, iso in pairs:
        date = datetime.date.fromisoformat(iso)
        assert str(date.day) in text and (str(date.year) in text or f"{date.year % 100:02}" in text)
        assert len(text.encode()) < 32


def test_symbols_and_translations_are_counted_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seq2seq, "_scores_and_targets", lambda model, batch: batch)
    assert seq2seq.PADDING not in (1, 2, 3, 4)

    def batch(true: list[list[int]], found: list[list[int]]) -> Any:
        return 2.0 * torch.nn.functional.one_hot(torch.tensor(found), 6), torch.tensor(true)

    none = seq2seq.PADDING
    batches = [batch([[1, 2, none], [3, 1, 1]], [[1, 2, 4], [3, 1, 2]]), batch([[1, 1, 1]], [[1, 1, 1]])]
    found = seq2seq.evaluate(torch.nn.Module(), batches)
    assert found["accuracy"] == 7 / 8 and found["exact"] == 2 / 3
    assert found["loss"] == pytest.approx(math.log(math.exp(2) + 5) - 2 + 2 / 8)
