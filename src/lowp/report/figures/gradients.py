"""Figures of gradients and updates, after figures 2 and 3 of Micikevicius et al. 2018, arXiv 1710.03740."""

from collections.abc import Mapping
from typing import Any

from lowp.report.figures import style
from lowp.report.palette import BLUE, GREEN, GREY, PURPLE
from lowp.report.tables import number


@style.styled
def updates(document: Mapping[str, Any]) -> Any:
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
    style.powers(left, "|gradient|", [moment["gradients"] for moment in moments])
    style.powers(right, "|update| / |weight|", [moment["ratios"] for moment in moments], list(limits.values()))
    return figure


def updates_words(document: Mapping[str, Any]) -> list[str]:
    """Return a sentence per epoch: the shares below the limits, and the share of updates without effect."""
    words = []
    for moment in document["moments"].values():
        rates = [f"{value:.3g}" for value in moment["learning_rates"] or ()]
        rate = f", learning rate {' to '.join(dict.fromkeys(rates))}" if rates else ""
        below, lost = moment["below"], moment["lost"]
        words.append(
            f"Epoch {moment['epoch']}{rate}: {style.share(below['bf16'])} of the updates are below 2^-8 of their "
            f"weight, {style.share(below['fp16'])} below 2^-11. Of weights stored in bf16, {style.share(lost['bf16'])} "
            f"would stay unchanged, in fp16 {style.share(lost['fp16'])}."
        )
    return words


@style.styled
def gradients(document: Mapping[str, Any]) -> Any:
    """Draw weight gradients, updates and update:weight ratios on one axis, and the part of each that is lost."""
    figure = style.figure(4.6, _lost_beside_fp32(document))
    panels, limit = style.panels(figure, 3), document["limits"]["fp16"]
    marks = [(style.FP16_SMALLEST, "fp16's smallest number"), (style.FP16_SMALLEST_NORMAL, "fp16's smallest normal")]
    rows = []
    for name, color in (("gradients", BLUE), ("updates", GREEN)):
        histogram = document[name]["histogram"]
        apart = f"; zeros apart, {_zeros(histogram)}" if histogram["zeros"] else ""
        words = f"{style.share(document[name]['below'])} below 2^-24{apart}"
        rows.append((histogram, color, (f"{name} of weights", words)))
    style.ridges(panels, rows, marks)
    words = f"{style.share(document['below']['fp16'])} below 2^{limit}, half an ulp of fp16"
    beside = ("updates beside their weights", words)
    style.ridge(panels[2], document["ratios"], PURPLE, beside, [(limit, "too small to move")])
    histograms = [*(histogram for histogram, _, _ in rows), document["ratios"]]
    style.powers(panels[2], "size; of the lowest, |update| / |weight|", histograms, [style.FP16_SMALLEST, limit])
    return figure


def _lost_beside_fp32(document: Mapping[str, Any]) -> str:
    """Return what the precision loses beside fp32; a record of an earlier lowp has no run in fp32."""
    metric, base = document["metric"], document.get("fp32")
    value, unmoved = metric["value"], style.share(document["unmoved"])
    if document["failure"] or value is None or base is None:
        ending = document["failure"] or f"ends at {metric['name']} {number(value, metric['is_share'], 'no number')}"
        return f"{document['precision']} {ending}: {unmoved} of the weights with a gradient do not move"
    size = abs(base - value)
    gap = f"{100 * size:.1f} points" if metric["is_share"] else f"{size:.3g}"
    change = f"{'loses' if value < base else 'gains'} {gap} of {metric['name']}"
    return f"{document['precision']} {change}: {unmoved} of the weights with a gradient do not move"


def gradients_words(document: Mapping[str, Any]) -> list[str]:
    """Return sentences on the gradients, the updates and the update:weight ratios that are lost in fp16."""
    gradients, updates = document["gradients"], document["updates"]
    return [
        f"Of the gradients in fp32, {style.share(gradients['below'])} are below 2^-24, fp16's smallest number; "
        f"{style.share(document['flushed'])} are zero in this run.",
        f"Of the updates that fp32 computes, {style.share(updates['below'])} are below 2^-24: in fp16 they "
        f"are zero or 2^-24 ({style.share(updates['zero'])} are zero).",
        f"{style.share(document['below']['fp16'])} of the updates are below 2^-11 of their weight; in this run "
        f"{style.share(document['unmoved'])} of the weights with a nonzero gradient stayed unchanged.",
    ]


# -- gradients of activations ------------------------------------------------------------------------------------------
_WINDOW = [(style.FP16_SMALLEST, "too small for fp16"), (style.FP16_SMALLEST_NORMAL, "subnormal in fp16")]


@style.styled
def activation_gradients(document: Mapping[str, Any]) -> Any:
    """Draw both histograms with the range of fp16, and the medians by layer, the first layer at the top."""
    layers = document["layers"]
    rows = 0.3 + 0.17 * max(2, len(layers))
    figure = style.figure(3.4 + rows, _medians_apart(document))
    *panels, below = style.panels(figure, 3, height_ratios=(1.2, 1.2, rows))
    drawn, places = [], range(len(layers))
    for name, color, mark in (("activations", BLUE, "o"), ("weights", GREEN, "s")):
        histogram = document[name]["histogram"]
        words = f"{style.share(document[name]['below'])} below 2^-24; zeros apart, {_zeros(histogram)}"
        drawn.append((histogram, color, (f"gradients of {name}", words)))
        below.plot([row[name] for row in layers], places, mark, color=color, markersize=4)
    style.ridges(panels, drawn, _WINDOW)
    for place, row in enumerate(layers):
        below.plot([row["activations"], row["weights"]], [place, place], color=GREY, linewidth=0.8, zorder=0)
    below.set_yticks(places, [row["name"] for row in layers], fontsize=8)
    below.set_ylim(len(layers) - 0.3, -0.7)
    below.set_title("median by layer: of activations ●, of weights ■")
    ends = [style.FP16_SMALLEST - 4, style.FP16_SMALLEST_NORMAL]
    style.powers(below, "|gradient|", [histogram for histogram, _, _ in drawn], ends)
    return figure


def _medians_apart(document: Mapping[str, Any]) -> str:
    """Return how far the gradients of activations are below those of weights, and how many fp16 cannot hold."""
    medians = [document[name]["histogram"]["median"] for name in ("activations", "weights")]
    lost = f"{style.share(document['activations']['below'])} are too small for fp16"
    if None in medians:
        return f"{document['recipe']}: of the gradients of activations {lost}"
    times, smaller = 2 ** abs(medians[1] - medians[0]), medians[1] > medians[0]
    than = f"{times:.3g} times {'smaller' if smaller else 'larger'} than those of weights"
    return f"{document['recipe']}: gradients of activations are {than}; {lost}"


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


@style.styled
def loss_scaling(document: Mapping[str, Any]) -> Any:
    """Draw the gradients with the range of fp16, at the top without the loss scale, at the bottom with it."""
    before, after = (style.share(document[name]["below"]) for name in ("before", "after"))
    figure = style.figure(
        3.9,
        f"{document['recipe']}: a loss scale of {_scales(document)} leaves {after} of the gradients of activations "
        f"below fp16's smallest number; without it there are {before}",
    )
    panels, rows = style.panels(figure, 2), []
    labels = ("without a loss scale", BLUE), (f"under a loss scale of {_scales(document)}", GREEN)
    for found, (label, color) in zip((document["before"], document["after"]), labels, strict=True):
        words = f"{style.share(found['below'])} below 2^-24, {style.share(found['subnormal'])} subnormal"
        rows.append((found["histogram"], color, (label, words)))
    style.ridges(panels, rows, _WINDOW)
    ends = [style.FP16_SMALLEST - 8, style.FP16_SMALLEST_NORMAL]
    style.powers(panels[1], "|gradient of an activation|", [histogram for histogram, _, _ in rows], ends)
    return figure


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
    ends = list(values)[:: max(1, len(values) - 1)]
    return " to ".join(f"{value:,.0f}" if float(value).is_integer() else f"{value:g}" for value in ends)


def _zeros(histogram: Mapping[str, Any]) -> str:
    return style.share(histogram["zeros"] / max(1, histogram["elements"]))
