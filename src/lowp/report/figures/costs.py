"""The figure of the energy and area of arithmetic by format, with published values and estimates."""

from collections.abc import Mapping
from typing import Any

from lowp.report.figures import style
from lowp.report.palette import BLUE, GREEN
from lowp.report.tables import amount

# The panels: an entry of a format's costs, and the title.
_PANELS = (("energy", "energy, pJ"), ("read", "energy of a read, pJ"), ("area", "area, µm²"))
_COLORS = (BLUE, GREEN)


@style.styled
def cost(document: Mapping[str, Any]) -> Any:
    """Draw three panels on logarithmic axes; published values are filled, estimates hollow and marked with ~."""
    rows = document["formats"]
    figure = style.figure(1.5 + 0.55 * len(rows), _result(document))
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (entry, title) in zip(panels, _PANELS, strict=True):
        names = list(rows[0][entry])
        for index, name in enumerate(names):
            _bars(panel, [row[entry][name] for row in rows], _COLORS[index], 0.42 * index)
        panel.set_xscale("log")
        panel.set_xlim(*_ends([estimate["value"] for row in rows for estimate in row[entry].values()]))
        panel.set_title(title)
        for index, name in enumerate(names):  # above the bars that it names
            panel.text(
                0.0, 1 - 0.035 * index, name, color=_COLORS[index], fontsize=8.5, transform=panel.transAxes, va="top"
            )
        panel.grid(visible=False, axis="y")
    kinds = ("significand", "integer")
    labels = [f"{row['name']}\n{row['significand_bits']}-bit {kinds[row['is_integer']]}" for row in rows]
    panels[0].set_yticks([place + 0.21 for place in range(len(rows))], labels, fontsize=8)
    panels[0].set_ylim(len(rows) - 0.2, -0.95)
    figure.supxlabel(f"filled: {document['source']}; hollow and ~: lowp's estimates from it", fontsize=8.5)
    return figure


def _result(document: Mapping[str, Any]) -> str:
    """Return how many multiplications of the cheapest format take the energy of one in the costliest."""
    energies = [(row["name"], row["energy"]["multiply"]) for row in document["formats"]]
    known = [(name, one) for name, one in energies if one["value"] > 0]
    if len(known) < 2:
        return "What a number costs in silicon"
    costliest, cheapest = (pick(known, key=lambda pair: pair[1]["value"]) for pick in (max, min))
    mark = "" if cheapest[1]["how"] == costliest[1]["how"] == "table" else "about "
    times = amount(costliest[1]["value"] / cheapest[1]["value"])
    return f"A multiplication in {costliest[0]} takes the energy of {mark}{times} in {cheapest[0]}"


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
                f"{row['name']} {estimated}{amount(costliest['energy']['multiply']['value'] / multiply['value'])}"
            )
    if not parts:
        return []
    return [f"Energy of a multiplication in {costliest['name']} as a multiple of that in: {', '.join(parts)}."]


def _bars(panel: Any, estimates: list[Mapping[str, Any]], color: str, offset: float) -> None:
    for position, estimate in enumerate(estimates):
        known = estimate["how"] == "table"
        face = color if known else "white"
        panel.barh(position + offset, estimate["value"], height=0.36, color=face, edgecolor=color, linewidth=1)
        text = f" {'' if known else '~'}{amount(estimate['value'])}"
        panel.text(estimate["value"], position + offset, text, va="center", fontsize=8)


def _ends(values: list[float]) -> tuple[float, float]:
    """Return limits of an axis, below the smallest bar and with room for the number at the largest."""
    positive = [value for value in values if value > 0]
    low, high = min(positive) / 3, max(positive)
    return low, high * (high / low) ** 0.35
