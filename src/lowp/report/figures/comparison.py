"""The figure of a sweep, drawn from its document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.plots import new_figure, save


@style.styled
def grid(document: Mapping[str, Any], path: Path) -> None:
    """Draw the heat map of a sweep: exponent bits upwards, mantissa bits to the right."""
    table, recipe = document["grid"], document["recipe"]
    factor = 100.0 if recipe["metric_is_share"] else 1.0
    values = [[math.nan if cell is None else factor * cell for cell in line] for line in table["values"]]
    known = [value for line in values for value in line if math.isfinite(value)]
    figure = new_figure(style.WIDTH, 1.6 + 0.55 * len(table["exponent_bits"]))
    style.title(figure, _result(document, known))
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
    save(figure, path)


def _result(document: Mapping[str, Any], known: list[float]) -> str:
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
