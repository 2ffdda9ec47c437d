"""Figures of the shared exponents of a run, after figures 2 and 3 of Köster et al. 2017, arXiv 1711.02213."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.plots import new_figure, save

__all__ = ["autoflex", "flex_window"]

_MEASURED, _PREDICTED, _LIMIT = "#4477aa", "#ee6677", "#228833"
_MANTISSA_BITS = 16
_THICK, _THIN = 5, 2  # bars of windows


def autoflex(document: Mapping[str, Any], path: Path) -> None:
    """Draw the largest mantissa Γ, the unit κ and the maxima (rows) of weights, activations and updates (columns)."""
    figure = new_figure(10.5, 7.0)
    panels = figure.subplots(3, len(document["series"]), sharex=True, squeeze=False)
    limit = 2 ** (_MANTISSA_BITS - 1) - 1
    for column, (name, series) in enumerate(document["series"].items()):
        steps, units = series["step"], [2.0**exponent for exponent in series["exponent"]]
        top, middle, bottom = (panels[row][column] for row in range(3))
        top.plot(steps, series["mantissa"], ".", markersize=2, color=_MEASURED)
        top.axhline(limit, color=_LIMIT, linewidth=1)
        top.set_ylim(0, 2 ** (_MANTISSA_BITS - 1) * 1.08)
        top.set_title(f"{name}\n{series['site']}", fontsize=9)
        middle.step(steps, units, where="mid", color=_MEASURED, linewidth=1.2)
        middle.set_yscale("log", base=2)
        maxima = [mantissa * unit for mantissa, unit in zip(series["mantissa"], units, strict=True)]
        bottom.plot(steps, maxima, ".", markersize=2, color=_MEASURED, label="largest value written, Γκ")
        predicted = [math.nan if value is None else value for value in series["predicted"]]
        bottom.plot(steps, predicted, color=_PREDICTED, linewidth=1, label="predicted maximum, χ")
        bottom.step(
            steps, [limit * unit for unit in units], where="mid", color=_LIMIT, linewidth=1.2, label="largest that fits"
        )
        bottom.set_yscale("log", base=2)
        bottom.set_xlabel("step")
        for panel in (top, middle, bottom):
            panel.grid(alpha=0.3)
    for row, label in enumerate(("Γ (largest mantissa)", "κ (unit)", "value")):
        panels[row][0].set_ylabel(label)
    panels[2][-1].legend(fontsize=7, loc="best")
    figure.suptitle(f"{document['recipe']} in {document['precision']}: {document['steps']} steps", fontsize=10)
    save(figure, path)


def flex_window(document: Mapping[str, Any], path: Path) -> None:
    """Draw histograms of log2|x| of three tensors, early and late, and the range of bits of an int16 mantissa."""
    figure = new_figure(10.5, 3.9)
    panels = figure.subplots(1, len(document["windows"]), sharey=True, squeeze=False)[0]
    lowest = document["lowest"]
    for panel, (name, window) in zip(panels, document["windows"].items(), strict=True):
        lost = []
        for moment, color, height in (("first", _MEASURED, -0.02), ("last", _PREDICTED, -0.05)):
            histogram = window.get(moment)
            if histogram is None:
                continue
            total = max(1, sum(histogram["counts"]))
            exponents = [lowest + index for index in range(len(histogram["counts"]))]
            shares = [count / total for count in histogram["counts"]]
            panel.step(
                exponents, shares, where="post", color=color, linewidth=1.3, label=f"{moment} tenth of the steps"
            )
            low, high = histogram["exponents"]
            panel.plot([high, high + _MANTISSA_BITS - 1], [height, height], color=color, linewidth=_THICK, alpha=0.6)
            if low != high:
                panel.plot([low, low + _MANTISSA_BITS - 1], [height, height], color=color, linewidth=_THIN, alpha=0.4)
            lost.append(f"{histogram['below_maximum']:.2%}")
        panel.set_title(f"{name}\n{window['site']}", fontsize=9)
        panel.set_xlabel(f"floor(log2|x|); below max/2^15: {', '.join(lost)}", fontsize=8)
        panel.set_xlim(_range(window, lowest))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the nonzero elements")
    # The bars of a window: its exponent may have moved within a tenth of the steps.
    for width, words in ((_THICK, "window at the largest exponent of those steps"), (_THIN, "at the smallest")):
        panels[0].plot([], [], color="#555555", linewidth=width, alpha=0.6, label=words)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(
        f"{document['recipe']} in {document['precision']}; a window is the {_MANTISSA_BITS - 1} places of a mantissa",
        fontsize=10,
    )
    save(figure, path)


def _range(window: Mapping[str, Any], lowest: int) -> tuple[float, float]:
    """Return limits of the axis: the exponents with at least a thousandth of the elements, and the bars."""
    left, right = math.inf, -math.inf
    for moment in ("first", "last"):
        histogram = window.get(moment)
        if histogram is not None:
            total = max(1, sum(histogram["counts"]))
            present = [lowest + index for index, count in enumerate(histogram["counts"]) if count > total / 1000]
            left = min([left, *present, histogram["exponents"][0]])
            right = max([right, *present, histogram["exponents"][1] + _MANTISSA_BITS - 1])
    return left - 1, right + 2
