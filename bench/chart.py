"""Draw README's chart from recorded results: time a step and accuracy by precision, beside fp32 and torch.autocast.

    python bench/chart.py

writes docs/figures/overview.png, which names the files that it shows by a hash of them. `tests/test_docs.py` fails if
the picture and the results differ. No accuracy under torch.autocast was recorded.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import ROOT, named, result

PICTURE = ROOT / "docs" / "figures" / "overview.png"
PROCESSORS = {  # the words of a panel, and the file of its steps
    "AMD Zen 5, multiplies bf16": "step",
    "AMD Zen 5, held to AVX2": "step-avx2",
    "AMD Zen 4, multiplies bf16": "step-zen4",
    "Intel with AMX": "step-1-amx",
}
WAYS = {  # of training: its words, format, key and colour
    "bf16, lowp": ("bf16", "lowp_ms", "#4477aa"),
    "bf16, torch.autocast": ("bf16", "torch_autocast_ms", "#99bbdd"),
    "fp16, lowp": ("fp16", "lowp_ms", "#aa3377"),
    "fp16, torch.autocast": ("fp16", "torch_autocast_ms", "#ddaacc"),
    "dfp16 (int16), lowp": ("dfp16", "lowp_ms", "#228833"),
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
MARKS = {"fp16": ("o", "#aa3377"), "bf16": ("s", "#4477aa"), "flex16+5": ("^", "#ddaa33"), "dfp16": ("D", "#228833")}


def files() -> list[Path]:
    """Return the files that the picture shows."""
    results = ROOT / "bench" / "results"
    steps = [results / f"{name}.json" for name in PROCESSORS.values()]
    return [*steps, *(results / "runs" / f"{name}.json" for name in TASKS)]


def digest() -> str:
    """Return the SHA-256 of the files that the picture shows, one after another."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files())).hexdigest()


def times(name: str) -> Iterator[tuple[str, list[float]]]:
    """Yield each way of training, and its time a step as a multiple of fp32's, of every network recorded."""
    networks = result(name)["results"].values()
    for way, (format, key, _) in WAYS.items():
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


def draw(picture: Path = PICTURE) -> None:
    """Draw both panels into a picture, with the hash of its files."""
    from lowp.report.plots import new_figure, save

    figure = new_figure(11.0, 5.2)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.25, 1]})
    _draw_times(left)
    _draw_gaps(right)
    save(figure, picture)
    named(picture, digest())


def _draw_times(panel: Any) -> None:
    place, ticks = 0.0, []
    for words, name in PROCESSORS.items():
        begin = place
        for way, values in times(name):
            middle = statistics.median(values)
            panel.barh(place, middle - 1, left=1, color=WAYS[way][2], height=0.8)
            panel.plot([min(values), max(values)], [place, place], color="#333333", linewidth=1.2)
            panel.text(max(1.0, *values) * 1.08, place, f"{middle:.2g}x", va="center", fontsize=8)
            place += 1
        ticks.append(((begin + place - 1) / 2, words.replace(", ", "\n")))
        place += 0.8
    panel.set_xscale("log")
    panel.axvline(1, color="#222222", linewidth=1)
    panel.set_xticks([0.3, 1, 3, 10, 30, 100], ["0.3", "fp32", "3x", "10x", "30x", "100x"])
    panel.set_xlim(0.3, 400)
    panel.set_ylim(place - 1.2, -0.7)
    panel.set_yticks(*zip(*ticks, strict=True), fontsize=8)
    handles = [panel.barh(0, 0, color=colour) for *_, colour in WAYS.values()]
    panel.legend(handles, WAYS, fontsize=8, frameon=False, loc="center right", bbox_to_anchor=(1, 0.43))
    panel.set_title("Time of a training step, fp32 = 1 (left is faster)", fontsize=10, loc="left")
    panel.set_xlabel(
        "median of the networks recorded (MLP, CNN, transformer); lines: from lowest to highest", fontsize=8
    )
    panel.spines[["top", "right"]].set_visible(False)


def _draw_gaps(panel: Any) -> None:
    for place, name in enumerate(TASKS):
        deviation, found = gaps(name)
        panel.barh(place, 2 * deviation, left=-deviation, color="#dddddd", height=0.7)
        for index, (label, gap) in enumerate(found.items()):
            shape, colour = MARKS[label]
            first = label if place == 0 else None
            panel.plot(gap, place + 0.16 * (index - 1.5), shape, color=colour, markersize=5, label=first)
    panel.axvline(0, color="#222222", linewidth=1)
    panel.set_yticks(range(len(TASKS)), TASKS.values(), fontsize=8)
    panel.set_ylim(len(TASKS) - 0.4, -0.6)
    panel.set_xlim(-4.5, 4.5)
    panel.legend(fontsize=8, frameon=False, loc="lower right", title="lowp", title_fontsize=8)
    panel.set_title("Result beside fp32's, in percent (right is better)", fontsize=10, loc="left")
    panel.set_xlabel("mean of 5, 3 or (BERT) 1 seeds; grey: one deviation of fp32's seeds", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw()
    print(f"{PICTURE.relative_to(ROOT)}: drawn")
