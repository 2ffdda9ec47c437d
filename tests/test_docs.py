"""The pages of docs/ besides their code: tables of facts of the package and of bench/results, and links.

If a row is wrong the error shows the right one, for the page.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_commands import wrong

from lowp.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def table(page: str, first: str) -> list[list[str]]:
    """Return the rows of the first table on a page whose header begins with these cells."""
    _, _, rest = text_of(page).partition(f"| {first} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    assert lines, f"{page} has no table that begins with {first!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_formats_to_choose_from_have_the_numbers_of_lowp_formats(lowp: Callable[..., Any]) -> None:
    lines = [line for line in lowp("formats", "--markdown").out.splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    known = {row[0]: dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)}
    columns = ("smallest", "normal", "maximum", "max error", "digits", "bytes")
    for name, *cells in table("choosing.md", "format | smallest"):
        assert cells == [known[name][column] for column in columns]


def test_the_presets_that_a_page_advises_exist() -> None:
    shown = re.findall(r'lowp\.Precision\("([^"]+)"', "".join(page.read_text() for page in PAGES))
    assert {"fp16", "bf16", "fp16-storage"} <= set(shown)
    advised = [row[-1] for row in table("migration.md", "apex | what it did")]
    assert {name for cell in advised for name in re.findall("`([^`]+)`", cell)} <= set(PRESETS)


def test_the_sets_that_recipes_look_for_have_the_addresses_that_the_errors_name() -> None:
    from lowp.recipes import bert, gpt, rossmann, seq2seq, unet
    from lowp.recipes.data import cifar, detection, digits, images

    sets = (
        *(cifar.CIFAR10, detection.VOC, images.IMAGENET, digits.MNIST, seq2seq.PARALLEL),
        *(rossmann.SALES, unet.MASKED, gpt.TEXT, bert.TWEETS),
    )
    for one in sets:
        for address in re.findall(r"https?://[^\s,)]+", one.where):
            assert address in text_of("recipes.md")


@pytest.fixture(scope="module")
def tables(repository: Path) -> Iterator[ModuleType]:
    sys.path.insert(0, str(repository / "bench"))
    try:
        import tables  # type: ignore[import-not-found]

        yield tables
    finally:
        sys.path.remove(str(repository / "bench"))


def test_the_figures_in_tables_are_those_of_the_benches(tables: ModuleType) -> None:
    for one in tables.TABLES:
        text = (ROOT / one.page).read_text()
        assert tables.written(text, one) == text, f"{one.page}, {one.first!r} is out of date: python bench/tables.py"


def test_the_page_of_the_monitor_takes_the_figures_that_were_recorded(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "monitoring-faults": {mode: {"a": "N101 after 2", "b": "NOT NAMED"} for mode in tables.MODES},
        "monitoring-quiet": {"digits": {"fp32": {"steps": 24, "alarms": ["x", "y"]}}},
        "monitoring-cost": {"digits": {"added": 0.0123, "ms": 0.21}},
    }
    monkeypatch.setattr(tables, "recorded", found.get)
    text = tables.watched((tables.ROOT / "docs" / "monitoring.md").read_text())
    assert "within 50 steps 1 of 2 are named in plain runs, 1 of 2 in compiled ones, 1 of 2 in DDP." in text
    assert "(2 alarms), and `cost` measures 1.2% of digits's 0.21 ms a step." in text


def test_claims_of_readme_and_the_example_of_lowp_bench_have_the_figures_of_their_results(tables: ModuleType) -> None:
    for page, written in tables.OTHER.items():
        text = (ROOT / page).read_text()
        assert written(text) == text, f"{page} is out of date: python bench/tables.py"


def test_every_picture_shows_the_recorded_results(tables: ModuleType) -> None:
    import figures  # type: ignore[import-not-found]

    pictures = list(figures.pictures())
    assert {picture.path for picture in pictures} == set(DOCS.glob("figures/*.png"))
    for picture in pictures:
        told = f"{picture.path.name} is out of date: python bench/figures.py"
        assert figures.shown(picture.path) == picture.digest, told


def test_every_picture_is_on_a_page() -> None:
    shown = set(re.findall(r"figures/([\w-]+\.png)", "".join(page.read_text() for page in PAGES)))
    assert shown == {picture.name for picture in DOCS.glob("figures/*.png")}


def test_a_picture_is_seven_inches_wide(tables: ModuleType) -> None:
    from PIL import Image

    for path in DOCS.glob("figures/*.png"):
        with Image.open(path) as image:
            assert round(image.width / image.info["dpi"][0], 2) == 7.0, f"{path.name}: python bench/figures.py --all"


def test_a_picture_names_the_files_that_it_shows(tables: ModuleType, tmp_path: Path) -> None:
    import figures

    picture = next(one for one in figures.pictures() if one.path.name == "overview.png")
    copy = picture._replace(path=tmp_path / "overview.png")
    copy.write()
    assert figures.shown(copy.path) == picture.digest
    (tmp_path / "changed.json").write_text("{}")
    assert picture._replace(files=[tmp_path / "changed.json"]).digest != picture.digest


def test_the_chart_of_readme_says_what_was_recorded(tables: ModuleType) -> None:
    import chart  # type: ignore[import-not-found]

    for name in chart.TASKS:
        deviation, gaps = chart.gaps(name)
        assert deviation >= 0 and set(gaps) == set(chart.MARKS)
    found = re.match(r"A step in bf16 takes ([\d.]+) to ([\d.]+) of fp32's time", chart.result_words())
    assert found is not None and 0 < float(found[1]) <= float(found[2])


def test_readme_shows_the_hash_of_the_tests_of_reproducible_runs() -> None:
    known = json.loads((ROOT / "tests" / "reproducing" / "hashes.json").read_text())
    shown = re.findall(r'"mlp/bf16/2": "(\w+)"', (ROOT / "README.md").read_text())
    assert len(shown) == 2 and set(shown) == {known["hashes"]["mlp/bf16"]}


def test_a_figure_out_of_date_is_noticed(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = tables.result

    def changed(name: str) -> Any:
        found = recorded(name)
        if name in ("bench-bert", "bench-unet"):
            for row in found["recipes"][0]["variants"]:
                row["step"]["relative"] *= 2
        if name == "monitoring-cost":
            for row in found["results"].values():
                row["added"] *= 2
        return found

    monkeypatch.setattr(tables, "result", changed)
    for page, written in tables.OTHER.items():
        assert written((ROOT / page).read_text()) != (ROOT / page).read_text()


def test_a_table_out_of_date_is_written_anew(tables: ModuleType) -> None:
    rows = [["bf16", "0.5"], ["fp16", "1.1"]]
    text = "Words.\n\n| format | ratio |\n| --- | --: |\n| bf16 | 0.9 |\n\nMore words.\n"
    written = tables.written(text, tables.Table("page.md", "format | ratio", lambda: rows))
    assert written == text.replace("| bf16 | 0.9 |", "| bf16 | 0.5 |\n| fp16 | 1.1 |")
    assert tables.span([0.52, 0.61], 1) == "0.5 to 0.6" and tables.span([0.52, 0.53], 1) == "0.5"


def test_results_are_of_the_instructions_that_their_names_say(tables: ModuleType) -> None:
    for name in ("step", "step-1", "flex", "gemm"):
        assert tables.result(f"{name}-avx2")["held_to_avx2"] and not tables.result(name)["held_to_avx2"]
    for name, threads in (("step", 2), ("step-avx2", 2), ("step-1", 1), ("step-1-avx2", 1), ("flex", 2)):
        assert tables.result(name)["threads"] == threads


def test_every_bench_that_is_recorded_is_there_and_takes_its_options(repository: Path) -> None:
    command = [sys.executable, str(repository / "bench" / "record.py"), "--list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for line in lines:
        words = line.split()
        assert wrong(words[2:] if words[1] == "-m" else words[1:]) == []
        assert Path(words[-1]).exists()  # the results that it writes anew


def test_a_bf16_step_keeps_no_more_than_torch_autocast(tables: ModuleType) -> None:
    for ways in tables.result("memory")["results"].values():
        mine, theirs = ways["lowp bf16"], ways["torch.autocast bf16"]
        assert mine["saved"] <= theirs["saved"] and mine["peak"] <= theirs["peak"] + 2048


def test_the_page_quotes_the_warning_of_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels import cpu

    monkeypatch.setattr(cpu, "PATH", Path(".../lowp/kernels/cpu/liblowp_cpu.so"))
    cpu.library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning) as caught:
            assert cpu.library() is None
    finally:
        monkeypatch.undo()
        cpu.library.cache_clear()
    assert f"RuntimeWarning: {caught[0].message}" in " ".join(text_of("trouble.md").split())


# -- links ------------------------------------------------------------------------------------------------------------
def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}: there is no {path}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}: {sorted(anchors(target))}"


def test_the_index_has_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of("README.md")))
    assert listed == {page.name for page in DOCS.glob("*.md")} - {"README.md"}
