"""The figure of the energy and area of arithmetic by format, with published values and estimates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.plots import new_figure, save

__all__ = ["cost", "cost_words"]

# The panels: an entry of a format's costs, and the title.
_PANELS = (
    ("energy", "energy of arithmetic, pJ"),
    ("read", "energy of reading a number, pJ"),
    ("area", "area of a unit, µm²"),
)


def cost(document: Mapping[str, Any], path: Path) -> None:
    """Draw three panels on logarithmic axes; bars of estimates are hatched, and all bars are labelled."""
    from matplotlib.patches import Patch

    rows = document["formats"]
    figure = new_figure(13.5, 2.6 + 0.52 * len(rows))
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (entry, title) in zip(panels, _PANELS, strict=True):
        names = list(rows[0][entry])
        for index, name in enumerate(names):
            _bars(panel, [row[entry][name] for row in rows], style.COLORS[index], 0.42 * index)
        low, high = _ends([estimate["value"] for row in rows for estimate in row[entry].values()])
        panel.set_xscale("log")
        panel.set_xlim(low, high)
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.25, axis="x")
        handles = [Patch(color=style.COLORS[index], label=name) for index, name in enumerate(names)]
        panel.legend(
            handles=handles,
            fontsize=8,
            loc="lower center",
            bbox_to_anchor=(0.5, -0.02 - 0.9 / (len(rows) + 1)),
            ncols=2,
        )
    panels[0].set_yticks([row_index + 0.21 for row_index in range(len(rows))], [_label(row) for row in rows])
    panels[0].set_ylim(len(rows) - 0.2, -0.6)
    figure.suptitle(f"What a number costs in silicon; source: {document['source']}", fontsize=11)
    style.caption(
        figure, [*cost_words(document), "Full bars: the source's table. Hatched bars and ~: lowp's estimates from it."]
    )
    save(figure, path)


def cost_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence with the energy of a multiplication in the costliest format relative to the others."""
    rows = document["formats"]
    costliest = max(rows, key=lambda row: row["energy"]["multiply"]["value"])
    parts = []
    for row in rows:
        multiply = row["energy"]["multiply"]
        if row is not costliest and multiply["value"] > 0:
            estimated = "" if multiply["how"] == "table" else "~"
            parts.append(
                f"{row['name']} {estimated}{_number(costliest['energy']['multiply']['value'] / multiply['value'])}"
            )
    if not parts:
        return []
    return [f"Energy of a multiplication in {costliest['name']} as a multiple of that in: {', '.join(parts)}."]


def _bars(panel: Any, estimates: list[Mapping[str, Any]], color: str, offset: float) -> None:
    for position, estimate in enumerate(estimates):
        known = estimate["how"] == "table"
        panel.barh(
            position + offset,
            estimate["value"],
            height=0.4,
            color=color if known else "none",
            edgecolor=color,
            hatch=None if known else "////",
        )
        text = f" {'' if known else '~'}{_number(estimate['value'])}"
        panel.text(estimate["value"], position + offset, text, va="center", fontsize=8)


def _ends(values: list[float]) -> tuple[float, float]:
    """Return limits of an axis, below the smallest bar and with room for the number at the largest."""
    positive = [value for value in values if value > 0]
    return min(positive) / 3, max(positive) * 6


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['name']}\n{row['significand_bits']}-bit {'integer' if row['is_integer'] else 'significand'}"
