"""Tables of a comparison fit the terminal, and have no empty columns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lowp.report import tables, terminal


@pytest.fixture
def document(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "bench" / "results" / "runs" / "digits.json").read_text())
    return found


def printed(document: dict[str, Any]) -> str:
    console = terminal.console(stream := io.StringIO())
    for table in tables.comparison_tables(document):
        terminal.show(console, table)
    console.print(tables.notes(document, console.width), markup=False)
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 110, 200])
def test_every_number_is_shown_whole_at_any_width(
    document: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(document)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("97.74% ± 0.24", "0.0837 ± 0.0016", "converges as fp32", "deviations", "21.90%"):
        assert word in text


def test_a_table_in_parts_has_its_title_once_and_the_first_column_in_each(
    document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = printed(document)
    assert text.count("mean ± standard deviation over 5 seeds") == 1
    heads = [line for line in text.splitlines() if line.startswith("precision")]
    assert len(heads) > 3 and text.count("\nflex16+5 ") >= len(heads)


def test_without_a_terminal_a_table_is_one_piece(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert sum(line.startswith("precision") for line in printed(document).splitlines()) == 3


@pytest.mark.parametrize("measured", [True, False])
def test_time_and_memory_are_columns_where_they_were_measured(document: dict[str, Any], measured: bool) -> None:
    for row in document["variants"]:
        row["step_seconds"], row["peak_memory_bytes"] = (1e-3, 2**20) if measured else (None, None)
    text = printed(document)
    assert ("time a step" in text, "memory" in text.partition("gap to fp32:")[0]) == (measured, measured)
