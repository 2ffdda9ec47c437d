"""The pages of recorded runs have exactly the tables of the files in bench/results/runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def runs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(repository / "bench")
    import runs  # type: ignore[import-not-found]

    return runs


def test_the_pages_have_the_tables_of_all_recorded_runs(runs: ModuleType) -> None:
    for path, found in runs.pages().items():
        page = path.read_text()
        assert runs.written(page, found) == page
        assert set(re.findall("<!-- (.*?) -->", page)) == {*found, "end"}


def test_a_run_without_a_place_on_the_page_is_an_error(runs: ModuleType) -> None:
    with pytest.raises(ValueError, match="the page has no marks for digits: add <!-- digits --> and <!-- end -->"):
        runs.written("# no marks", {"digits": "table"})


def test_the_command_is_shown_without_what_does_not_change_its_numbers(runs: ModuleType) -> None:
    line = "lowp compare gpt --jobs 1 --timing 0 --out runs/gpt.json --data data/text --seeds 3 --resume"
    assert runs.command(line) == "lowp compare gpt --data data/text --seeds 3"


def test_every_recorded_run_is_finished_and_names_its_machine_and_seeds(runs: ModuleType) -> None:
    for path in runs.RUNS.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["complete"] and document["machine"]["words"], path.name
        assert all([run["seed"] for run in row["runs"]] == document["seeds"] for row in document["variants"]), path.name
