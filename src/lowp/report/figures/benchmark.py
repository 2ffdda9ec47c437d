"""The figure of a benchmark: time and memory of every row relative to fp32, and published values of torch.amp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.plots import new_figure, save
from lowp.report.tables import bytes_of, seconds

__all__ = ["PARTS_COLOURS", "chart"]

# one colour per part in the order of the bars; lightness alternates, so that hue is not needed to tell them apart
PARTS_COLOURS = {
    "weights": "#4477aa",
    "masters": "#99bbdd",
    "gradients": "#228833",
    "optimizer": "#a6d96a",
    "activations": "#ee6677",
    "casts": "#ddaa33",
    "temporaries": "#aa3377",
    "other": "#bbbbbb",
    "update": "#66ccee",
    "slack": "#ffffff",
}
_BAR, _PUBLISHED = "#222255", "#dddddd"  # of times: different from the colours of the parts
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # words


def chart(document: Mapping[str, Any], path: Path) -> None:
    """Draw two panels per recipe: time on the left, memory and its use on the right; fp32 is 1.

    Bars of times start at fp32's time, on a logarithmic scale with base 2; shorter times extend to the left.
    """
    subjects = document["recipes"]
    bars = [len(subject["variants"]) + len((subject["published"] or {"gpus": ()})["gpus"]) for subject in subjects]
    figure = new_figure(12.0, 1.2 + sum(0.9 + 0.34 * count for count in bars))
    grid = figure.subplots(
        len(subjects), 2, squeeze=False, gridspec_kw={"height_ratios": [2 + count for count in bars]}
    )
    for (left, right), subject in zip(grid, subjects, strict=True):
        _times(left, subject)
        _memory(right, subject)
    handles, labels = _legend(grid)
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    machine = document["machine"]["words"]
    figure.suptitle(f"{machine}; torch {document['versions']['torch']}. {document['tf32']}", fontsize=9)
    save(figure, path)


def _legend(grid: Any) -> tuple[list[Any], list[str]]:
    """Return handles and labels of the legend, with every part of memory once, in the order of the bars."""
    handles: dict[str, Any] = {}
    for panel in grid[:, 1]:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    order = [name for name in PARTS_COLOURS if name in handles]
    return [handles[name] for name in order], order


def _times(panel: Any, subject: Mapping[str, Any]) -> None:
    recipe = subject["recipe"]
    labels, values, texts, colours = [], [], [], []
    for row in subject["variants"]:
        relative = row["step"]["relative"]
        labels.append(row["label"])
        values.append(relative or 1.0)
        texts.append("failed" if relative is None else f"{relative:.2f}x  {seconds(row['step']['median'])}")
        colours.append(_BAR)
    for row in (subject["published"] or {"gpus": ()})["gpus"]:
        labels.append(f"{row['gpu']}, torch.amp")
        values.append(row["time_ratio"])
        texts.append(f"{row['time_ratio']:.2f}x  published, whole training")
        colours.append(_PUBLISHED)
    panel.set_xscale("log", base=2)
    for position, (value, text, colour) in enumerate(zip(values, texts, colours, strict=True)):
        panel.barh(position, value - 1, left=1, color=colour, edgecolor="#555555", linewidth=0.5)
        panel.text(max(value, 1.0) * 1.04, position, text, va="center", fontsize=8, bbox=_BEHIND)
    _finish(panel, labels)
    low, high = min([*values, 0.5]), max([*values, 2.0])
    panel.set_xlim(low / 1.1, high * (high / low) ** 0.7)  # with room for the words
    ticks = [2.0**power for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    ticks = [tick for tick in ticks if tick >= low / 1.1]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    title = f"{recipe['name']} ({recipe['size']}, batch {recipe['batch']}): time per step, fp32 = 1"
    panel.set_title(f"{title}, left is faster", fontsize=9)


def _memory(panel: Any, subject: Mapping[str, Any]) -> None:
    rows = [row for row in subject["variants"] if "memory" in row]
    if not rows:
        panel.set_axis_off()
        return
    base = rows[0]["memory"]
    # relative to reserved memory, if it is known for every row and not mostly memory of libraries
    by_reserved = all(_is_telling(row["memory"]) for row in rows)
    unit = base["reserved"] if by_reserved else base["allocated"]
    labels, ends, texts = [], [], []
    for position, row in enumerate(rows):
        memory = row["memory"]
        parts = {**memory["parts"], **({"slack": max(0, memory["slack"])} if by_reserved else {})}
        end = 0.0
        for name, size in parts.items():
            if size:
                panel.barh(
                    position,
                    size / unit,
                    left=end,
                    color=PARTS_COLOURS[name],
                    edgecolor="#555555",
                    linewidth=0.5,
                    label=name,
                )
                end += size / unit
        labels.append(row["label"])
        ends.append(end)
        words = f"{bytes_of(memory['allocated'])} allocated"
        texts.append(words + (f", {bytes_of(memory['reserved'])} reserved" if memory["reserved"] else ""))
    for row in (subject["published"] or {"gpus": ()})["gpus"]:
        panel.barh(len(ends), row["memory_ratio"], color=_PUBLISHED, edgecolor="#555555", linewidth=0.5)
        labels.append(f"{row['gpu']}, torch.amp")
        ends.append(row["memory_ratio"])
        texts.append(f"{row['memory_ratio']:.2f}x  published: {row['gigabytes'][0]:g} → {row['gigabytes'][1]:g} GB")
    limit = max([*ends, 1.0])
    for position, (end, text) in enumerate(zip(ends, texts, strict=True)):
        panel.text(end + limit * 0.02, position, text, va="center", fontsize=8, bbox=_BEHIND)
    _finish(panel, labels)
    panel.set_xlim(0, limit * 1.65)
    what = "reserved" if by_reserved else "allocated"
    panel.set_title(f"memory at the peak of a step, {what} in fp32 = 1", fontsize=9)


def _is_telling(memory: Mapping[str, Any]) -> bool:
    return memory["slack"] is not None and 0 <= memory["slack"] < memory["allocated"]


def _finish(panel: Any, labels: list[str]) -> None:
    panel.axvline(1.0, color="#222222", linewidth=0.8, linestyle="--", zorder=0.5)
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
