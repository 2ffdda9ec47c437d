"""The matrix of docs/exactness.md: lowp is right on its inputs, and the tables match the results."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lowp.formats import FORMATS, FloatFormat, parse

NAMES = [row.name for row in FORMATS.values() if isinstance(row, FloatFormat) and row.bits <= 32]
NAMES += ["e5m7", "e4m3", "e3m4", "e4m3b11fnuz", "e4m3finite", "e5m2finite", "e5m10finite"]


@pytest.fixture
def exactness(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(repository / "bench")
    import exactness  # type: ignore[import-not-found]

    return exactness


@pytest.fixture
def results(repository: Path) -> dict[str, Any]:
    return json.loads((repository / "bench" / "results" / "exactness.json").read_text())  # type: ignore[no-any-return]


def wrong_of_lowp(exactness: ModuleType, name: str, thinned: int) -> list[Any]:
    format, own = parse(name), list(exactness.ours())
    assert {peer.name for peer in own} >= {"lowp reference", "lowp bitwise"}
    dtypes = [torch.float64] if name == "fp32" else [torch.float32, torch.float64]
    rows = [row for dtype in dtypes for row in exactness.measure(format, dtype, [], own, thinned)]
    assert len(rows) >= 6 * len(own) * len(dtypes) and all(row["cases"] for row in rows)
    return [row for row in rows if row["wrong"]]


@pytest.mark.parametrize("name", NAMES)
def test_lowp_is_right_on_a_sample_of_the_cases(exactness: ModuleType, name: str) -> None:
    assert wrong_of_lowp(exactness, name, 61) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lowp_is_right_on_every_case(exactness: ModuleType, name: str) -> None:
    assert wrong_of_lowp(exactness, name, 1) == []


def test_the_matrix_has_these_formats(exactness: ModuleType, results: dict[str, Any]) -> None:
    assert [format.name for format in exactness.formats()] == NAMES
    assert {row["format"] for row in results["lowp"]} == {str(parse(name)) for name in NAMES}


def test_the_kept_results_have_no_mismatch_of_lowp(results: dict[str, Any]) -> None:
    assert {row["peer"] for row in results["lowp"]} == {"lowp reference", "lowp bitwise", "lowp cpu"}
    assert sum(row["cases"] for row in results["lowp"]) > 5_000_000
    assert not [row for row in results["lowp"] if row["wrong"]]
    assert not [row for row in results["rows"] if row["peer"] == "lowp.shims" and row["wrong"]]


def test_the_oracle_agrees_with_berkeley_softfloat(results: dict[str, Any]) -> None:
    rows = [row for row in results["rows"] if row["peer"] == "Berkeley SoftFloat"]
    assert len({(row["format"], row["dtype"], row["rounding"]) for row in rows}) == 15
    assert not [row for row in rows if row["wrong"]]


def test_the_documents_have_the_tables_of_the_results(exactness: ModuleType, results: dict[str, Any]) -> None:
    for page in exactness.PAGES:
        document = page.read_text()
        assert document == exactness.written(document, results)


def test_a_mismatch_is_found_and_told_apart_by_kind(exactness: ModuleType) -> None:
    def truncating(cast: object, dtype: torch.dtype) -> Any:
        return lambda x: (x.view(torch.int32) >> 16 << 16).view(torch.float32)

    peer = exactness.Peer("truncating", "1", truncating)
    rows = list(exactness.measure(parse("bf16"), torch.float32, [peer], [], thinned=7))
    by_mode = {(row["rounding"], row["overflow"]): row["wrong"] for row in rows}
    assert set(by_mode["toward-zero", "inf"]) == {"NaN"}  # payloads below the cut become infinity
    assert {"NaN", "tie", "subnormal", "other"} <= set(by_mode["nearest-even", "inf"])
    first = rows[0]["example"]
    assert first["bits"].startswith("0x") and first["found"] != first["right"]
