"""Figures of comparisons and sweeps, drawn from their documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowp.report.plots import new_figure, save

__all__ = ["curves", "grid"]


def curves(document: Mapping[str, Any], path: Path) -> None:
    """Draw loss and metric by epoch with one line per precision, and below them the differences to fp32.

    A line is the mean over the seeds with a band of one standard deviation; the grey band below is fp32's.
    """
    recipe = document["recipe"]
    names = list(dict.fromkeys(["loss", recipe["metric"]]))
    figure = new_figure(5.2 * len(names), 6.6)
    above, below = figure.subplots(2, len(names), squeeze=False, sharex="col", gridspec_kw={"height_ratios": [1.2, 1]})
    for panel, apart, name in zip(above, below, names, strict=True):
        share = recipe["metric_is_share"] and name == recipe["metric"]
        for index, row in enumerate(document["variants"]):
            _curve(panel, row["label"], _by_seed(row, name), index, 100.0 if share else 1.0)
        _differences(apart, document, name, 100.0 if share else 1.0)
        panel.set_ylabel(f"{name} in percent" if share else f"{name} (validation)")
        apart.set(xlabel="epoch", ylabel=f"{name} minus fp32's" + ", in points" * share)
        for one in (panel, apart):
            one.xaxis.get_major_locator().set_params(integer=True)
            one.grid(alpha=0.3)
    above[0].set_yscale("log")
    above[-1].legend(fontsize=8)
    below[-1].legend(fontsize=8)
    seeds = len(document["seeds"])
    figure.suptitle(f"{recipe['name']}: mean and standard deviation of {seeds} seed{'s' * (seeds > 1)}", fontsize=10)
    save(figure, path)


Runs = Mapping[int, Mapping[int, float]]  # finite values by seed and epoch


def _by_seed(row: Mapping[str, Any], name: str) -> Runs:
    """Return a metric of a precision's runs by seed and epoch, without the loss before training."""
    return {
        run["seed"]: {
            record["epoch"]: record[name]
            for record in run["history"][1 if name == "loss" else 0 :]
            if record[name] is not None and math.isfinite(record[name])
        }
        for run in row["runs"]
        if run["history"]
    }


def _differences(panel: Any, document: Mapping[str, Any], name: str, factor: float) -> None:
    """Draw each precision's difference from the fp32 run of the same seed, and the deviation of fp32."""
    baseline, *others = document["variants"]
    base = _by_seed(baseline, name)
    spread = [(epoch, factor * _mean_and_deviation(values)[1]) for epoch, values in _epochs(base)]
    epochs, deviations = [epoch for epoch, _ in spread], [deviation for _, deviation in spread]
    panel.fill_between(
        epochs,
        [-deviation for deviation in deviations],
        deviations,
        color="#999999",
        alpha=0.3,
        linewidth=0,
        label="fp32's seeds",
    )
    panel.axhline(0, color="#222222", linewidth=0.8)
    limit = deviations[-1] if deviations else 0.0  # not the wide spread of early epochs
    for index, row in enumerate(others, 1):
        apart = {
            seed: {epoch: value - base[seed][epoch] for epoch, value in run.items() if epoch in base[seed]}
            for seed, run in _by_seed(row, name).items()
            if seed in base
        }
        _curve(panel, None, apart, index, factor)
        for _, values in _epochs(apart):
            mean, deviation = _mean_and_deviation(values)
            limit = max(limit, factor * (abs(mean) + deviation))
    if limit > 0:
        panel.set_ylim(-1.15 * limit, 1.15 * limit)


def _epochs(runs: Runs) -> Iterator[tuple[int, list[float]]]:
    """Yield each epoch that all runs reached, with their values."""
    for epoch in sorted(set.intersection(*(set(run) for run in runs.values()))) if runs else ():
        yield epoch, [run[epoch] for run in runs.values()]


def _curve(panel: Any, label: str | None, runs: Runs, index: int, factor: float) -> None:
    """Draw the line of one precision, for epochs that all of its runs reached with finite values."""
    epochs, means, low, high = [], [], [], []
    for epoch, values in _epochs(runs):
        mean, deviation = _mean_and_deviation(values)
        epochs.append(epoch)
        means.append(factor * mean)
        low.append(factor * (mean - deviation))
        high.append(factor * (mean + deviation))
    line_style = ("-", "--", "-.", ":")[index % 4]
    (line,) = panel.plot(epochs, means, line_style, label=label, linewidth=1.5, color=f"C{index % 10}")
    panel.fill_between(epochs, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def grid(document: Mapping[str, Any], path: Path) -> None:
    """Draw the heat map of a sweep: exponent bits upwards, mantissa bits to the right."""
    table, recipe = document["grid"], document["recipe"]
    factor = 100.0 if recipe["metric_is_share"] else 1.0
    values = [[math.nan if cell is None else factor * cell for cell in line] for line in table["values"]]
    figure = new_figure(1.6 + 0.75 * len(table["mantissa_bits"]), 1.6 + 0.55 * len(table["exponent_bits"]))
    panel = figure.subplots()
    image = panel.imshow(
        values, origin="lower", aspect="auto", cmap="viridis" + "_r" * (not recipe["higher_is_better"])
    )
    panel.set_xticks(range(len(table["mantissa_bits"])), table["mantissa_bits"])
    panel.set_yticks(range(len(table["exponent_bits"])), table["exponent_bits"])
    unit = f"{recipe['metric']} in percent" if recipe["metric_is_share"] else recipe["metric"]
    panel.set(xlabel="mantissa bits", ylabel="exponent bits")
    without = "" if table["subnormals"] else ", no subnormals"
    panel.set_title(f"{recipe['name']}: {unit}{without}", fontsize=10)
    known = [value for line in values for value in line if math.isfinite(value)]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if math.isfinite(value):
                dark = (value < middle) == recipe["higher_is_better"]
                panel.text(x, y, f"{value:.4g}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
    figure.colorbar(image)
    save(figure, path)


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
