"""Figures of the gradients of activations, after figure 3 of Micikevicius et al. 2018, arXiv 1710.03740."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowp.report.figures import style
from lowp.report.plots import new_figure, save

__all__ = ["activation_gradients", "activation_gradients_words", "loss_scaling", "loss_scaling_words"]


def activation_gradients(document: Mapping[str, Any], path: Path) -> None:
    """Draw both histograms with the range of fp16, and the medians by layer, the first layer at the top."""
    layers = document["layers"]
    figure = new_figure(11.5, max(5.4, 2.6 + 0.2 * len(layers)))
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    histograms = {name: document[name]["histogram"] for name in ("activations", "weights")}
    for (name, row), color, line in zip(histograms.items(), (style.BLUE, style.GREEN), ("-", "--"), strict=True):
        style.histogram(left, row, color, f"gradients of {name}; zeros apart, {_zeros(row)}", line)
    _windowed(left, list(histograms.values()))
    left.set(xlabel="|gradient|", ylabel="share of the nonzero elements, %")
    places = range(len(layers))
    for name, color, mark in (("activations", style.BLUE, "o"), ("weights", style.GREEN, "s")):
        right.plot([row[name] for row in layers], places, mark, color=color, label=f"of {name}", markersize=5)
    for place, row in enumerate(layers):
        right.plot([row["activations"], row["weights"]], [place, place], color=style.GREY, linewidth=1, zorder=0)
    right.axvline(
        style.FP16_SMALLEST_NORMAL, color=style.GREY, linestyle="--", linewidth=1, label="fp16's smallest normal"
    )
    right.set_yticks(places, [row["name"] for row in layers], fontsize=8)
    right.set_ylim(
        len(layers) + 0.12 * len(layers) + 1.5, -1
    )  # the first at the top, room for the legend at the bottom
    right.set(xlabel="median |gradient| of the layer", title="medians by layer")
    style.powers(right.xaxis, 6)
    right.grid(alpha=0.25)
    right.legend(fontsize=8, loc="lower right", ncols=3, columnspacing=1.0, handlelength=1.2)
    figure.suptitle(style.ended(document), fontsize=11)
    style.caption(figure, activation_gradients_words(document))
    save(figure, path)


def activation_gradients_words(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on the zeros, on what is lost and subnormal in fp16, and on the two medians."""
    both = [document["activations"], document["weights"]]
    zero, subnormal = (", ".join(style.share(one[name]) for one in both) for name in ("below", "subnormal"))
    medians = [one["histogram"]["median"] for one in both]
    words = [
        f"{_zeros(both[0]['histogram'])} of the gradients of activations and {_zeros(both[1]['histogram'])} of those "
        "of weights are zero; the following shares are of the others.",
        f"Below fp16's smallest number, 2^-24: {zero} (activations, weights). Subnormal in fp16: {subnormal}.",
    ]
    if None not in medians:
        smaller = medians[1] - medians[0]
        words.append(
            f"Medians: 2^{medians[0]:.1f} of activations, 2^{medians[1]:.1f} of weights: those of activations are "
            f"{2 ** abs(smaller):.3g} times {'smaller' if smaller > 0 else 'larger'}."
        )
    return words


def loss_scaling(document: Mapping[str, Any], path: Path) -> None:
    """Draw the gradients with the range of fp16, at the top without the loss scale, at the bottom with it."""
    figure = new_figure(9.0, 6.6)
    panels = figure.subplots(2, 1, sharex=True)
    histograms = [document[name]["histogram"] for name in ("before", "after")]
    rows = (
        ("before", "without a loss scale", style.BLUE),
        ("after", f"under a loss scale of {_scales(document)}", style.GREEN),
    )
    for panel, histogram, (name, label, color) in zip(panels, histograms, rows, strict=True):
        style.histogram(panel, histogram, color, f"{label}: {style.share(document[name]['below'])} below $2^{{-24}}$")
        _windowed(panel, histograms, legend=panel is panels[0])
        panel.set_ylabel("share of the nonzero\nelements, %")
    panels[1].set_xlabel("|gradient of an activation|")
    figure.suptitle(style.ended(document), fontsize=11)
    style.caption(figure, loss_scaling_words(document))
    save(figure, path)


def loss_scaling_words(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on what is outside fp16's range without and with the scale, and on its distance to overflow."""
    names = ("below", "zero", "subnormal", "infinite")
    before, after = ({name: style.share(document[moment][name]) for name in names} for moment in ("before", "after"))
    words = [
        f"Below 2^-24: {before['below']} of the nonzero gradients of activations without a scale, {after['below']} "
        f"with it; zero in fp16: {before['zero']} and {after['zero']}.",
        f"Subnormal in fp16: {before['subnormal']} without a scale, {after['subnormal']} with it; infinite in fp16: "
        f"{before['infinite']} and {after['infinite']}.",
    ]
    skipped = document["skipped_steps"]
    ending = f"The scale was {_scales(document)}, {skipped} step{'s' * (skipped != 1)} of {document['steps']} skipped"
    room = document["room"]
    if room is not None:
        times = f"{abs(room)} time{'s' * (abs(room) != 1)}"
        ending += (
            f"; with the largest gradient the last scale could be doubled {times}"
            if room >= 0
            else f"; for the largest gradient the last scale must be halved {times}"
        )
    return [*words, f"{ending}."]


def _scales(document: Mapping[str, Any]) -> str:
    """Return the scales of the run: one number, or the first and the last."""
    values = dict.fromkeys([*(scale for _, scale in document["scales"]), document["last_scale"]])
    return " to ".join(
        f"{value:,.0f}" if value >= 1 else f"{value:g}" for value in list(values)[:: max(1, len(values) - 1)]
    )


def _windowed(panel: Any, histograms: list[Mapping[str, Any]], legend: bool = True) -> None:
    """Draw the range of fp16 behind the histograms, and in the legend if `legend`."""
    handles = panel.get_legend_handles_labels()[0]
    ends = style.range_of(histograms, [style.FP16_SMALLEST, style.FP16_SMALLEST_NORMAL, style.FP16_END])
    style.window(panel, *ends)
    panel.set_xlim(*ends)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high * 1.4)
    panel.grid(alpha=0.25)
    panel.legend(handles=None if legend else handles, fontsize=8, loc="upper right", framealpha=1.0)
    style.powers(panel.xaxis)


def _zeros(histogram: Mapping[str, Any]) -> str:
    return style.share(histogram["zeros"] / max(1, histogram["elements"]))
