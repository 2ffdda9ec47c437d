"""Pictures of weight gradients and updates in a run, after figure 2 of Micikevicius et al. 2018, arXiv 1710.03740."""

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
    for moment, one in moments.items():
        color, line = _MOMENTS[moment]
        title = f"{moment} epoch ({one['epoch']})"
        zeros = _zeros(one["gradients"])
        style.histogram(left, one["gradients"], color, f"{title}{zeros}", line)
        style.histogram(right, one["ratios"], color, title, line)
    ends = style.range_of([one["gradients"] for one in moments.values()], [style.FP16_SMALLEST])
    style.window(left, *ends)
    left.set_xlim(*ends)
    left.set(xlabel="|weight gradient|", title="gradients of weights")
    for format, exponent in document["limits"].items():
        beyond = ", ".join(style.share(one["below"][format]) for one in moments.values())
        style.limit(
            right,
            exponent,
            _LIMITS[format][0],
            f"lost in {format}: below $2^{{{exponent}}}$ are {beyond}",
            _LIMITS[format][1],
        )
    right.set_xlim(*style.range_of([one["ratios"] for one in moments.values()], list(document["limits"].values())))
    right.set(xlabel="|update| / |weight|", title="updates beside their weights")
    _finish(figure, (left, right))
    figure.suptitle(style.ended(document), fontsize=11)
    style.caption(figure, updates_words(document))
    save(figure, path)


def updates_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per epoch: the shares below the limits, and the share of updates without effect."""
    return [_moment_words(one) for one in document["moments"].values()]


def _moment_words(one: Mapping[str, Any]) -> str:
    rates = one["learning_rates"]
    rate = "" if rates is None else f", learning rate {' to '.join(dict.fromkeys(f'{value:.3g}' for value in rates))}"
    below, lost = one["below"], one["lost"]
    return (
        f"Epoch {one['epoch']}{rate}: {style.share(below['bf16'])} of the updates are below 2^-8 of their weight, "
        f"{style.share(below['fp16'])} below 2^-11. Of weights stored in bf16, {style.share(lost['bf16'])} would stay "
        f"unchanged, in fp16 {style.share(lost['fp16'])}."
    )


def gradients(document: Mapping[str, Any], path: Path) -> None:
    """Draw weight gradients, updates, and update:weight ratios, each with the part that fp16 loses."""
    figure = new_figure(13.0, 4.9)
    panels = figure.subplots(1, 3)
    both = (("gradients", "|weight gradient|", style.BLUE), ("updates", "|update|", style.GREEN))
    for panel, (name, label, color) in zip(panels, both, strict=False):
        found = document[name]
        style.histogram(panel, found["histogram"], color, f"{name}{_zeros(found['histogram'])}")
        ends = style.range_of([found["histogram"]], [style.FP16_SMALLEST, style.FP16_SMALLEST_NORMAL])
        style.window(panel, *ends)
        panel.set_xlim(*ends)
        panel.set(xlabel=label, title=f"{style.share(found['below'])} of the {name} below $2^{{-24}}$")
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
    """Return in words what fp16 loses of gradients, of updates, and of updates relative to their weights."""
    there, wanted = document["gradients"], document["updates"]
    return [
        f"Of the gradients in fp32, {style.share(there['below'])} are below 2^-24, fp16's smallest number; "
        f"{style.share(document['flushed'])} are zero in this run.",
        f"Of the updates that the optimizer computes, {style.share(wanted['below'])} are below 2^-24: in fp16 they are "
        f"zero or 2^-24 ({style.share(wanted['zero'])} are zero).",
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
