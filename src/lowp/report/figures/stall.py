"""The figure of weights that stop changing in 16 bits, compared with fp32 masters and stochastic rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.plots import new_figure, save

__all__ = ["stall", "stall_words"]

# fp32's line is broad, so that lines on it are visible
_LINES = (
    {"color": style.BLUE, "linewidth": 4.5, "alpha": 0.35},
    {"color": style.GREEN, "linewidth": 1.6, "linestyle": "--"},
    {"color": style.PURPLE, "linewidth": 1.3, "linestyle": "-."},
    {"color": style.RED, "linewidth": 1.6},
)
_SPAN = 9  # length of the running mean in steps


def stall(document: Mapping[str, Any], path: Path) -> None:
    """Draw the share of weights that a step changes, the values of one weight, and the validation loss."""
    figure = new_figure(13.0, 4.9)
    moving, way, loss = figure.subplots(1, 3)
    for index, row in enumerate(document["variants"]):
        line = {**_LINES[index % len(_LINES)], "label": row["label"]}
        moving.plot(row["step"], [100 * value for value in _smooth(row["moving"])], **line)
        way.plot(document["way_steps"], document["ways"][index], **line)
        known = [record for record in row["history"] if record["loss"] is not None]
        loss.plot([record["epoch"] for record in known], [record["loss"] for record in known], **line)
    moving.set(xlabel="step", ylabel="weights with a gradient that a step changes, %", title="weights that change")
    moving.set_ylim(0, 105)
    where = f"[{', '.join(map(str, document['index']))}]" if document["index"] else ""
    way.set(xlabel="step", ylabel=f"{document['parameter']}{where}", title="course of one weight")
    way.ticklabel_format(axis="y", useOffset=False)
    loss.set(xlabel="epoch", ylabel="validation loss", title="effect on training")
    for panel in (moving, way, loss):
        panel.grid(alpha=0.25)
    moving.legend(fontsize=8, loc="best")
    figure.suptitle(
        f"{document['recipe']} with weights stored in {document['format']}, seed {document['seed']}", fontsize=11
    )
    style.caption(figure, stall_words(document))
    save(figure, path)


def stall_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per variant: the mean share that changes, the share that never changed, and the metric."""
    metric = document["metric"]
    words = []
    for row in document["variants"]:
        mean = math.fsum(row["moving"]) / max(1, len(row["moving"]))
        last = row["history"][-1] if row["history"] else {}
        ending = row["failure"] or f"{metric['name']} {style.number(last.get(metric['name']), metric['is_share'])}"
        words.append(
            f"{row['label']}: a step changes {style.share(mean)} of the weights; of those that fp32 changes, "
            f"{style.share(row['never'])} end at their initial value; {ending}."
        )
    return words


def _smooth(values: list[float]) -> list[float]:
    """Return the running mean, over fewer values at the ends."""
    half = _SPAN // 2
    parts = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]
