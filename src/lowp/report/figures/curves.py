"""The figures of a comparison by epoch, as differences from fp32, which alone tell lines apart, and of a sweep."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lowp.report.figures import style
from lowp.report.palette import GREY, series
from lowp.report.plots import new_figure
from lowp.report.tables import named

_DASHES = ("-", "--", "-.", ":")
_TOP_FIVE = "top5"

Measure = tuple[str, str, bool]  # name in the history, label, and whether the error 1 - value is drawn, in percent
Runs = dict[int, dict[int, float]]  # values by seed and epoch


@style.styled
def curves(document: Mapping[str, Any]) -> Any:
    """Draw a panel per metric with a line per precision: its difference from fp32's run of the same seed.

    A line is the mean over the seeds, a band reaches from the lowest to the highest; the grey band is fp32's seeds.
    """
    document = named(document)
    measures = _measures(document)
    figure = style.figure(0.8 + 2.2 * len(measures), _result(document))
    panels = style.panels(figure, len(measures))
    for panel, measure in zip(panels, measures, strict=True):
        _differences(panel, document, measure)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _differences(panel: Any, document: Mapping[str, Any], measure: Measure) -> None:
    baseline, *others = document["variants"]
    base = _by_seed(baseline, measure)
    spread = [(epoch, min(values) - fmean(values), max(values) - fmean(values)) for epoch, values in _epochs(base)]
    panel.axhline(0, color=GREY, linewidth=1)
    if spread:
        epochs, low, high = zip(*spread, strict=True)
        panel.fill_between(epochs, low, high, color=GREY, alpha=0.2, linewidth=0)
    unit = "%" if measure[2] else ""
    last = _last(baseline, measure)
    ended = "" if last is None else f" ({last:.3g}{unit} at the end)"
    seeds = ", grey: its seeds" if len(base) > 1 else ""
    panel.set_title(f"{measure[1].removesuffix(', %')}, difference from fp32{ended}{seeds}")
    ends = [(0.0, "fp32", GREY)]
    for index, row in enumerate(others, 1):
        apart = {
            seed: {epoch: value - base[seed][epoch] for epoch, value in run.items() if epoch in base[seed]}
            for seed, run in _by_seed(row, measure).items()
            if seed in base
        }
        found = _epochs(apart)
        if not found:
            continue
        color, means = series(row["label"], index), [fmean(values) for _, values in found]
        panel.plot([epoch for epoch, _ in found], means, _DASHES[index % 4], color=color, linewidth=1.5)
        bounds = zip(*((min(values), max(values)) for _, values in found), strict=True)
        panel.fill_between([epoch for epoch, _ in found], *bounds, color=color, alpha=0.12, linewidth=0)
        ends.append((means[-1], f"{row['label']} {_gap(means[-1], measure, True)}", color))
    style.label_ends(panel, ends)


def _result(document: Mapping[str, Any]) -> str:
    """Return how far each precision ends from fp32."""
    measure = _measures(document)[0]
    baseline, *others = document["variants"]
    base = _last(baseline, measure)
    words = []
    for row in others:
        last = _last(row, measure)
        if failed := [run["failure"] for run in row["runs"] if run["failure"]]:
            words.append(f"{row['label']} failed in {len(failed)} of {len(row['runs'])} runs")
        elif last is not None and base is not None:
            words.append(f"{row['label']} ends {_gap(last - base, measure)}")
    measured = measure[1].removesuffix(", %")
    seeds = f"{len(document['seeds'])} seed{'s' * (len(document['seeds']) > 1)}"
    return f"{document['recipe']['name']}, {measured}: {', '.join(words) or 'no run ended'} ({seeds})"


def _gap(gap: float, measure: Measure, is_short: bool = False) -> str:
    """Return a difference from fp32 in words, or as a number with its sign."""
    size, unit = (f"{abs(gap):.2f}", " points") if measure[2] else (f"{abs(gap):.3g}", "")
    if not float(size):
        return "as fp32"
    return f"{'+-'[gap < 0]}{size}" if is_short else f"{size}{unit} {'below' if gap < 0 else 'above'} fp32"


def curves_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per precision: the metrics after the last epoch, with mean and range over the seeds."""
    words = []
    for row in document["variants"]:
        parts = []
        for measure in _measures(document):
            found, unit = _epochs(_by_seed(row, measure)), "%" if measure[2] else ""
            if found:
                last = found[-1][1]
                value_range = f" ({min(last):.3g} to {max(last):.3g})" if len(last) > 1 else ""
                parts.append(f"{measure[1].removesuffix(', %')} {fmean(last):.3g}{unit}{value_range}")
        failed = [run["failure"] for run in row["runs"] if run["failure"]]
        parts += [f"{len(failed)} of {len(row['runs'])} runs failed: {failed[0]}"] if failed else []
        words.append(f"{row['label']}: {'; '.join(parts) or 'no run'}.")
    return words


def _measures(document: Mapping[str, Any]) -> list[Measure]:
    recipe = document["recipe"]
    as_error = recipe["metric_is_share"] and recipe["higher_is_better"]
    label = "top-1 error, %" if recipe["metric"] == "accuracy" else f"1 - {recipe['metric']}, %"
    measures = [(recipe["metric"], label if as_error else recipe["metric"], as_error)]
    records = (run["history"][-1] for row in document["variants"] for run in row["runs"] if run["history"])
    if any(_TOP_FIVE in record for record in records):
        return [*measures, (_TOP_FIVE, "top-5 error, %", True)]
    return measures if recipe["metric"] == "loss" else [*measures, ("loss", "validation loss", False)]


def _by_seed(row: Mapping[str, Any], measure: Measure) -> Runs:
    """Return the finite values of a precision's runs by seed and epoch, without those before the training."""
    name, _, as_error = measure
    return {
        run.get("seed", place): {
            record["epoch"]: 100 * (1 - record[name]) if as_error else record[name]
            for record in run["history"]
            if record["epoch"] and record.get(name) is not None and math.isfinite(record[name])
        }
        for place, run in enumerate(row["runs"])
        if run["history"]
    }


def _epochs(runs: Runs) -> list[tuple[int, list[float]]]:
    """Return each epoch that all runs reached with finite values, with the values."""
    reached = set.intersection(*(set(run) for run in runs.values())) if runs else set()
    return [(epoch, [run[epoch] for run in runs.values()]) for epoch in sorted(reached)]


def _last(row: Mapping[str, Any], measure: Measure) -> float | None:
    found = _epochs(_by_seed(row, measure))
    return fmean(found[-1][1]) if found else None


# -- a sweep -----------------------------------------------------------------------------------------------------------
@style.styled
def grid(document: Mapping[str, Any]) -> Any:
    """Draw the heat map of a sweep: exponent bits upwards, mantissa bits to the right."""
    table, recipe = document["grid"], document["recipe"]
    factor = 100.0 if recipe["metric_is_share"] else 1.0
    values = [[math.nan if cell is None else factor * cell for cell in line] for line in table["values"]]
    known = [value for line in values for value in line if math.isfinite(value)]
    figure = new_figure(style.WIDTH, 1.6 + 0.55 * len(table["exponent_bits"]))
    style.title(figure, _swept(document, known))
    panel = figure.subplots()
    panel.grid(False)
    panel.imshow(values, origin="lower", aspect="auto", cmap="viridis" + "_r" * (not recipe["higher_is_better"]))
    panel.set_xticks(range(len(table["mantissa_bits"])), table["mantissa_bits"])
    panel.set_yticks(range(len(table["exponent_bits"])), table["exponent_bits"])
    panel.set(xlabel="mantissa bits", ylabel="exponent bits")
    middle = (min(known) + max(known)) / 2 if known else 0.0
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if math.isfinite(value):
                dark = (value < middle) == recipe["higher_is_better"]
                panel.text(x, y, f"{value:.4g}", ha="center", va="center", fontsize=8, color="w" if dark else "k")
    return figure


def _swept(document: Mapping[str, Any], known: list[float]) -> str:
    """Return from which to which value the metric goes, and which width matters more."""
    table, recipe = document["grid"], document["recipe"]
    unit = "%" if recipe["metric_is_share"] else ""
    span = f"from {min(known):.4g}{unit} to {max(known):.4g}{unit}" if known else "no run ended"
    without = "" if table["subnormals"] else ", without subnormals"
    spreads = {width: table.get(f"effect_of_{width}", {}).get("spread") for width in ("exponent", "mantissa")}
    if None in spreads.values():
        return f"{recipe['name']}{without}: {recipe['metric']} {span}"
    wins = max(spreads, key=lambda width: spreads[width])
    return f"{recipe['name']}{without}: {recipe['metric']} {span}; {wins} bits matter more"
