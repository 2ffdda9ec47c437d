"""The figure of weights that stop changing in 16 bits, compared with fp32 masters and stochastic rounding."""

import math
from collections.abc import Mapping
from typing import Any

from lowp.report.figures import style
from lowp.report.palette import GREEN, GREY, PURPLE, RED
from lowp.report.tables import number

# fp32's line is broad, so that lines on it are visible
_LINES: tuple[dict[str, Any], ...] = (
    {"color": GREY, "linewidth": 4.5, "alpha": 0.35},
    {"color": GREEN, "linewidth": 1.5, "linestyle": "--"},
    {"color": PURPLE, "linewidth": 1.3},
    {"color": RED, "linewidth": 1.6},
)
_SPAN = 9  # length of the running mean in steps


@style.styled
def stall(document: Mapping[str, Any]) -> Any:
    """Draw the share of weights that a step changes, the values of one weight, and the loss beside fp32's."""
    figure = style.figure(6.2, _result(document))
    moving, way, loss = figure.subplots(3, 1)
    rows = document["variants"]
    ends: dict[str, list[tuple[float, str, str]]] = {"moving": [], "way": []}
    for index, row in enumerate(rows):
        line = _LINES[index % len(_LINES)]
        smooth = [100 * value for value in _smooth(row["moving"])]
        moving.plot(row["step"], smooth, **line)
        way.plot(document["way_steps"], document["ways"][index], **line)
        label = _short(row["label"], document["format"])
        for name, values in (("moving", smooth), ("way", document["ways"][index])):
            if values:
                ends[name].append((values[-1], label, line["color"]))
    moving.set(title="weights with a gradient that a step changes, %")
    moving.set_ylim(-4, 106)
    where = f"[{', '.join(map(str, document['index']))}]" if document["index"] else ""
    way.set(title=f"course of one weight, {document['parameter']}{where}", xlabel="step")
    way.ticklabel_format(axis="y", useOffset=False)
    style.label_ends(moving, ends["moving"])
    style.label_ends(way, ends["way"])
    _losses(loss, document)
    return figure


def _losses(panel: Any, document: Mapping[str, Any]) -> None:
    """Draw the validation loss minus that of the first run, fp32's."""
    base = {record["epoch"]: record["loss"] for record in document["variants"][0]["history"]}
    ends = []
    panel.axhline(0, color=GREY, linewidth=3, alpha=0.35)
    for index, row in enumerate(document["variants"][1:], 1):
        known = [
            (record["epoch"], record["loss"] - base[record["epoch"]])
            for record in row["history"]
            if record["loss"] is not None and base.get(record["epoch"]) is not None
        ]
        if not known:
            continue
        line = _LINES[index % len(_LINES)]
        panel.plot(*zip(*known, strict=True), **line)
        label = f"{_short(row['label'], document['format'])} {known[-1][1]:+.3f}"
        ends.append((known[-1][1], label, line["color"]))
    panel.set(xlabel="epoch", title=f"validation loss minus that of {document['variants'][0]['label']}")
    style.label_ends(panel, ends)


def _short(label: str, format: str) -> str:
    return label.removeprefix(f"{format}, ").removeprefix(f"{format} + ")


def _result(document: Mapping[str, Any]) -> str:
    """Return what the variant of most weights that never move ends at, beside the first, fp32."""
    base, *others = document["variants"]
    worst = max(others or [base], key=lambda row: row["never"] or 0)
    return (
        f"{worst['label']}: {style.share(worst['never'])} of the weights of {document['recipe']} never move, "
        f"{_ending(document, worst)}; {base['label']}: {_ending(document, base, True)}"
    )


def _ending(document: Mapping[str, Any], row: Mapping[str, Any], is_short: bool = False) -> str:
    metric, last = document["metric"], row["history"][-1] if row["history"] else {}
    value = number(last.get(metric["name"]), metric["is_share"], "no number")
    return str(row["failure"] or (value if is_short else f"{metric['name']} {value}"))


def stall_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per variant: the mean share that changes, the share that never changed, and the metric."""
    words = []
    for row in document["variants"]:
        mean = math.fsum(row["moving"]) / max(1, len(row["moving"]))
        words.append(
            f"{row['label']}: a step changes {style.share(mean)} of the weights; of those that fp32 changes, "
            f"{style.share(row['never'])} end at their initial value; {_ending(document, row)}."
        )
    return words


def _smooth(values: list[float]) -> list[float]:
    """Return the running mean, over fewer values at the ends."""
    half = _SPAN // 2
    parts = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]
