"""Running text: passages follow each other, their targets are the next bytes, and files are found and split."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.recipes import gpt
from lowp.recipes.gpt import Passages, pythons_text, read_passages


def test_passages_follow_each_other_and_targets_are_the_next_bytes() -> None:
    passages = Passages(torch.arange(100, dtype=torch.uint8), 8)
    assert len(passages) == 12
    text, following = passages.batch(torch.arange(12))
    assert text.flatten().tolist() == list(range(96)) and torch.equal(following, text + 1)


def test_a_generator_moves_passages_within_the_text() -> None:
    passages = Passages(torch.arange(100, dtype=torch.uint8), 8)
    starts = {
        int(passages.batch(torch.tensor([3]), torch.Generator().manual_seed(seed))[0][0, 0]) for seed in range(100)
    }
    assert starts == set(range(24, 32))
    last, following = passages.batch(torch.tensor([11]), torch.Generator().manual_seed(1))
    assert following.max() <= 99 and last.shape == (1, 8)


@pytest.mark.parametrize("name", ["input.txt", "my book.txt"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_text_is_found_in_a_folder_or_named_and_its_end_is_held_back(name: str, packed: bool, tmp_path: Path) -> None:
    content = b"0123456789" * 100
    file = tmp_path / (name + ".gz" * packed)
    file.write_bytes(gzip.compress(content) if packed else content)
    for path in (tmp_path, file):
        data = read_passages(path, 16)
        assert data.description == f"{file}: 900 bytes to train on, 100 held back"
        assert bytes(data.validation.batch(torch.tensor([0]))[0][0].tolist()) == content[:16]


def test_a_divided_set_is_not_divided_again(tmp_path: Path) -> None:
    for part, length in (("train", 500), ("valid", 60), ("test", 70)):
        (tmp_path / f"wiki.{part}.tokens").write_bytes(b"x" * length)
    description = read_passages(tmp_path, 16).description
    assert description.startswith("wiki.train.tokens and wiki.valid.tokens")
    assert description.endswith("500 bytes to train on, 60 held back")


def test_a_missing_or_short_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"a text file: looked for input\.txt or \*\.txt in .*; it holds nothing"):
        read_passages(tmp_path, 16)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(InvalidInput, match=r"a\.txt has 5 bytes, and 180 are needed"):
        read_passages(tmp_path, 16)


def test_python_carries_english_text_without_printing_it(capsys: pytest.CaptureFixture[str]) -> None:
    training, held, source = pythons_text(30_000)
    assert training.startswith(b"The Zen of Python") and b"Beautiful is better than ugly" in training
    assert len(training) == 27_000 and len(held) == 3_000 and source == "Python's own documentation"
    assert not capsys.readouterr().out


def test_the_likeliest_bytes_follow_one_by_one() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(layers=1, heads=2, width=8, length=6, dropout=0.0).eval()
    with torch.no_grad():
        model.embed.weight.normal_()  # so that no two scores are near each other
    text = wanted = torch.tensor([[1, 2], [3, 4]])
    for count in range(6):
        assert torch.equal(gpt.generate(model, text, count), wanted)
        with torch.no_grad():
            if count < 5:
                wanted = torch.cat([wanted, model(wanted)[:, -1:].argmax(-1)], 1)
    full = torch.arange(6)[None]
    assert torch.equal(gpt.generate(model, full, 0), full) and gpt.generate(model, full, 1).shape == (1, 7)
    for begun, count, needed in ((text, 6, 7), (full, 2, 7), (torch.arange(8)[None], 0, 8)):
        with pytest.raises(InvalidInput, match=f"{needed} positions do not fit a model of 6: generate less"):
            gpt.generate(model, begun, count)
