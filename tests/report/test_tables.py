"""Tables of a comparison fit the terminal, and have no empty columns."""

from __future__ import annotations

import io
import json
from pathlib import Path
from statistics import stdev
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


@pytest.fixture
def ingredients(repository: Path) -> dict[str, Any]:
    text = (repository / "bench" / "results" / "runs" / "gpt-four-bits.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def test_policy_files_are_called_by_their_names_and_compared_with_the_row_above(ingredients: dict[str, Any]) -> None:
    text = printed(ingredients)
    assert "nvfp4-last-high" in text and "bench/policies" not in text and ".toml" not in text
    line = next(line for line in text.splitlines() if line.startswith("nvfp4-last-high "))
    runs = {Path(row["label"]).stem: row["statistics"]["bits_per_byte"] for row in ingredients["variants"]}
    ahead, after = (runs[name]["values"] for name in ("nvfp4-nearest", "nvfp4-last-high"))
    gaps = [two - one for one, two in zip(ahead, after, strict=True)]
    assert f"{sum(gaps) / 3:+.4f} ± {stdev(gaps):.4f}" in line
    assert "to the row above: the same, of runs with the same seed." in text


def test_files_of_one_name_keep_their_folders_and_presets_alone_have_no_such_column(
    ingredients: dict[str, Any], document: dict[str, Any]
) -> None:
    for row in ingredients["variants"][2:4]:
        row["label"] = row["precision"] = f"{row['label'].split('/')[1]}-{len(row['label'])}/high.toml"
    text = printed(ingredients)
    assert "policies-33/high.toml" in text and "policies-35/high.toml" in text
    assert "row above" not in printed(document)
    ingredients["variants"][4]["statistics"]["bits_per_byte"]["values"][0] = None
    assert "row above" in printed(ingredients)
