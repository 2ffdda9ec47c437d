"""Tables of a comparison fit the terminal, and have no empty columns."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from rich.console import Console

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
    for row in ingredients["variants"]:
        row["runs"] = row["runs"][:1]
    for numbers in runs.values():
        numbers["values"] = numbers["values"][:1]
    line = next(line for line in printed(ingredients).splitlines() if line.startswith("nvfp4-last-high "))
    assert f" {gaps[0]:+.4f} " in line, "and no deviation of one"


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


# -- whole tables -----------------------------------------------------------------------------------------------------
def variant(
    label: str, metric: Any, loss: Any, verdict: Any = None, seeds: Any = (0, 1), **more: Any
) -> dict[str, Any]:
    numbers = {
        "acc": dict(zip(("mean", "deviation", "values"), metric, strict=True)),
        "loss": dict(zip(("mean", "deviation"), loss, strict=True)),
        "skipped_steps": {"values": [3.0, 3.0]},
        "loss_scale": {"values": [1024.0, 65536.0]},
        "flushed_gradients": {"values": [0.25, 0.5]},
        "lost_updates": {"values": [None, 0.0]},
        "small_updates": {"values": [1e-5, 2e-5]},
    }
    given = verdict and dict(zip(("verdict", "gap", "gap_in_deviations", "reason"), verdict, strict=True))
    runs = [{"seed": seed} for seed in seeds]
    own = {"label": label, "precision": label, "runs": runs, "statistics": numbers, "verdict": given}
    return {**own, "loss_scaling": "dynamic", **more}


def compared() -> dict[str, Any]:
    kept = {"tensors": 12, "saturated": 5, "writes": 4000, "raises_needed": 9, "raises_in_time": 7, "moved": 1234}
    kept |= {"headroom_sum": 300.0, "measured": 200, "headroom_bits": 1.5}
    runs = [
        {"seed": 0, "shared_exponents": {"all": kept}},
        {"seed": 1, "shared_exponents": {"all": {**kept, "tensors": 14}}},
    ]
    rows = [
        variant("fp32", (0.9, 0.01, [0.89, 0.91]), (0.5, 0.25), ("baseline", 0.0, 0.0, ""), loss_scaling="none"),
        variant("bf16", (0.85, None, [0.84, 0.86]), (0.6, None), ("loses", 0.05, 5.04, "it is worse")),
        variant("a/x.toml", (0.9, 0.02, [0.9, 0.9]), (math.nan, 0.1), ("converges as fp32", -0.001, -0.4, "")),
        variant("b/y.toml", (0.8, 0.02, [0.7, 0.9]), (0.7, 0.1), ("fails", 0.1, 10.0, "far off")),
        variant("e5m2", (0.0, None, []), (0.0, None), statistics=None),
        variant("fp8", (0.8, 0.02, [0.7]), (0.7, 0.1), seeds=(7,)),
    ]
    for row, seconds, memory, relative in zip(
        rows, (2e-3, 5e-3, None, None), (2**20, None, 3 * 2**30, None), (None, None, 0.5, None), strict=False
    ):
        row.update(step_seconds=seconds, peak_memory_bytes=memory, step_relative=relative)
    rows[2]["runs"] = runs
    return {
        "recipe": {"name": "toy", "metric": "acc", "metric_is_share": True, "higher_is_better": True},
        **{"seeds": [0, 1], "baseline": "fp32", "variants": rows},
        "methods": {"time": "time: how", "metric": "metric: how"},
        **{"machine": {"words": "a machine"}, "versions": {"torch": "2", "lowp": "1"}},
    }


SHARES = """\
toy: mean ± standard deviation over 2 seeds
                                              gap to           to the      in seed
precision             acc              loss     fp32        row above   deviations   verdict
────────────────────────────────────────────────────────────────────────────────────────────────────────
fp32        90.00% ± 1.00   0.5000 ± 0.2500        -                -            -   baseline
bf16               85.00%            0.6000    +5.00     +5.00 ± 0.00         +5.0   loses
x           90.00% ± 2.00      not a number    -0.10     -5.00 ± 1.41         -0.4   converges as fp32
y           80.00% ± 2.00   0.7000 ± 0.1000   +10.00   +10.00 ± 14.14        +10.0   fails
e5m2                    -                 -        -                -            -   not run
fp8         80.00% ± 2.00   0.7000 ± 0.1000        -                -            -   no fp32 to judge by

cost, and lost numbers
                             peak   skipped         loss     flushed      lost   updates
precision    time a step   memory     steps        scale   gradients   updates   < 2^-24
────────────────────────────────────────────────────────────────────────────────────────
fp32        2 ms (1.00x)    1 MiB         3         none      37.50%         0   < 0.01%
bf16        5 ms (2.50x)        -         3   1024-65536      37.50%         0   < 0.01%
x                      -    3 GiB         3   1024-65536      37.50%         0   < 0.01%
y                      -        -         3   1024-65536      37.50%         0   < 0.01%
fp8                    -        -         3   1024-65536      37.50%         0   < 0.01%

shared exponents
                      saturated              raises   changes of   free
precision   tensors      writes   writes    in time    exponents   bits
───────────────────────────────────────────────────────────────────────
x                14          10    8,000   14 of 18        2,468   1.50

bf16: loses: it is worse.
y: fails: far off.
gap to fp32: + is worse, - better.
to the row above: the same, of runs with the same seed.
time: how.
metric: how.
a machine; torch 2, lowp 1.
"""
ERRORS = """\
toy: mean ± standard deviation over 1 seed
                                                 gap to             to the      in seed
precision               acc              loss      fp32          row above   deviations   verdict
─────────────────────────────────────────────────────────────────────────────────────────────────────────────
fp32        0.9000 ± 0.0100   0.5000 ± 0.2500         -                  -            -   baseline
bf16                 0.8500            0.6000   +0.0500   -0.0500 ± 0.0000         +5.0   loses
x           0.9000 ± 0.0200      not a number   -0.0010   +0.0500 ± 0.0141         -0.4   converges as fp32
y           0.8000 ± 0.0200   0.7000 ± 0.1000   +0.1000   -0.1000 ± 0.1414        +10.0   fails
e5m2                      -                 -         -                  -            -   not run
fp8         0.8000 ± 0.0200   0.7000 ± 0.1000         -                  -            -   no fp32 to judge by

lost numbers
            skipped         loss     flushed      lost   updates
precision     steps        scale   gradients   updates   < 2^-24
────────────────────────────────────────────────────────────────
fp32              3         none      37.50%         0   < 0.01%
"""


def test_a_comparison_is_shown_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    document = compared()
    assert printed(document) == SHARES
    document["recipe"].update(metric_is_share=False, higher_is_better=False)
    document["seeds"] = [0]
    for row in document["variants"]:
        row.update(step_seconds=None, peak_memory_bytes=None)
    text = printed(document)
    assert text.startswith(ERRORS) and "time: how" not in text and text.count("of runs with the same seed") == 1
    document["variants"][2]["runs"] = [{"seed": 0}, {"seed": 1}]
    document["variants"][1]["statistics"]["lost_updates"]["values"] = [None, None]
    text = printed(document)
    assert "shared exponents" not in text
    lines = [re.split("  +", line) for line in text.splitlines() if line.startswith("bf16 ")]
    assert lines[1][-2:] == ["-", "< 0.01%"]


def test_a_table_as_wide_as_the_terminal_is_one_piece() -> None:
    table = terminal.plain_table("a title", ["one", "two", "three"])
    table.add_row("1", "22", "333")

    def parts(width: int) -> int:
        terminal.show(Console(width=width, file=(stream := io.StringIO())), table)
        return sum(line.startswith("1") for line in stream.getvalue().splitlines())

    fits = next(width for width in range(10, 40) if parts(width) == 1)
    assert fits == len("one   two   three") and parts(fits - 1) == parts(5) == 2
