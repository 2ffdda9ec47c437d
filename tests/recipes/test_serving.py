"""lowp compare --inference: one model in several formats, and the accuracy recovered by training for a format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_training_for_a_format_recovers_what_serving_in_it_loses(lowp: Callable[..., Any]) -> None:
    command = ("compare", "digits", "--epochs", "5", "--inference", "int4,binary", "--recover")
    result = lowp(*command, "--out", "served.json")
    assert result.code == 0
    rows = {row["format"]: row for row in json.loads(Path("served.json").read_text())["rows"]}
    assert list(rows) == ["fp32", "int4", "binary"]
    best = rows["fp32"]["numbers"]["accuracy"]
    assert best > 0.9
    assert rows["binary"]["numbers"]["accuracy"] < best
    assert rows["int4"]["trained"]["accuracy"] >= best - 0.015
    assert rows["binary"]["trained"]["accuracy"] > max(rows["binary"]["numbers"]["accuracy"], best - 0.03)
    assert rows["int4"]["bytes"] < rows["fp32"]["bytes"] / 3
    assert rows["binary"]["bytes"] < rows["fp32"]["bytes"] / 10
    assert "trained" in result.out and "µJ" in result.out


def test_every_format_is_served_or_says_why_not(lowp: Callable[..., Any]) -> None:
    formats = "fp16,bf16,mxfp4,nvfp4,ternary,e5m7,mxfp8,flex16+5"
    result = lowp("compare", "digits", "--epochs", "1", "--inference", formats, "--out", "all.json")
    assert result.code == 0
    rows = json.loads(Path("all.json").read_text())["rows"]
    assert [row["format"] for row in rows] == ["fp32", *formats.split(",")]
    assert not any("failure" in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--inference", "int9"), "unknown format 'int9'"),
        (("--inference", "e8m0"), "no negative numbers"),
        (("--inference", "int8", "--precision", "fp16"), "omit --precision and --sweep"),
        (("--recover",), "give --inference too"),
    ],
)
def test_what_cannot_be_served_is_refused_before_training(
    lowp: Callable[..., Any], arguments: tuple[str, ...], words: str
) -> None:
    result = lowp("compare", "digits", *arguments)
    assert result.code == 2
    assert words in result.err
