"""`lowp convert --to`: what became of every tensor, and of what is none, in a table, in words and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SHOWN = """\
to e4m3fn
tensor                shape   bytes   max error   rms error   flushed   overflowed
──────────────────────────────────────────────────────────────────────────────────
small[bold].weight      2x2     4 B      0.0625      0.0313         1            0
large.weight            1x1     4 B           -           -         -            1
[/b]ias                   2     8 B           -           -         -            0
steps                scalar     8 B           -           -         -            0

kept in float32, a number is beyond 448; e4m3fn:saturate would cut them: large.weight
kept in float32, asked for (keep): [/b]ias
kept in int64, not floating-point: steps
left out: name[red], a str and no tensor
36 B became 24 B (0.67 of them): small[bold].safetensors
"""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    content = {
        "small[bold].weight": torch.tensor([[1.0, 1.0625], [2.0**-20, -3.0]]),  # 1.0625 is in the middle of 1 and 1.125
        "large.weight": torch.tensor([[900.0]]),
        "[/b]ias": torch.tensor([0.1, 1.0]),
        "steps": torch.tensor(3),
        "name[red]": "mine",
    }
    torch.save(content, "model.pt")


CONVERT = ("convert", "model.pt", "small[bold].safetensors", "--to", "e4m3fn", "--keep", "*ias")


def test_every_tensor_is_told_with_its_error_and_names_are_no_markup(lowp: Callable[..., Any]) -> None:
    result = lowp(*CONVERT)
    assert (result.code, "\n".join(map(str.rstrip, result.out.splitlines())) + "\n") == (0, SHOWN)


def test_the_progress_counts_every_tensor(lowp: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Bar:
        def __init__(self, *arguments: Any) -> None:
            told.append(arguments)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            told.append("end")

        def advance(self, count: int, name: str) -> None:
            told.append((count, name))

    monkeypatch.setattr("lowp.report.terminal.Bar", Bar)
    lowp(*CONVERT)
    names = ["small[bold].weight", "large.weight", "[/b]ias", "steps"]
    assert told == [("converting", 4, "tensors"), *((1, name) for name in names), "end"]


def test_machines_get_the_same_facts_also_in_a_report(lowp: Callable[..., Any]) -> None:
    result = lowp(*CONVERT, "--json", "--report", "report.json")
    assert result.code == 0
    document = json.loads(result.out)
    assert document == json.loads(Path("report.json").read_text())
    assert (document["files"], document["format"]) == (["small[bold].safetensors"], "e4m3fn")
    assert document["left_out"] == {"name[red]": "str"}
    small = document["tensors"][0]
    assert small == {
        **{"name": "small[bold].weight", "shape": [2, 2], "dtype": "float32", "reason": ""},
        **{"largest_error": 0.0625, "rms_error": pytest.approx(0.03125), "flushed": 1, "overflowed": 0},
        **{"bytes_before": 16, "bytes_after": 4},
    }
    again = lowp(*CONVERT, "--overwrite", "--report", "model.pt")
    assert again.code == 2 and "model.pt" in again.err and torch.load("model.pt", weights_only=True)["steps"] == 3
