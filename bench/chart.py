"""README's chart, from recorded results: time a step and accuracy by precision, beside fp32 and torch.autocast.

`python bench/figures.py` draws it. No accuracy under torch.autocast was recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tables import ROOT, result

from lowp.report.figures import style
from lowp.report.palette import GREY, series

PROCESSORS = {  # the words of a panel, and the file of its steps
    "AMD Zen 5, multiplies bf16": "step",
    "AMD Zen 5, held to AVX2": "step-avx2",
    "AMD Zen 4, multiplies bf16": "step-zen4",
    "Intel with AMX": "step-1-amx",
}
WAYS = {  # of training: its format, and the key of its times
    "bf16, lowp": ("bf16", "lowp_ms"),
    "bf16, torch.autocast": ("bf16", "torch_autocast_ms"),
    "fp16, lowp": ("fp16", "lowp_ms"),
    "fp16, torch.autocast": ("fp16", "torch_autocast_ms"),
    "dfp16 (int16), lowp": ("dfp16", "lowp_ms"),
}
TASKS = {
    "digits": "digits",
    "mnist": "MNIST",
    "cifar10-mlp": "CIFAR-10, MLP",
    "resnet-20": "CIFAR-10, ResNet-20",
    "ssd": "blood cells, SSD",
    "gpt": "Shakespeare, GPT",
    "bert": "tweets, BERT",
}
MARKS = {"fp16": "o", "bf16": "s", "flex16+5": "^", "dfp16": "D"}
NAMED = "resnet-20"  # the task at whose marks their formats stand


def files() -> list[Path]:
    """Return the files that the picture shows."""
    results = ROOT / "bench" / "results"
    steps = [results / f"{name}.json" for name in PROCESSORS.values()]
    return [*steps, *(results / "runs" / f"{name}.json" for name in TASKS)]


def times(name: str) -> Iterator[tuple[str, list[float]]]:
    """Yield each way of training, and its time a step as a multiple of fp32's, of every network recorded."""
    networks = result(name)["results"].values()
    for way, (format, key) in WAYS.items():
        rows = [formats[format] for formats in networks if format in formats]
        if rows:
            yield way, [row[key] / row["fp32_ms"] for row in rows]


def gaps(name: str) -> tuple[float, dict[str, float]]:
    """Return the deviation of fp32's seeds, and by precision how much better than fp32 it is, in percent of fp32."""
    document = result(f"runs/{name}")
    metric, rows = document["recipe"]["metric"], {row["label"]: row for row in document["variants"]}
    numbers = {label: row["statistics"][metric] for label, row in rows.items()}
    base = numbers["fp32"]
    sign = -1 if metric == "bits_per_byte" else 1  # of which fewer are better
    found = {label: sign * 100 * (one["mean"] / base["mean"] - 1) for label, one in numbers.items() if label in MARKS}
    return 100 * (base["deviation"] or 0) / base["mean"], found


def result_words() -> str:
    """Return what bf16 costs where the processor multiplies it, and how far results are from fp32's."""
    fast = [
        statistics.median(dict(times(name))["bf16, lowp"]) for words, name in PROCESSORS.items() if "AVX2" not in words
    ]
    worst = max(abs(gap) for name in TASKS for gap in gaps(name)[1].values())
    return (
        f"A step in bf16 takes {min(fast):.2f} to {max(fast):.2f} of fp32's time where the processor multiplies bf16; "
        f"results stay within {worst:.1f} % of fp32's"
    )


def draw(picture: Path) -> None:
    """Draw both panels into a picture."""
    style.styled(_draw)({}, picture)


def _draw(document: Mapping[str, Any]) -> Any:
    figure = style.figure(6.7, result_words())
    above, below = figure.subplots(2, 1, height_ratios=[1.55, 1])
    _draw_times(above)
    _draw_gaps(below)
    return figure


def _draw_times(panel: Any) -> None:
    place, ticks = 0.0, []
    for words, name in PROCESSORS.items():
        begin = place
        for way, values in times(name):
            middle, color = statistics.median(values), series(way)
            face = color if way.endswith("lowp") else "white"
            panel.barh(place, middle - 1, left=1, color=face, edgecolor=color, linewidth=1, height=0.75)
            panel.plot([min(values), max(values)], [place, place], color="#1a1c20", linewidth=1)
            told = f"{way}: {middle:.2g}"
            panel.text(max(1.0, *values) * 1.1, place, told, va="center", fontsize=8, color=color)
            place += 1
        ticks.append(((begin + place - 1) / 2, words.replace(", ", "\n")))
        place += 0.8
    panel.set_xscale("log")
    panel.axvline(1, color="#1a1c20", linewidth=1)
    panel.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "fp32", "3", "10", "30", "100"])
    panel.set_xticks([], minor=True)
    panel.set_xlim(0.3, 3000)
    panel.set_ylim(place - 1.2, -0.7)
    panel.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    panel.grid(visible=False, axis="y")
    panel.set_title("time of a training step, fp32 = 1 (left is faster); lines: over the networks")


def _draw_gaps(panel: Any) -> None:
    for place, name in enumerate(TASKS):
        deviation, found = gaps(name)
        panel.barh(place, 2 * deviation, left=-deviation, color=GREY, alpha=0.25, height=0.8)
        for index, (label, gap) in enumerate(found.items()):
            y = place + 0.2 * (index - 1.5)
            panel.plot(gap, y, MARKS[label], color=series(label), markersize=4.5)
            if name == NAMED:
                panel.text(gap + 0.09, y, label, color=series(label), fontsize=8, va="center")
    panel.axvline(0, color="#1a1c20", linewidth=1)
    panel.set_yticks(range(len(TASKS)), TASKS.values(), fontsize=8)
    panel.set_ylim(len(TASKS) - 0.4, -0.6)
    panel.set_xlim(-4.2, 4.2)
    panel.grid(visible=False, axis="y")
    panel.set_title("result beside fp32's, in percent (right is better); grey: one deviation of fp32's seeds")
