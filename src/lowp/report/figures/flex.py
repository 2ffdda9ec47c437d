"""Figures of the shared exponents of a run, after figures 2 and 3 of Köster et al. 2017, arXiv 1711.02213."""

import math
from collections.abc import Mapping
from typing import Any

from lowp.errors import counted
from lowp.report.figures import style
from lowp.report.palette import AMBER, BLUE, GREEN

_WRITTEN, _PREDICTED, _LIMIT = BLUE, AMBER, GREEN
_MANTISSA_BITS = 16
_LARGEST = 2 ** (_MANTISSA_BITS - 1) - 1
_HEIGHT = -0.12  # of the bar of a window, below the histogram


@style.styled
def autoflex(document: Mapping[str, Any]) -> Any:
    """Draw the largest mantissa Γ, the unit κ and the maxima (rows) of weights, activations and updates (columns)."""
    series_of = document["series"]
    figure = style.figure(6.0, _result(document))
    panels = figure.subplots(3, len(series_of), sharex=True, squeeze=False)
    for column, (name, series) in enumerate(series_of.items()):
        steps, units = series["step"], [2.0**exponent for exponent in series["exponent"]]
        top, middle, bottom = (panels[row][column] for row in range(3))
        top.plot(steps, series["mantissa"], ".", markersize=1.5, color=_WRITTEN)
        top.axhline(_LARGEST, color=_LIMIT, linewidth=1)
        top.set_ylim(0, _LARGEST * 1.08)
        top.set_title(f"{name}\n{series['site']}", fontsize=9)
        middle.step(steps, units, where="mid", color=_LIMIT, linewidth=1.2)
        maxima = [mantissa * unit for mantissa, unit in zip(series["mantissa"], units, strict=True)]
        predicted = [math.nan if value is None else value for value in series["predicted"]]
        bottom.plot(steps, maxima, ".", markersize=1.5, color=_WRITTEN)
        bottom.plot(steps, predicted, color=_PREDICTED, linewidth=1)
        bottom.step(steps, [_LARGEST * unit for unit in units], where="mid", color=_LIMIT, linewidth=1.2)
        bottom.set_xlabel("step")
        for panel in (middle, bottom):
            panel.set_yscale("log", base=2)
        if column:
            top.set_yticklabels([])
        else:
            style.note(bottom, steps[-1], 0.62, "largest that fits", _LIMIT, "right")
            style.note(bottom, steps[-1], 0.45, "predicted maximum χ", _PREDICTED, "right")
            style.note(bottom, steps[-1], 0.28, "largest written, Γκ", _WRITTEN, "right")
    for row, label in enumerate(("Γ, largest mantissa", "κ, unit", "value")):
        panels[row][0].set_ylabel(label)
    return figure


def _result(document: Mapping[str, Any]) -> str:
    """Return how many of the largest mantissas written were cut off, and how often the unit moved."""
    series = document["series"].values()
    writes = sum(len(one["mantissa"]) for one in series)
    cut = sum(mantissa >= _LARGEST for one in series for mantissa in one["mantissa"])
    moves = sum(
        before != after for one in series for before, after in zip(one["exponent"], one["exponent"][1:], strict=False)
    )
    return (
        f"{document['recipe']} in {document['precision']}: {cut or 'none'} of {writes:,} writes "
        f"{'is' if cut < 2 else 'are'} cut off, and the exponents move {counted(moves, 'time')}"
    )


@style.styled
def flex_window(document: Mapping[str, Any]) -> Any:
    """Draw histograms of log2|x| of three tensors, early and late, each above the places of an int16 mantissa."""
    windows = document["windows"]
    rows = [
        (name, moment, window[moment], color)
        for (name, window), color in zip(windows.items(), (BLUE, GREEN, AMBER) * len(windows), strict=False)
        for moment in ("first", "last")
        if window.get(moment) is not None
    ]
    worst = max((histogram["below_unit"] for *_, histogram, _ in rows), default=0.0)
    figure = style.figure(
        1.0 + 0.95 * len(rows),
        f"{document['recipe']} in {document['precision']}: at most {style.share(worst)} of the numbers of a "
        "tensor are below the unit of its int16 mantissas",
    )
    panels = style.panels(figure, len(rows))
    # a record of an earlier lowp has one lowest exponent for all
    histograms = [{"lowest": document.get("lowest"), **histogram} for *_, histogram, _ in rows]
    for panel, (name, moment, _, color), histogram in zip(panels, rows, histograms, strict=True):
        words = f"{style.share(histogram['below_unit'])} below the unit"
        style.ridge(panel, histogram, color, (f"{name} ({windows[name]['site']}), {moment} tenth of the steps", words))
        low, high = histogram["exponents"]
        top = panel.get_ylim()[1]
        panel.set_ylim(2 * _HEIGHT * top, top)
        panel.plot([high, high + _MANTISSA_BITS - 1], [_HEIGHT * top] * 2, color=color, linewidth=5, alpha=0.8)
        if low != high:  # the exponent moved within a tenth of the steps
            panel.plot([low, low + _MANTISSA_BITS - 1], [_HEIGHT * top] * 2, color=color, linewidth=2, alpha=0.6)
    if panels:
        ends = [end for histogram in histograms for end in histogram["exponents"]]
        label = "|x|; bars: the 15 places of a mantissa, thin where the exponent was before it moved"
        style.powers(panels[-1], label, histograms, [min(ends), max(ends) + _MANTISSA_BITS - 1])
    return figure
