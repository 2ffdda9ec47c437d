"""The tables and the picture of a benchmark show the content of its document, also of an incomplete one."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from lowp.benchmarking.benchmark import published
from lowp.report import plots, terminal
from lowp.report.benchmark import benchmark_notes, benchmark_tables
from lowp.report.figures import style
from lowp.report.figures.benchmark import chart
from lowp.report.palette import PARTS as COLOURS
from lowp.report.plots import SUFFIXES

PARTS = {name: 0 for name in COLOURS if name != "slack"}


def row(label: str, median: float, **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "failure": None,
        "step": {
            "median": median,
            "quartiles": [median, 2 * median],
            "steps": 9,
            "only_one": False,
            "relative": 1.0,
        },
        "wall": None,
        "throughput": 32 / median,
        "operations": {"total": 10, "in_16_bits": 9, "share": 0.99999},
        **more,
    }


def memory(reserved: int | None = None) -> dict[str, Any]:
    allocated = 3 * 2**20
    return {
        "allocated": allocated,
        "parts": {**PARTS, "weights": 2**20, "activations": 2**21},
        "held": {"activations": 2**21},
        "reserved": reserved,
        "slack": None if reserved is None else reserved - allocated,
    }


def document(*variants: dict[str, Any], recipe: str = "unet") -> dict[str, Any]:
    named = {"name": recipe, "size": "cpu", "parameters": 12345, "batch": 4, "unit": "images"}
    return {
        "recipes": [{"recipe": named, "threads": 2, "published": published(recipe), "variants": list(variants)}],
        "methods": {"step": "time a step: how"},
        "tf32": "TF32: there is none on a CPU",
        "machine": {"words": "a machine"},
        "versions": {"torch": "2", "lowp": "1"},
    }


def printed(of: dict[str, Any]) -> str:
    stream = io.StringIO()
    console = terminal.console(stream)
    for table in benchmark_tables(of):
        console.print(table)
    console.print(benchmark_notes(of), markup=False)
    return stream.getvalue()


def cells(text: str, label: str) -> list[list[str]]:
    """The cells of every line of a table that begins with a label; words wrap, and have one space after it."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines() if line.strip().startswith(f"{label}  ")]


def test_numbers_stand_with_their_units_and_nothing_is_rounded_up_to_all() -> None:
    text = printed(document(row("fp32", 2e-3), row("lowp fp16", 0.5)))
    assert cells(text, "fp32") == [["fp32", "2 ms", "2-4 ms", "9", "1.00x", "-", "-", "-", "16,000", "99.9%"]]
    assert cells(text, "lowp fp16")[0][1:3] == ["500 ms", "500 ms-1 s"]
    assert "unet, size cpu: 12,345 parameters, batch 4, 2 CPU threads" in text


def test_estimates_are_beside_those_of_the_first_row() -> None:
    def estimates(format: str, joules: float, area: float) -> dict[str, Any]:
        words = {"format": format, "how": "table", "unit_area_how": "interpolated"}
        sizes = {"unit_area_um2": 1000 * area, "unit_area_relative_to_fp32": area}
        return {"estimates": {**words, **sizes, "arithmetic_joules": joules, "dram_joules": 8 * joules}}

    given = estimates("fp32", 2.0, 1.0), estimates("fp16", 0.5, 0.25)
    text = printed(document(*(row(one["estimates"]["format"], 1.0, **one) for one in given)))
    found = [cells(text, name)[-1] for name in ("fp32", "fp16")]
    assert found == [
        ["fp32", "fp32", "2 J", "1.00x", "16 J", "1.00x", "~1,000 um2", "1.00x"],
        ["fp16", "fp16", "500 mJ", "0.25x", "4 J", "0.25x", "~250 um2", "0.25x"],
    ]


def test_a_row_that_failed_or_had_one_step_says_so() -> None:
    none = {"median": None, "quartiles": None, "steps": 0, "only_one": False, "relative": None}
    failed = row("torch.amp fp16", 1.0, failure="RuntimeError: no kernel", step=none)
    once = {"median": 20.0, "quartiles": None, "steps": 1, "only_one": True, "relative": 10.0}
    text = printed(document(row("fp32", 2.0), failed, row("lowp fp16", 20.0, step=once)))
    assert cells(text, "torch.amp fp16")[0][1] == "failed"
    assert "unet, torch.amp fp16: failed: RuntimeError: no kernel" in text
    assert cells(text, "lowp fp16")[0][1:5] == ["20 s", "-", "1*", "10.00x"] and "*: a step took so long" in text


def test_memory_has_a_line_a_part_that_is_there_and_tables_no_wider_than_eight_rows() -> None:
    text = printed(document(*(row(f"lowp e{bits}m7", 1.0, memory=memory(2**20)) for bits in range(2, 12))))
    assert text.count("memory at the peak of a step") == 2
    assert cells(text, "weights")[0] == ["weights", *["1 MiB"] * 8] and len(cells(text, "weights")[1]) == 3
    assert cells(text, "slack")[1] == ["slack", "-2 MiB", "-2 MiB"] and not cells(text, "masters")
    assert "…" not in text


def test_published_figures_stand_below_with_their_source() -> None:
    text = printed(document(row("fp32", 1.0)))
    assert cells(text, "T4") == [["T4", "13m07 → 9m14", "0.70x", "4.26 → 2.67 GB", "0.63x"]]
    assert "Bilogur" in text and "Bilogur" not in printed(document(row("fp32", 1.0), recipe="digits"))


def test_a_search_that_was_not_ended_says_at_least() -> None:
    found = {"limit": 10**9, "batch": 64, "peak": 10**8, "too_large": None, "verified": False, "ended": "too long"}
    text = printed(document(row("fp32", 1.0, largest_batch={**found, "measured": {"64": 10**8}})))
    assert "largest batch that fits into 954 MiB" in text and "at least this: too long" in text


def test_batches_without_those_of_fp32_have_no_ratio_and_memory_without_slack_has_none() -> None:
    found = {"limit": 2**30, "batch": 64, "peak": None, "too_large": 65, "verified": True, "ended": ""}
    one = row("bf16", 1.0, largest_batch={**found, "measured": {"64": 1}}, memory=memory(3 * 2**20))
    text = printed(document(one))
    assert cells(text, "bf16")[-1] == ["bf16", "64", "-", "-", "65", "1 batches", "verified"]
    assert cells(text, "slack") == [["slack", "0 B"]]


@pytest.mark.parametrize(
    ("suffix", "reserved"), [*((one, None) for one in SUFFIXES), (".svg", 4 * 2**20), (".svg", 10**9)]
)
def test_a_picture_is_drawn_whatever_is_known(tmp_path: Path, suffix: str, reserved: int | None) -> None:
    path = tmp_path / f"bench{suffix}"
    none = {"median": None, "quartiles": None, "steps": 0, "only_one": False, "relative": None}
    rows = [row("fp32", 1.0, memory=memory(reserved)), row("lowp fp16", 1.0, step=none, failure="no")]
    chart(document(*rows), path)
    assert path.stat().st_size > 4000
    if suffix == ".svg":
        drawn = path.read_text()
        # a quarter of what was reserved is slack, which is drawn; where libraries took most of it, it is not
        assert ("<!-- slack -->" in drawn) == (reserved == 4 * 2**20) and "<!-- activations -->" in drawn
        assert "<!-- V100, time -->" in drawn and "<!-- failed -->" in drawn


def test_words_stand_beside_the_bars_within_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure) or plots.save(figure, path))
    wide = {**memory(2**30), "parts": {**PARTS, "weights": 2**20, "activations": 2**23}, "allocated": 9 * 2**20}
    slow = row("lowp fp16", 9.0, memory=wide)
    slow["step"]["relative"] = 9.0
    chart(document(row("fp32", 1.0, memory=memory(2**30)), slow), tmp_path / "one.png")
    for panel in made[0].axes:
        ends: dict[int, float] = {}
        for bar in panel.patches:
            place = round(bar.get_y() + bar.get_height() / 2)
            ends[place] = max(ends.get(place, 0.0), bar.get_window_extent().x1)
        words = {
            text.get_position()[1]: text.get_window_extent() for text in panel.texts if text.get_position()[1] >= 0
        }
        assert ends and words.keys() == ends.keys()
        for place, box in words.items():
            assert ends[place] < box.x0 and box.x1 <= panel.bbox.x1
        assert max(ends.values()) > panel.bbox.x0 + panel.bbox.width / 3
    assert list(made[0].axes[0].get_xticks()) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_recipes_of_which_no_memory_was_measured_have_an_empty_panel(tmp_path: Path) -> None:
    two = document(row("fp32", 1.0), recipe="digits")
    two["recipes"] += document(row("fp32", 1.0, memory=memory()))["recipes"]
    chart(two, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


WHOLE = """\
unet, size cpu: 12,345 parameters, batch 4, 2 CPU threads
              time                          to     wall   of it      an     images   in 16
            a step   quartiles   steps    fp32   a step    data   epoch   a second    bits
──────────────────────────────────────────────────────────────────────────────────────────
fp32          2 ms      2-4 ms       9   1.00x    20 ms     12%    90 s     16,000   99.9%
lowp fp16    50 ms   50-100 ms       9   1.00x        -       -       -        100       -
lowp bad    failed           -       -       -        -       -       -          -       -
lowp slow     20 s           -      1*       -        -       -       -          -   99.9%
memory at the peak of a step
                               lowp
                     fp32      fp16
───────────────────────────────────
weights             1 MiB   512 KiB
masters                 -     1 MiB
activations         2 MiB         -
allocated           3 MiB     3 MiB
reserved            4 MiB         -
slack               1 MiB         -
kept for backward   2 MiB     2 MiB
largest batch that fits into 1 GiB
                       to
            batch    fp32   its peak   does not fit    measured   what
─────────────────────────────────────────────────────────────────────────────────────────
fp32        1,000   1.00x    512 MiB          1,001   2 batches   verified
lowp fp16   1,500   1.50x    512 MiB              -   2 batches   at least this: too long
ESTIMATES for hardware with such arithmetic, a step (Horowitz, ISSCC 2014, 45
nm)
                                     to             to   multiply-add      to
            format   arithmetic    fp32   DRAM    fp32           unit    fp32
─────────────────────────────────────────────────────────────────────────────
fp32          fp32          2 J   1.00x   16 J   1.00x      1,000 um2   1.00x
lowp fp16     fp16      ~500 µJ   0.00x      -       -        250 um2   0.25x
as published, size full, on GPUs
                                  to                                to
       time fp32 → torch.amp    fp32   memory fp32 → torch.amp    fp32
──────────────────────────────────────────────────────────────────────
V100             8m25 → 7m58   0.95x            4.33 → 3.71 GB   0.86x
T4              13m07 → 9m14   0.70x            4.26 → 2.67 GB   0.63x
unet, lowp bad: failed: RuntimeError: no
products of linear layers on this machine: fp32: torch; lowp fp16: C++.
unet: of two.
*: a step took so long that only one step was timed.
"""


def test_a_benchmark_is_shown_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")

    def estimates(format: str, joules: float, area: float, how: str) -> dict[str, Any]:
        unit = {"unit_area_um2": 1000 * area, "unit_area_relative_to_fp32": area, "unit_area_how": "table"}
        dram = {"dram_joules": 8 * joules} if how == "table" else {}
        return {"format": format, "how": how, **unit, "arithmetic_joules": joules, **dram}

    def largest(batch: int, too_large: int | None, ended: str) -> dict[str, Any]:
        found = {"limit": 2**30, "batch": batch, "peak": 2**29, "too_large": too_large, "verified": not ended}
        return {**found, "ended": ended, "measured": {"1": 1, "2": 2}}

    wall = {"seconds_per_step": 0.02, "data_seconds": 0.25, "seconds": 2.0, "epoch_seconds": 90.0}
    none = {"median": None, "quartiles": None, "steps": 0, "only_one": False, "relative": None}
    first = {"memory": memory(4 * 2**20), "largest_batch": largest(1000, 1001, ""), "products": "torch"}
    parts = {**PARTS, "weights": 2**19, "masters": 2**20}
    second = {"memory": {**memory(), "parts": parts}, "largest_batch": largest(1500, None, "too long")}
    of = document(
        row("fp32", 2e-3, wall=wall, estimates=estimates("fp32", 2.0, 1.0, "table"), **first),
        row(
            *("lowp fp16", 0.05),
            **{"throughput": 99.96, "operations": None, "products": "C++", **second},
            estimates=estimates("fp16", 5e-4, 0.25, "scaled"),
        ),
        row("lowp bad", 1.0, step=none, failure="RuntimeError: no"),
        row("lowp slow", 20.0, throughput=None, step={**none, "median": 20.0, "steps": 1, "only_one": True}),
    )
    of["products"] = {"unet": "of two"}
    text = "".join(f"{line.rstrip()}\n" for line in printed(of).splitlines())
    assert text.startswith(WHOLE)
    methods, end = "time a step: how.\nTF32: there is none on a CPU.\n", "a machine; torch 2, lowp 1."
    assert text[len(WHOLE) :].startswith(f"{methods}published: A. Bilogur") and text.endswith(f"\n{end}\n")
    brief = benchmark_notes(of, methods=False)
    assert "--notes prints how each number was measured" in brief and "time a step: how" not in brief
