"""The page on how lowp is built: its files exist, and a format and an op are added by the rows that it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowp
from lowp.formats import FORMATS, FloatFormat, Specials
from lowp.ops import table
from lowp.ops.rows import OPS
from lowp.policy import Rule


def test_every_file_that_the_page_names_is_there(repository: Path) -> None:
    text = (repository / "docs" / "architecture.md").read_text()
    named = {one for one in re.findall(r"`([\w./]+(?:\.py|\.hpp|\.md|/))`", text) if "/" in one or one.endswith(".py")}
    roots = (repository, repository / "src" / "lowp")
    assert len(named) > 20
    assert [one for one in sorted(named) if not any((root / one).exists() for root in roots)] == []


def test_every_room_has_a_line_in_the_tree(repository: Path) -> None:
    tree = (repository / "docs" / "architecture.md").read_text().split("```")[1]
    rooms = {one.name for one in (repository / "src" / "lowp").iterdir() if (one / "__init__.py").exists()}
    assert [room for room in sorted(rooms) if not re.search(rf"\b{room}\b", tree)] == []


def test_a_format_is_added_by_a_row(monkeypatch: pytest.MonkeyPatch, lowp: Callable[..., Any]) -> None:
    import lowp as library

    row = FloatFormat("mine9", 5, 3, Specials.FN)
    monkeypatch.setitem(FORMATS, "mine9", row)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(library.quantize(x, "mine9"), library.quantize(x, "e5m3fn"))
    with library.autocast("mine9"):
        assert torch.equal(x[:4] @ x[:4], (library.quantize(x[:4], "e5m3fn") @ library.quantize(x[:4], "e5m3fn")))
    assert "mine9" in lowp("formats", "mine9").out


def test_an_op_is_added_by_its_name_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(0)).half()
    with lowp.autocast("fp16"):
        assert torch.sinc(x).dtype is torch.float16  # pointwise: in the type of its input
    monkeypatch.setitem(table.TABLES["lowp-1"], "sinc", replace(OPS["acos"], name="sinc"))
    policy = lowp.Precision("fp16").policy.before(Rule.of("acosh", input="fp32"))  # of which no plan is remembered
    with lowp.autocast(policy):
        torch.acosh(x.abs() + 1)
        assert torch.sinc(x).dtype is torch.float32 and torch.equal(torch.sinc(x), torch.sinc(x.float()))
