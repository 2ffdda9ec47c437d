"""Texts at their bounds: how long they have to be, where they are cut, and how dates are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes import gpt, seq2seq, words
from lowp.recipes.recipe import TensorExamples


@pytest.mark.parametrize(("count", "is_enough"), [(49, False), (50, True), (55, True)])
def test_a_text_has_words_for_a_context_in_its_last_tenth(tmp_path: Path, count: int, is_enough: bool) -> None:
    file = tmp_path / "a.txt"
    file.write_text(" ".join(["the", "a"] * (count // 2) + ["end"] * (count % 2)))
    if not is_enough:
        with pytest.raises(InvalidInput, match=f"has {count} words, and 50 are needed"):
            words.read_words(file, 3, 3)
        return
    data = words.read_words(file, 3, 3)
    cut = round(count * 0.9)
    assert data.description == f"{file}: {cut} words to train on, {count - cut} held back, 2 different ones"
    assert isinstance(data.training, TensorExamples) and isinstance(data.validation, TensorExamples)
    context, following = data.training.tensors
    assert context[:2].tolist() == [[1, 2, 1], [2, 1, 2]] and following[:2].tolist() == [2, 1]
    assert (len(context), len(data.validation)) == (cut - 3, count - cut - 3)
    assert (int(data.validation.tensors[1][-1]) == 0) == (count % 2 == 1)  # a word beyond the two most frequent


@pytest.mark.parametrize(("count", "is_enough"), [(119, False), (120, True)])
def test_a_text_has_bytes_for_a_passage_in_its_last_tenth(tmp_path: Path, count: int, is_enough: bool) -> None:
    (tmp_path / "input.txt").write_bytes(bytes(place % 251 for place in range(count)))
    if not is_enough:
        with pytest.raises(InvalidInput, match="has 119 bytes, and 120 are needed"):
            gpt.read_passages(tmp_path, 10)
        return
    data = gpt.read_passages(tmp_path, 10)
    assert (len(data.training), len(data.validation)) == (10, 1)
    assert data.description == f"{tmp_path / 'input.txt'}: 108 bytes to train on, 12 held back"
    assert data.validation.batch(torch.tensor([0]))[1].tolist() == [list(range(109, 119))]


def test_passages_follow_each_other_up_to_the_last_byte() -> None:
    for count, passages in ((21, 2), (20, 1), (11, 1), (10, 0)):
        text = gpt.Passages(torch.arange(count, dtype=torch.uint8), 10)
        assert len(text) == passages
    text = gpt.Passages(torch.arange(21, dtype=torch.uint8), 10)
    here, following = text.batch(torch.tensor([1, 0]))
    assert here[:, 0].tolist() == [10, 0] and following[:, -1].tolist() == [20, 10]
    starts = {int(text.batch(torch.tensor([0]), torch.Generator().manual_seed(seed))[0][0, 0]) for seed in range(200)}
    assert starts == set(range(10))
    late = {int(text.batch(torch.tensor([1]), torch.Generator().manual_seed(seed))[0][0, 0]) for seed in range(20)}
    assert late == {10}  # a later one would end beyond the text


DATES = {
    0: ("3 May 2016", "3 May 1999"),
    1: ("May 3, 2016", "May 3, 1999"),
    2: ("Tue, 3 May 2016", "Mon, 3 May 1999"),
    3: ("5/3/16", "May 3 1999"),
    4: ("the 3. of may 2016", "the 3. of may 1999"),
}


@pytest.mark.parametrize("style", DATES)
def test_dates_are_written_in_five_styles(style: int) -> None:
    import datetime

    days = [datetime.date(year, 5, 3).toordinal() for year in (2016, 1999)]
    assert tuple(seq2seq._date(day, style)[0] for day in days) == DATES[style]
    assert [seq2seq._date(day, style)[1] for day in days] == ["2016-05-03", "1999-05-03"]
    assert seq2seq._date(datetime.date(2000, 1, 9).toordinal(), 3) == ("1/9/00", "2000-01-09")


def test_drawn_dates_are_of_a_century() -> None:
    pairs = seq2seq.drawn_dates(3000)
    years = [int(iso[:4]) for _, iso in pairs]
    assert (min(years), max(years)) == (1950, 2049) and len(pairs) == len(set(pairs)) > 2900
