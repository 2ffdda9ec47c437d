"""Common parts of the figures: a title that says the result, labels at what they name, axes in powers of two.

A figure is seven inches wide, so that its text can be read where it is shown 700 pixels wide.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from lowp.report.palette import GRADES, GREY
from lowp.report.plots import new_figure, save

WIDTH = 7.0  # inches
FP16_SMALLEST, FP16_SMALLEST_NORMAL = -24, -14  # powers of two
LOST, CARE = GRADES["loses"].light, GRADES["with care"].light
_LETTERS = 72  # of a title's line
_LEAST_SHARE = 1e-3  # the smallest share of elements for which an exponent extends an axis
_RC: Any = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


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


# -- figures ----------------------------------------------------------------------------------------------------------
def styled(draw: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any], Path], None]:
    """Decorate what draws a document: with the sizes and lines of the figures, and into a file."""

    @wraps(draw)
    def drawn(document: Mapping[str, Any], path: Path) -> None:
        from matplotlib import rc_context

        with rc_context(_RC):
            save(draw(document), path)

    return drawn


def figure(height: float, result: str) -> Any:
    """Return a new figure whose title is the result that it shows."""
    drawn = new_figure(WIDTH, height)
    title(drawn, result)
    return drawn


def title(drawn: Any, result: str) -> None:
    """Write the result above the panels; 2^-24 is typeset as a power."""
    text = powered("\n".join(textwrap.wrap(result, _LETTERS)), r"$\mathbf{2^{\1}}$")
    drawn.suptitle(text, fontsize=11, fontweight="bold", x=0.01, ha="left")


def powered(text: str, like: str = r"$2^{\1}$") -> str:
    """Return text with its powers of two typeset."""
    return re.sub(r"\b2\^(-?[\d.]+\d|-?\d)", like.replace("\\mathbf", r"\\mathbf"), text)


def panels(drawn: Any, rows: int, **options: Any) -> list[Any]:
    """Return panels below each other that share their horizontal axis."""
    found = drawn.subplots(rows, 1, sharex=True, squeeze=False, **options)
    return [panel for (panel,) in found]


# -- panels -----------------------------------------------------------------------------------------------------------
def ridge(
    panel: Any, histogram: Mapping[str, Any], color: str, words: tuple[str, str], limits: Sequence[tuple[int, str]] = ()
) -> None:
    """Draw a histogram of binary exponents on a panel of its own; the bin of [2^e, 2^(e + 1)) is from e to e + 1.

    `words`: what it is of, and what is lost. `limits`: powers of two with their meaning; what is below the first is
    lost, and drawn in the colour of losses.
    """
    values, edges = bars(histogram)
    panel.stairs(values, edges, color=color, alpha=0.45, fill=True, linewidth=0)
    if limits:
        lost = [value if edge < limits[0][0] else 0.0 for value, edge in zip(values, edges, strict=False)]
        panel.stairs(lost, edges, color=LOST, alpha=0.75, fill=True, linewidth=0)
    panel.stairs(values, edges, color=color, linewidth=1.2)
    for place, (exponent, meaning) in enumerate(limits):
        panel.axvline(exponent, color=CARE if place else LOST, linewidth=1.2, linestyle=":" if place else "--")
        if meaning:
            note(panel, exponent, 0.97 - 0.17 * place, f"{meaning} ", CARE if place else LOST, "right", True)
    what, lost_words = words
    panel.set_title(powered(f"{what}: {lost_words}" if lost_words else what), color=color)
    room = 1.4 if any(meaning for _, meaning in limits) else 1.12
    panel.set_ylim(0, max(values, default=1.0) * room or 1.0)
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)


def ridges(
    drawn: Iterable[Any],
    rows: Iterable[tuple[Mapping[str, Any], str, tuple[str, str]]],
    limits: Sequence[tuple[int, str]],
) -> None:
    """Draw a histogram a panel, of its colour and words, as `ridge`; the first says what the limits mean."""
    for panel, (histogram, color, words) in zip(drawn, rows, strict=False):
        ridge(panel, histogram, color, words, limits)
        limits = [(exponent, "") for exponent, _ in limits]


def note(panel: Any, x: float, y: float, text: str, color: str, ha: str = "left", is_top: bool = False) -> None:
    """Write text at a place of a panel; y is a share of its height, from its top if `is_top`."""
    place = {"ha": ha, "va": "top" if is_top else "center", "transform": panel.get_xaxis_transform()}
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    panel.text(x, y, powered(text), color=color, fontsize=8.5, clip_on=True, bbox=ground, **place)


def label_ends(panel: Any, lines: Iterable[tuple[float, str, str]]) -> None:
    """Write labels to the right of the panel where lines end: height, text, colour; apart where ends are close."""
    ends = sorted(lines)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high)
    inches = panel.get_figure().get_figheight() / len(panel.get_figure().axes)
    places = _spread([(y - low) / (high - low) for y, *_ in ends], 0.2 / inches)
    for (_, text, color), place in zip(ends, places, strict=True):
        panel.text(1.01, place, text, color=color, va="center", fontsize=8.5, transform=panel.transAxes)


def _spread(wanted: list[float], apart: float) -> list[float]:
    """Return rising places as near to the wanted ones as a distance between them allows."""
    groups: list[list[float]] = []  # of places that touch, each around the mean of those wanted
    for place in wanted:
        groups.append([place])
        while len(groups) > 1 and _centre(groups[-1]) - _centre(groups[-2]) < apart * sum(map(len, groups[-2:])) / 2:
            last = groups.pop()
            groups[-1] += last
    return [_centre(group) + apart * (index - (len(group) - 1) / 2) for group in groups for index in range(len(group))]


def _centre(group: Sequence[float]) -> float:
    return math.fsum(group) / len(group)


def bars(histogram: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """Return shares of the nonzero elements in percent, and the edges of their bins."""
    counts, lowest = histogram["counts"], histogram["lowest"]
    total = max(1, sum(counts))
    return [100 * count / total for count in counts], list(range(lowest, lowest + len(counts) + 1))


def _range_of(histograms: Iterable[Mapping[str, Any]], limits: Sequence[float]) -> tuple[float, float]:
    """Return the first and last exponent with a thousandth of the elements, extended to the given limits."""
    ends = list(limits)
    for histogram in histograms:
        total = sum(histogram["counts"])
        present = [
            histogram["lowest"] + index
            for index, count in enumerate(histogram["counts"])
            if count > _LEAST_SHARE * total
        ]
        ends += [present[0], present[-1] + 1] if present else []
    return (min(ends) - 1, max(ends) + 1) if ends else (-1.0, 1.0)


def powers(panel: Any, label: str, histograms: Iterable[Mapping[str, Any]], limits: Sequence[float] = ()) -> None:
    """Let the horizontal axis show the exponents of the histograms and the limits, labelled with powers of two."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panel.set_xlim(*_range_of(histograms, limits))
    panel.set_xlabel(label)
    axis = panel.xaxis
    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 4, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"$2^{{{value:.0f}}}$"))
