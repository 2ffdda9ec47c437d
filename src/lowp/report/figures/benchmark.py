"""The figures of a benchmark: time and memory of every row relative to fp32; published values stand apart."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from lowp.report.figures import style
from lowp.report.palette import GREY, PARTS, series
from lowp.report.plots import new_figure
from lowp.report.tables import bytes_of, seconds

_ROW, _SPACE = 0.27, 0.75  # inches of a bar, and of the words around a panel
_LEAST_NAMED = 0.01  # of the memory of fp32: a narrower part has no name above its bar


@style.styled
def chart(document: Mapping[str, Any]) -> Any:
    """Draw for each recipe a panel of times, of memory, and of what was published for torch.amp; fp32 is 1.

    Bars of times start at fp32's time, on a logarithmic scale with base 2; shorter times extend to the left.
    """
    drawn: list[tuple[float, Callable[[Any, Mapping[str, Any]], None], Mapping[str, Any]]] = []
    for subject in document["recipes"]:
        rows = len(subject["variants"])
        drawn.append((rows, _times, subject))
        if any("memory" in row for row in subject["variants"]):
            drawn.append((rows + 0.8, _memory, subject))
        if subject["published"]:
            drawn.append((2 * len(subject["published"]["gpus"]), _published, subject))
    heights = [_ROW * count + _SPACE for count, *_ in drawn]
    figure = new_figure(style.WIDTH, 0.6 + sum(heights))
    panels = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)
    for (panel,), (_, draw, subject) in zip(panels, drawn, strict=True):
        draw(panel, subject)
    style.title(figure, "; ".join(_result(subject) for subject in document["recipes"]))
    return figure


def _result(subject: Mapping[str, Any]) -> str:
    """Return what the fastest row of lowp needs of fp32's time and memory."""
    base, *others = subject["variants"]
    ours = [row for row in others if row["label"].startswith("lowp") and row["step"]["relative"]]
    if not ours:
        return f"{subject['recipe']['name']}: time and memory of a step"
    best = min(ours, key=lambda row: row["step"]["relative"])
    words = f"{subject['recipe']['name']}: {best['label']} takes {best['step']['relative']:.2f} of fp32's time"
    if "memory" in best and "memory" in base:
        words += f" and {best['memory']['allocated'] / base['memory']['allocated']:.2f} of its memory"
    return words


def _color(label: str) -> str:
    return series(label.split(" ")[-1])


def _times(panel: Any, subject: Mapping[str, Any]) -> None:
    rows, recipe = subject["variants"], subject["recipe"]
    values = [row["step"]["relative"] or 1.0 for row in rows]
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        relative, is_ours = row["step"]["relative"], not row["label"].startswith("torch")
        face = _color(row["label"]) if is_ours else "white"
        panel.barh(place, value - 1, left=1, color=face, edgecolor=_color(row["label"]), linewidth=1)
        text = "failed" if relative is None else f"{relative:.2f} of fp32, {seconds(row['step']['median'])}"
        panel.text(max(value, 1.0) * 1.04, place, text, va="center", fontsize=8.5)
    low, high = min([*values, 0.5]), max([*values, 2.0])
    panel.set_xscale("log", base=2)
    panel.set_xlim(low / 1.1, high * (high / low) ** 0.45)  # with room for the words
    ticks = [2.0**power for power in range(math.ceil(math.log2(low / 1.1)), math.ceil(math.log2(high)) + 1)]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _finish(panel, [row["label"] for row in rows])
    panel.set_title(f"time of a step of {recipe['name']} ({recipe['size']}, batch {recipe['batch']}); left is faster")


def _memory(panel: Any, subject: Mapping[str, Any]) -> None:
    rows = [row for row in subject["variants"] if "memory" in row]
    base = rows[0]["memory"]
    # relative to reserved memory, if it is known for every row and not mostly memory of libraries
    slacks = [(row["memory"]["slack"], row["memory"]["allocated"]) for row in rows]
    by_reserved = all(slack is not None and 0 <= slack < allocated for slack, allocated in slacks)
    unit = base["reserved"] if by_reserved else base["allocated"]
    ends: list[float] = []
    named: dict[str, tuple[int, float]] = {}
    for place, row in enumerate(rows):
        memory, end = row["memory"], 0.0
        parts = {**memory["parts"], **({"slack": max(0, memory["slack"])} if by_reserved else {})}
        for name, size in parts.items():
            if size:
                panel.barh(place, size / unit, left=end, color=PARTS[name], edgecolor=GREY, linewidth=0.5)
                if size / unit > _LEAST_NAMED:
                    named.setdefault(name, (place, end + size / unit / 2))
                end += size / unit
        ends.append(end)
        words = f"{bytes_of(memory['allocated'])} allocated"
        words += f", {bytes_of(memory['reserved'])} reserved" if memory["reserved"] else ""
        panel.text(end + 0.015, place, words, va="center", fontsize=8.5)
    panel.set_xlim(0, 1.5 * max([*ends, 1.0]))
    _finish(panel, [row["label"] for row in rows])
    panel.set_ylim(len(rows) - 0.4, -1.5)
    _name_parts(panel, named)
    panel.set_title(f"memory at the peak of a step; {'reserved' if by_reserved else 'allocated'} in fp32 is 1")


def _name_parts(panel: Any, named: Mapping[str, tuple[int, float]]) -> None:
    """Write the names of the parts above the bars, with a line to the part of the first bar, if it has one."""
    width, least = panel.get_xlim()[1], 0.0
    for name, (place, x) in sorted(named.items(), key=lambda part: part[1]):
        at = max(x - 0.008 * width * len(name), least)
        least = at + 0.0165 * width * (len(name) + 1.5)
        dark = PARTS[name] if name in ("weights", "gradients", "activations", "temporaries", "update") else GREY
        panel.text(at, -0.95, name, fontsize=8.5, va="center", color=dark)
        if not place:
            panel.plot([at + 0.008 * width * len(name), x], [-0.72, -0.4], color=GREY, linewidth=0.6)


def _published(panel: Any, subject: Mapping[str, Any]) -> None:
    """Draw what was published for whole trainings in torch.amp: other machines, and other ways to measure."""
    gpus = subject["published"]["gpus"]
    labels = []
    for index, row in enumerate(gpus):
        gigabytes = f"{row['gigabytes'][0]:g} → {row['gigabytes'][1]:g} GB"
        words = (("time", row["time_ratio"], ""), ("memory", row["memory_ratio"], f", {gigabytes}"))
        for offset, (what, value, more) in enumerate(words):
            place = 2 * index + offset
            panel.barh(place, value, color="white", edgecolor=GREY, linewidth=1)
            panel.text(value + 0.015, place, f"{value:.2f} of fp32{more}", va="center", fontsize=8.5)
            labels.append(f"{row['gpu']}, {what}")
    _finish(panel, labels)
    panel.set_xlim(0, 1.5)
    panel.set_title("published, not measured here: whole trainings in torch.amp")


def _finish(panel: Any, labels: list[str]) -> None:
    panel.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--", zorder=0.5)
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
