"""What stands in a picture, as text: every panel with its axes, its lines, bars, areas and words, in data coordinates.

    python tests/report/figures/drawn.py > tests/report/figures/drawn.txt

writes that of every figure anew, for which `test_drawn.py` looks.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.colors import to_hex
from report.figures import documents

from lowp.report.figures import costs, curves, flex, gradients, stall, style
from lowp.report.figures.benchmark import chart
from lowp.report.plots import new_figure


def described(figure: Any) -> Iterator[str]:
    """Yield the lines of a figure."""
    size = _numbers(figure.get_size_inches())
    yield f"figure {size}  {_words(figure._suptitle)}" if figure._suptitle else f"figure {size}"
    if below := figure._supxlabel:
        yield f"  below: {_words(below)}"
    for panel in figure.axes:
        grid = panel.get_subplotspec().get_gridspec()
        ratios = [_numbers(one) if one else "-" for one in (grid.get_height_ratios(), grid.get_width_ratios())]
        yield f"panel {panel.get_subplotspec().num1} of {grid.nrows} x {grid.ncols}, ratios {' and '.join(ratios)}"
        if title := _words(panel.title) + _words(panel._left_title):
            yield f"  title: {title}"
        for axis, is_set in (
            (panel.xaxis, not panel.get_autoscalex_on()),
            (panel.yaxis, not panel.get_autoscaley_on()),
        ):
            yield "  " + _axis(panel, axis, is_set)
        frame = [name for name, spine in panel.spines.items() if spine.get_visible()]
        yield f"  frame: {' '.join(frame)}"
        for one in panel.get_children():
            if one not in (panel.title, panel._left_title, panel._right_title) and (found := _artist(panel, one)):
                yield "  " + found


def _axis(panel: Any, axis: Any, is_set: bool) -> str:
    low, high = axis.get_view_interval()
    limits = _numbers((high, low) if axis.get_inverted() else (low, high)) if is_set else "as its contents"
    locator = axis.get_major_locator()
    ticks = "as they fit"
    if type(locator).__name__ == "FixedLocator":
        shown = axis.get_major_formatter().format_ticks(locator.locs) if len(locator.locs) else []
        ticks = f"{_numbers(locator.locs)} [{', '.join(map(repr, shown))}]"
    elif type(locator).__name__ == "MaxNLocator":
        ticks = f"whole {axis.get_major_formatter()(-3)}" if locator._integer else f"steps {locator._steps}"
    grid = "grid" if axis._major_tick_kw.get("gridOn") else "no grid"
    name = axis.get_label_text()
    return f"{axis.axis_name} {axis.get_scale()} {limits}; {grid}; ticks {ticks}" + (f"; {name!r}" if name else "")


def _artist(panel: Any, one: Any) -> str:
    kind = type(one).__name__
    if kind == "Line2D":
        points = " ".join(f"({_numbers(point)})" for point in zip(*one.get_data(), strict=True))
        mark = f" marks {one.get_marker()} {one.get_markersize():g}" * (one.get_marker() != "None")
        steps = f" {one.get_drawstyle()}" * (one.get_drawstyle() != "default")
        order = f" at {one.zorder:g}" * (one.zorder != 2)
        way = f"{one.get_linestyle()} {one.get_linewidth():g}"
        return f"line {way}{mark}{steps} {_colour(one.get_color(), one.get_alpha())}{order}: {points}"
    if kind == "Text":
        where = " of the panel" if one.get_transform() == panel.transAxes else ""
        return f"text {_words(one)} at {_numbers(one.get_position())}{where}" if one.get_text() else ""
    if kind == "Rectangle" and one is not panel.patch:
        edge = f"{_colour(one.get_edgecolor())} {one.get_linewidth():g}"
        place = _numbers((*one.get_xy(), one.get_width(), one.get_height()))
        return f"bar {place} {_colour(one.get_facecolor())} in {edge}"
    if kind == "StepPatch":
        data, look = (
            one.get_data(),
            f"{one.get_linestyle()} {one.get_linewidth():g}" if not one.get_fill() else "filled",
        )
        colour = _colour(one.get_facecolor() if one.get_fill() else one.get_edgecolor())
        assert all(two == one + 1 for one, two in itertools.pairwise(data.edges))
        return f"stairs {look} {colour}: {_numbers(data.values)} from {data.edges[0]} on"
    if kind in ("PolyCollection", "FillBetweenPolyCollection"):
        points = " ".join(f"({_numbers(point)})" for point in one.get_paths()[0].vertices)
        return f"area {_colour(one.get_facecolor()[0])}: {points}"
    if kind == "AxesImage":
        rows = "; ".join(_numbers(row) for row in one.get_array().filled(math.nan))
        return f"image {one.cmap.name} {one.origin}: {rows}"
    return ""


def _words(text: Any) -> str:
    return (
        ""
        if not text.get_text()
        else (
            f"{text.get_text()!r} {text.get_fontsize():g} {_colour(text.get_color())} {text.get_ha()} {text.get_va()}"
        )
    )


def _colour(colour: Any, alpha: float | None = None) -> str:
    return to_hex(colour, keep_alpha=True) + (f" {alpha:g}" if alpha is not None else "")


def _numbers(values: Iterable[Any]) -> str:
    """Return numbers with five digits, and how often each follows itself from three times on."""
    shown = []
    for text, same in itertools.groupby(f"{float(value) + 0.0:.5g}" for value in values):
        count = len(list(same))
        shown.append(f"{count} x {text}" if count > 2 else " ".join([text] * count))
    return " ".join(shown)


def picture(name: str) -> str:
    """Return what stands in one of the figures below."""
    draw, document = CASES[name]
    made: list[Any] = []
    with patch.object(style, "save", lambda figure, path: made.append(figure)):
        draw(document, Path("none.png"))
    return "".join(f"{line}\n" for line in described(made[0]))


@style.styled
def _panel(document: Mapping[str, Any]) -> Any:
    figure = new_figure(4, 3)
    panel = figure.subplots()
    style.ridge(panel, document, "#123456", ("2^3", ""), [(1, ""), (2, "")])
    style.note(panel, 1, 0.5, "2^4", "#654321")
    return figure


CASES: dict[str, tuple[Callable[[Mapping[str, Any], Path], None], Mapping[str, Any]]] = {
    "updates": (gradients.updates, documents.updates()),
    "gradients": (gradients.gradients, documents.gradients()),
    "gradients, none of them zero": (gradients.gradients, documents.without_zeros()),
    "gradients of activations": (gradients.activation_gradients, documents.activation_gradients()),
    "gradients of activations of one layer": (gradients.activation_gradients, documents.one_layer()),
    "a loss scale": (gradients.loss_scaling, documents.loss_scaling()),
    "a stall": (stall.stall, documents.stall()),
    "curves": (curves.curves, documents.curves()),
    "curves with the best five": (curves.curves, documents.curves(top5=0.99)),
    "a grid of shares": (curves.grid, documents.grid(True)),
    "a grid of losses": (curves.grid, documents.grid(False)),
    "costs": (costs.cost, documents.cost()),
    "shared exponents": (flex.autoflex, documents.autoflex()),
    "windows": (flex.flex_window, documents.flex_window()),
    "a benchmark": (chart, documents.benchmark()),
    "a panel without numbers": (_panel, {"lowest": 0, "counts": []}),
}

if __name__ == "__main__":
    print("".join(f"## {name}\n{picture(name)}" for name in CASES), end="")
