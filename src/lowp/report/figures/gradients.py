"""Figures of weight gradients and updates in a run, after figure 2 of Micikevicius et al. 2018, arXiv 1710.03740."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.plots import new_figure, save

__all__ = ["gradients", "gradients_words", "updates", "updates_words"]

_MOMENTS = {"first": (style.BLUE, "-"), "middle": (style.YELLOW, "--"), "last": (style.PURPLE, "-.")}
_LIMITS = {"bf16": (style.GREEN, "--"), "fp16": (style.RED, ":")}


def updates(document: Mapping[str, Any], path: Path) -> None:
    """Draw the weight gradients and the update:weight ratios of the first, middle and last epoch."""
    moments = document["moments"]
    figure = new_figure(10.5, 5.2)
    left, right = figure.subplots(1, 2)
    for moment, moment_record in moments.items():
        color, line = _MOMENTS[moment]
        title = f"{moment} epoch ({moment_record['epoch']})"
        zeros = _zeros(moment_record["gradients"])
        style.histogram(left, moment_record["gradients"], color, f"{title}{zeros}", line)
        style.histogram(right, moment_record["ratios"], color, title, line)
    ends = style.range_of([moment_record["gradients"] for moment_record in moments.values()], [style.FP16_SMALLEST])
    style.window(left, *ends)
    left.set_xlim(*ends)
    left.set(xlabel="|weight gradient|", title="gradients of weights")
    for format, exponent in document["limits"].items():
        beyond = ", ".join(style.share(moment_record["below"][format]) for moment_record in moments.values())
        style.limit(
            right,
            exponent,
            _LIMITS[format][0],
            f"lost in {format}: below $2^{{{exponent}}}$ are {beyond}",
            _LIMITS[format][1],
        )
    right.set_xlim(
        *style.range_of(
            [moment_record["ratios"] for moment_record in moments.values()], list(document["limits"].values())
        )
    )
    right.set(xlabel="|update| / |weight|", title="updates beside their weights")
    _finish(figure, (left, right))
    figure.suptitle(style.ended(document), fontsize=11)
    style.caption(figure, updates_words(document))
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


def gradients(document: Mapping[str, Any], path: Path) -> None:
    """Draw weight gradients, updates and update:weight ratios, and the part of each that is lost in fp16."""
    figure = new_figure(13.0, 4.9)
    panels = figure.subplots(1, 3)
    rows = (("gradients", "|weight gradient|", style.BLUE), ("updates", "|update|", style.GREEN))
    for panel, (name, label, color) in zip(panels, rows, strict=False):
        counts = document[name]
        style.histogram(panel, counts["histogram"], color, f"{name}{_zeros(counts['histogram'])}")
        ends = style.range_of([counts["histogram"]], [style.FP16_SMALLEST, style.FP16_SMALLEST_NORMAL])
        style.window(panel, *ends)
        panel.set_xlim(*ends)
        panel.set(xlabel=label, title=f"{style.share(counts['below'])} of the {name} below $2^{{-24}}$")
    right, limit = panels[2], document["limits"]["fp16"]
    style.histogram(right, document["ratios"], style.PURPLE, "updates beside their weights")
    style.limit(right, limit, style.RED, f"lost in fp16: below $2^{{{limit}}}$", ":")
    right.set_xlim(*style.range_of([document["ratios"]], [limit]))
    right.set(
        xlabel="|update| / |weight|",
        title=f"{style.share(document['below']['fp16'])} of the ratios below $2^{{{limit}}}$",
    )
    _finish(figure, panels)
    figure.suptitle(style.ended(document), fontsize=11)
    style.caption(figure, gradients_words(document))
    save(figure, path)


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


def _finish(figure: Any, panels: Any) -> None:
    for panel in panels:
        style.powers(panel.xaxis)
        low, high = panel.get_ylim()
        panel.set_ylim(low, high * 1.45)  # room for the legend above the bars
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8, loc="upper left", framealpha=1.0)
    panels[0].set_ylabel("share of the nonzero elements, %")
