"""Figures of weight gradients and updates in a run, after figure 2 of Micikevicius et al. 2018, arXiv 1710.03740."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.palette import BLUE, GREEN, PURPLE
from lowp.report.plots import save


@style.styled
def updates(document: Mapping[str, Any], path: Path) -> None:
    """Draw the weight gradients and the update:weight ratios of the first, middle and last epoch, a row each."""
    moments = list(document["moments"].values())
    worst = max(moments, key=lambda moment: moment["lost"]["bf16"] or 0)
    figure = style.figure(
        1.0 + 1.35 * len(moments),
        f"{document['recipe']}: weights stored in bf16 would lose {style.share(worst['lost']['bf16'])} of their "
        f"updates in epoch {worst['epoch']}, in fp16 {style.share(worst['lost']['fp16'])}",
    )
    grid = figure.subplots(len(moments), 2, sharex="col", squeeze=False, width_ratios=(1, 1.35))
    limits = document["limits"]
    for (left, right), moment in zip(grid, moments, strict=True):
        style.ridge(left, moment["gradients"], BLUE, (f"epoch {moment['epoch']}: gradients of weights", ""))
        lost = ", ".join(f"{style.share(moment['lost'][format])} in {format}" for format in limits)
        is_first = moment is moments[0]
        marks = [(exponent, f"{format} loses below" if is_first else "") for format, exponent in limits.items()]
        style.ridge(right, moment["ratios"], PURPLE, ("updates lost", lost), marks)
    left, right = grid[-1]
    left.set_xlim(*style.range_of([moment["gradients"] for moment in moments]))
    right.set_xlim(*style.range_of([moment["ratios"] for moment in moments], list(limits.values())))
    left.set_xlabel("|gradient|")
    right.set_xlabel("|update| / |weight|")
    for panel in (left, right):
        style.powers(panel.xaxis, 6)
    save(figure, path)


def updates_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per epoch: the shares below the limits, and the share of updates without effect."""
    return [_moment_words(moment) for moment in document["moments"].values()]


def _moment_words(moment: Mapping[str, Any]) -> str:
    rates = moment["learning_rates"]
    rate = "" if rates is None else f", learning rate {' to '.join(dict.fromkeys(f'{value:.3g}' for value in rates))}"
    below, lost = moment["below"], moment["lost"]
    return (
        f"Epoch {moment['epoch']}{rate}: {style.share(below['bf16'])} of the updates are below 2^-8 of their weight, "
        f"{style.share(below['fp16'])} below 2^-11. Of weights stored in bf16, {style.share(lost['bf16'])} would stay "
        f"unchanged, in fp16 {style.share(lost['fp16'])}."
    )


@style.styled
def gradients(document: Mapping[str, Any], path: Path) -> None:
    """Draw weight gradients, updates and update:weight ratios on one axis, and the part of each that is lost."""
    figure = style.figure(4.6, _result(document))
    first, second, third = panels = style.panels(figure, 3)
    limit = document["limits"]["fp16"]
    marks = [(style.FP16_SMALLEST, "fp16's smallest number"), (style.FP16_SMALLEST_NORMAL, "fp16's smallest normal")]
    for panel, name, color in ((first, "gradients", BLUE), (second, "updates", GREEN)):
        counts = document[name]
        words = f"{style.share(counts['below'])} below 2^-24{_zeros(counts['histogram'])}"
        style.ridge(panel, counts["histogram"], color, (f"{name} of weights", words), marks)
        marks = [(exponent, "") for exponent, _ in marks]
    words = f"{style.share(document['below']['fp16'])} below 2^{limit}, half an ulp of fp16"
    style.ridge(
        third, document["ratios"], PURPLE, ("updates beside their weights", words), [(limit, "too small to move")]
    )
    histograms = [document["gradients"]["histogram"], document["updates"]["histogram"], document["ratios"]]
    third.set_xlim(*style.range_of(histograms, [style.FP16_SMALLEST, limit]))
    third.set_xlabel("size; of the lowest, |update| / |weight|")
    style.powers(panels[-1].xaxis)
    save(figure, path)


def _result(document: Mapping[str, Any]) -> str:
    """Return what the precision loses beside fp32; a record of an earlier lowp has no run in fp32."""
    metric, base = document["metric"], document.get("fp32")
    value, unmoved = metric["value"], style.share(document["unmoved"])
    if document["failure"] or value is None or base is None:
        ending = document["failure"] or f"ends at {metric['name']} {style.number(value, metric['is_share'])}"
        return f"{document['precision']} {ending}: {unmoved} of the weights with an update do not move"
    size = abs(base - value)
    gap = f"{100 * size:.1f} points" if metric["is_share"] else f"{size:.3g}"
    change = f"{'loses' if value < base else 'gains'} {gap} of {metric['name']}"
    return f"{document['precision']} {change}: {unmoved} of the weights with an update do not move"


def gradients_words(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on the gradients, the updates and the update:weight ratios that are lost in fp16."""
    gradients, updates = document["gradients"], document["updates"]
    return [
        f"Of the gradients in fp32, {style.share(gradients['below'])} are below 2^-24, fp16's smallest number; "
        f"{style.share(document['flushed'])} are zero in this run.",
        f"Of the updates that the optimizer computes, {style.share(updates['below'])} are below 2^-24: in fp16 they "
        f"are zero or 2^-24 ({style.share(updates['zero'])} are zero).",
        f"{style.share(document['below']['fp16'])} of the updates are below 2^-11 of their weight; in this run "
        f"{style.share(document['unmoved'])} of the weights with a nonzero update stayed unchanged.",
    ]


def _zeros(found: Mapping[str, Any]) -> str:
    return f"; zeros apart, {style.share(found['zeros'] / max(1, found['elements']))}" if found["zeros"] else ""
