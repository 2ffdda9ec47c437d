"""The figure of the error by epoch in several precisions: top-1 and, if it was measured, top-5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.plots import new_figure, save

__all__ = ["curves", "curves_words"]

_DASHES = ("-", "--", "-.", ":")
_TOP_FIVE = "top5"


def curves(document: Mapping[str, Any], path: Path) -> None:
    """Draw a panel per metric with a line per precision: the mean over its seeds, with a band of the range."""
    measures = _measures(document)
    figure = new_figure(1.5 + 4.8 * len(measures), 5.0)
    panels = figure.subplots(1, len(measures), squeeze=False)[0]
    for panel, (name, label, as_error) in zip(panels, measures, strict=True):
        for index, row in enumerate(document["variants"]):
            epochs, values = _values(row, name, as_error)
            color = style.COLORS[index % len(style.COLORS)]
            means = [math.fsum(one) / len(one) for one in values]
            panel.plot(epochs, means, _DASHES[index % 4], color=color, label=row["label"], linewidth=1.6)
            panel.fill_between(
                epochs, [min(one) for one in values], [max(one) for one in values], color=color, alpha=0.15, linewidth=0
            )
        panel.set(xlabel="epoch", ylabel=label)
        if min((line.get_ydata().min() for line in panel.lines if len(line.get_ydata())), default=0) > 0:
            panel.set_yscale("log")
            _plain_ticks(panel.yaxis)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.25, which="both")
    panels[0].legend(fontsize=9)
    seeds = len(document["seeds"])
    bands = "the mean, and a band from the lowest to the highest" if seeds > 1 else "one run each"
    figure.suptitle(f"{document['recipe']['name']}, {seeds} seed{'s' * (seeds > 1)}: {bands}", fontsize=11)
    style.caption(figure, curves_words(document))
    save(figure, path)


def curves_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per precision: the metrics after the last epoch, with mean and range over the seeds."""
    words = []
    for row in document["variants"]:
        parts = []
        for name, label, as_error in _measures(document):
            _, values = _values(row, name, as_error)
            if values:
                last, unit = values[-1], "%" if as_error else ""
                mean = math.fsum(last) / len(last)
                value_range = f" ({min(last):.3g} to {max(last):.3g})" if len(last) > 1 else ""
                parts.append(f"{label.removesuffix(', %')} {mean:.3g}{unit}{value_range}")
        failed = [run["failure"] for run in row["runs"] if run["failure"]]
        parts += [f"{len(failed)} of {len(row['runs'])} runs failed: {failed[0]}"] if failed else []
        words.append(f"{row['label']}: {'; '.join(parts) or 'no run'}.")
    return words


def _measures(document: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Return, for each panel, the name in the history, the label, and whether to draw the error, 1 - value."""
    recipe = document["recipe"]
    as_error = recipe["metric_is_share"] and recipe["higher_is_better"]
    label = "top-1 error, %" if recipe["metric"] == "accuracy" else f"1 - {recipe['metric']}, %"
    measures = [(recipe["metric"], label if as_error else recipe["metric"], as_error)]
    records = (run["history"][-1] for row in document["variants"] for run in row["runs"] if run["history"])
    if any(_TOP_FIVE in record for record in records):
        return [*measures, (_TOP_FIVE, "top-5 error, %", True)]
    return measures if recipe["metric"] == "loss" else [*measures, ("loss", "validation loss", False)]


def _values(row: Mapping[str, Any], name: str, as_error: bool) -> tuple[list[int], list[list[float]]]:
    """Return the epochs that all runs reached with finite values, and the values of the runs at each."""
    histories = [run["history"] for run in row["runs"] if run["history"]]
    epochs, values = [], []
    for records in zip(*histories):  # noqa: B905  (runs that failed are shorter)
        run_values = [record.get(name) for record in records]
        if records[0]["epoch"] and all(value is not None and math.isfinite(value) for value in run_values):
            epochs.append(records[0]["epoch"])
            values.append([100 * (1 - value) if as_error else value for value in run_values])
    return epochs, values


def _plain_ticks(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, also between the powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, position: ""))
