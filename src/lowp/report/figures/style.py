"""Common parts of the figures: colours for colour-blind readers, axes in powers of two, captions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["BLUE", "COLORS", "CYAN", "GREEN", "GREY", "PURPLE", "RED", "YELLOW"]
__all__ += ["bars", "caption", "histogram", "limit", "number", "powers", "range_of", "share", "window"]

# P. Tol, "Colour schemes" (SRON technical note, 2021): the bright scheme.
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
)
FP16_SMALLEST, FP16_SMALLEST_NORMAL, FP16_END = -24, -14, 16  # powers of two; 65504 is just below the last
_LETTERS_AN_INCH = 15
_LEAST_SHARE = 1e-3  # the smallest share of elements for which an exponent extends an axis


# -- numbers ----------------------------------------------------------------------------------------------------------
def share(value: float | None) -> str:
    """Return a share in percent with about three digits."""
    if value is None:
        return "unknown"
    if value == 0:
        return "0%"
    if value < 1e-6:
        return "less than 0.0001%"
    digits = 1 if value >= 0.01 else 2 if value >= 0.001 else 4
    return f"{100 * value:.{digits}f}%"


def number(value: float | None, is_share: bool = False) -> str:
    """Return a metric's value as text."""
    if value is None:
        return "no number"
    return f"{value:.1%}" if is_share else f"{value:.4g}"


def ended(document: Mapping[str, Any]) -> str:
    """Return the title of a run: recipe, precision, epochs, and the final metric or the failure."""
    metric, epochs = document["metric"], document["epochs"]
    value = number(metric["value"], metric["is_share"])
    ending = document["failure"] or f"final {metric['name']} {value}"
    return f"{document['recipe']} in {document['precision']}, {epochs} epoch{'s' * (epochs != 1)}: {ending}"


# -- panels -----------------------------------------------------------------------------------------------------------
def histogram(panel: Any, histogram: Mapping[str, Any], color: str, label: str, style: str = "-") -> None:
    """Draw the outline of a histogram of binary exponents: the bin of [2^e, 2^(e + 1)) lies between e and e + 1."""
    values, edges = bars(histogram)
    panel.stairs(values, edges, color=color, alpha=0.18, fill=True, linewidth=0)
    panel.stairs(values, edges, color=color, linewidth=1.4, linestyle=style, label=label)


def bars(histogram: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Return shares of the nonzero elements in percent, and the edges of their bins."""
    counts, lowest = histogram["counts"], histogram["lowest"]
    total = max(1, sum(counts))
    return [100 * count / total for count in counts], list(range(lowest, lowest + len(counts) + 1))


def range_of(histograms: Iterable[Mapping[str, Any]], limits: Sequence[float] = ()) -> tuple[float, float]:
    """Return the first and last exponent with a thousandth of the elements, extended to the given limits."""
    ends = list(limits)
    for histogram in histograms:
        total = max(1, sum(histogram["counts"]))
        present = [
            histogram["lowest"] + index
            for index, count in enumerate(histogram["counts"])
            if count > _LEAST_SHARE * total
        ]
        ends += [present[0], present[-1] + 1] if present else []
    return (min(ends) - 1, max(ends) + 1) if ends else (-1.0, 1.0)


def powers(axis: Any, max_ticks: int = 9) -> None:
    """Label an axis of exponents with powers of two."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=max_ticks, integer=True, steps=[1, 2, 4, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"$2^{{{value:.0f}}}$"))


def limit(panel: Any, exponent: float, color: str, label: str, style: str = "--") -> None:
    """Draw a line across the panel."""
    panel.axvline(exponent, color=color, linewidth=1.4, linestyle=style, label=label)


def window(panel: Any, left: float, right: float) -> None:
    """Draw fp16's range on an axis from `left` to `right`: below it, its hatched subnormal part, and its end."""
    panel.axvspan(
        left, FP16_SMALLEST, color=RED, alpha=0.14, linewidth=0, label="below fp16's smallest number, $2^{-24}$"
    )
    panel.axvspan(
        FP16_SMALLEST,
        FP16_SMALLEST_NORMAL,
        facecolor="none",
        edgecolor=GREY,
        hatch="///",
        linewidth=0,
        label="fp16's subnormal numbers, to $2^{-14}$",
    )
    panel.axvline(FP16_SMALLEST, color=RED, linewidth=1.4)
    if right >= FP16_END:
        panel.axvline(FP16_END, color=PURPLE, linewidth=1.4, linestyle="-.", label="fp16's largest number, 65504")


def caption(figure: Any, sentences: Sequence[str]) -> None:
    """Write sentences below the panels, in lines that fit the figure; 2^-24 is typeset as a power."""
    width = int(figure.get_figwidth() * _LETTERS_AN_INCH)
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, width)]
    text = re.sub(r"\b2\^(-?[\d.]+\d|-?\d)", r"$2^{\1}$", "\n".join(lines))
    figure.get_layout_engine().set(h_pad=0.07)  # inches, around the panels
    figure.supxlabel(text, fontsize=8.5, x=0.015, ha="left", linespacing=1.35)
