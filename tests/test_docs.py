"""What the pages of docs/ say beside their code: tables of facts of the package and of bench/results, and links.

Where a row is wrong the error shows the one that is right, ready to be pasted into the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowp.presets import PRESETS
from lowp.recipes import RECIPES, get

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the first table on a page whose header begins with these cells."""
    _, _, rest = text_of(page).partition(f"| {first} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    assert lines, f"{page} has no table that begins with {first!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def result(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def test_the_formats_to_choose_from_have_the_numbers_of_lowp_formats(lowp: Callable[..., Any]) -> None:
    lines = [line for line in lowp("formats", "--markdown").out.splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    known = {row[0]: dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)}
    columns = ("smallest", "normal", "maximum", "max error", "digits", "bytes")
    for name, *cells in table("choosing.md", "format | smallest"):
        assert cells == [known[name][column] for column in columns]


def test_the_presets_that_a_page_advises_exist() -> None:
    shown = re.findall(r'lowp\.Precision\("([^"]+)"', "".join(page.read_text() for page in PAGES))
    assert {"fp16", "bf16", "fp8", "fp16-storage"} <= set(shown)
    advised = [row[-1] for row in table("migration.md", "apex | what it did")]
    assert {name for cell in advised for name in re.findall("`([^`]+)`", cell)} <= set(PRESETS)


def test_every_recipe_is_in_the_table_with_its_sizes() -> None:
    wanted = []
    for name in RECIPES:
        recipe = get(name)
        parameters = [f"{size.parameters:,}" for size in recipe.sizes.values()]
        wanted.append([f"`{name}`", recipe.summary, *parameters, recipe.metric.name, recipe.source])
    for row, right in zip(table("recipes.md", "recipe | what"), wanted, strict=True):
        assert row == right, f"docs/recipes.md needs | {' | '.join(right)} |"


def test_the_sets_that_recipes_look_for_have_the_addresses_that_the_errors_name() -> None:
    from lowp.recipes.data import cifar, detection, folders, mnist, parallel, rossmann, segmentation, text, tweets

    sets = (
        *(cifar.CIFAR10, detection.VOC, folders.IMAGENET, mnist.MNIST, parallel.PARALLEL),
        *(rossmann.ROSSMANN, segmentation.MASKED, text.TEXT, tweets.TWEETS),
    )
    for one in sets:
        for address in re.findall(r"https?://[^\s,)]+", one.where):
            assert address in text_of("recipes.md")


def test_the_speeds_of_served_layers_are_those_of_the_bench() -> None:
    many, one = [], []
    for name, instructions in (("inference", "AVX-512 VNNI"), ("inference-avx2", "AVX2")):
        recorded = result(name)
        assert "AMD EPYC" in recorded["machine"]["words"]
        for row in recorded["rows"]:
            times = {way: f"{row['seconds']['fp32'] / seconds:.1f}" for way, seconds in row["seconds"].items()}
            if row["batch"] == 1:
                formats = ("int8", "int4", "mxfp4", "nvfp4", "ternary", "binary")
                one.append([instructions, *(times[f"lowp {format}"] for format in formats)])
                continue
            peers = [times[f"{peer} int8"] for peer in ("torch", "onnxruntime", "torchao")]
            held = recorded["kernels"] == "avx2"  # the others cannot be
            own = [times["lowp int8, calibrated"], times["lowp int8, dynamic"]]
            many.append([instructions, str(row["batch"]), *own, *([""] * 3 if held else peers)])
    for right, first in ((many, "instructions | n"), (one, "instructions | int8")):
        for found, wanted in zip(table("serving.md", first), right, strict=True):
            assert found == wanted, f"docs/serving.md needs | {' | '.join(wanted)} |"


def told(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@pytest.mark.parametrize(("kind", "name"), [("AVX2", "step"), ("AVX-512", "step-avx512")])
def test_the_times_of_a_step_are_those_of_the_bench(kind: str, name: str) -> None:
    recorded = result(name)
    assert recorded["held_to_avx2"] is (kind == "AVX2") and recorded["threads"] == 2
    wanted = [
        [
            *(network, format, *(told(row[key], 1) for key in ("fp32_ms", "lowp_ms", "torch_autocast_ms"))),
            *(told(row[key], 2) for key in ("lowp_over_fp32", "torch_over_fp32")),
            row["products"],
        ]
        for network, formats in recorded["results"].items()
        for format, row in formats.items()
    ]
    assert table("performance.md", f"network, {kind} | format") == wanted


def test_the_times_of_an_int16_step_are_those_of_the_bench() -> None:
    rows = result("flex")["rows"]
    wanted = [[name, f"{1e3 * row['seconds']:.0f}", f"{row['of_fp32']:.2f}"] for name, row in rows.items()]
    assert table("performance.md", "precision | ms a step") == wanted


def test_what_a_second_thread_gains_is_that_of_the_bench() -> None:
    wanted = []
    for kind, name in (("AVX-512", "step-avx512"), ("AVX2", "step")):
        two, one = result(name)["results"], result(f"{name}-1")
        assert one["threads"] == 1
        for network, formats in one["results"].items():
            for format, alone in formats.items():
                both = two[network][format]
                times = [(alone[key], both[key]) for key in ("fp32_ms", "lowp_ms")]
                cells = [f"{one:.1f}" for pair in times for one in pair]
                gains = [f"{first / second:.2f}" for first, second in times]
                wanted.append([kind, network, format, *cells, *gains, told(alone["lowp_over_fp32"], 2)])
    assert table("performance.md", "processor | network") == wanted


def test_the_memory_of_a_step_is_that_of_the_bench() -> None:
    networks = result("memory")["results"]
    wanted = [
        [network, way, *(f"{row[key] / 2**20:.1f}" for key in ("saved", "peak", "process"))]
        for network, ways in networks.items()
        for way, row in ways.items()
    ]
    assert table("performance.md", "network, MiB | way") == wanted
    for ways in networks.values():  # what the page says of them
        mine, theirs = ways["lowp bf16"], ways["torch.autocast bf16"]
        assert mine["saved"] <= theirs["saved"] and mine["peak"] <= theirs["peak"] + 2048


@pytest.mark.parametrize(("place", "results"), [(1, ""), (2, "-avx512")])
def test_the_readme_says_of_each_processor_what_was_measured(place: int, results: str) -> None:
    networks = result(f"step{results}")["results"].values()
    flex = result(f"flex{results}")["rows"]
    kinds = "bf16", "fp16"
    spans: list[tuple[list[float], int | None]] = [
        *(([rows[kind]["lowp_over_fp32"] for rows in networks], 1) for kind in kinds),
        *(([rows[kind]["torch_autocast_ms"] / rows[kind]["fp32_ms"] for rows in networks], None) for kind in kinds),
        *(([flex[name]["of_fp32"]], 1) for name in ("dfp16", "flex16+5")),
    ]
    wanted = []
    for values, digits in spans:
        digits = digits if digits is not None else 1 if max(values) < 10 else 0
        low, high = (f"{one:.{digits}f}" for one in (min(values), max(values)))
        wanted.append(low if low == high else f"{low} to {high}")
    assert [row[place] for row in table("../README.md", "step | AVX2")] == wanted


def test_the_fixed_costs_of_an_op_are_those_of_the_bench() -> None:
    measured = result("call")["microseconds"]
    ops = ("linear", "linear and its backward", "relu")
    wanted = [[region, *(str(row[op]) for op in ops)] for region, row in measured.items() if "linear" in row]
    assert table("performance.md", "region | linear, no gradient") == wanted


def test_the_shares_of_the_bandwidth_are_those_of_the_bench() -> None:
    rows = result("kernels")["rows"]
    names = ("lowp fp16", "lowp bf16", "lowp e4m3fn", "lowp fp16:stochastic", "lowp statistics")
    shown = [share for _, share in table("performance.md", "what | share")]
    assert shown == [f"{rows[name]['percent_of_copy']:.0f} %" for name in names]


def test_the_page_quotes_the_warning_of_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels import cpu

    monkeypatch.setattr(cpu, "PATH", Path(".../lowp/kernels/liblowp_cpu.so"))
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
    """The anchors that GitHub gives a page's headings."""
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
