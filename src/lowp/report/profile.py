"""The reports of a profile but HTML: verdict, findings, formats and loss scales on a terminal, CSV, and TensorBoard."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lowp import files
from lowp.errors import Unavailable, counted
from lowp.numerics.advice import Advice, FormatVerdict
from lowp.numerics.part import failure
from lowp.numerics.policies import HighLayers, Product, worst
from lowp.numerics.prediction import Effect, Window, effect
from lowp.numerics.record import Key, Record
from lowp.report.palette import GRADES
from lowp.report.terminal import plain_table, show

_MOST_LAYERS = 12
_MARKS = {"error": GRADES["loses"], "warning": GRADES["with care"]}


def print_profile(console: Console, record: Record, advice: Advice, next_command: str = "") -> None:
    """Print a profile on one screen."""
    console.print(f"[bold]{escape(headline(record))}[/bold]")
    console.print(f"VERDICT  {escape(recommendation(record, advice))}")
    for line in findings(advice):
        console.print(line)
    if advice.verdicts:
        show(console, verdict_table(advice.verdicts))
    console.print(escape(scale_line(advice.window, part_seen(record))))
    if left_out := unseen(record):
        console.print(escape(left_out))
    if next_command and record.part.faults:
        console.print("Next: correct what made the training infinite or NaN, and profile it again")
    elif next_command:
        console.print(f"Next: {escape(next_command)}")
    if advice.findings:
        console.print(f"Why:  lowp explain {advice.findings[0].id}")


def headline(record: Record) -> str:
    """Return the title of the profile, the amount that was recorded, and the overhead."""
    header, sampling = record.header, record.sampling
    parts = [str(header.get("title", header.get("model", "a model"))), f"{header.get('parameters', 0):,} parameters"]
    parts += [counted(len(record.tensors), "tensor"), _looks(record)]
    if "overhead" in sampling:
        parts.append(f"overhead {overhead_words(sampling)}")
    if not record.complete:
        parts.append("the run did not end")
    return " · ".join(parts)


def overhead_words(sampling: Mapping[str, Any]) -> str:
    """Return the share of time that was added; the seconds of a short run, where an allowance is the limit."""
    budget, own, overhead = sampling.get("max_overhead"), sampling.get("own_seconds", math.inf), sampling["overhead"]
    share = f"{100 * overhead:.1f} %"
    if not budget or overhead <= budget:
        return share
    if allowance := sampling.get("allowance", 0.0):
        limits = f"{allowance:g} s and {100 * budget:g} % of the run"
        return f"{own:.2f} s, of {allowance:g} s allowed" if own <= allowance else f"{own:.2f} s, above {limits}"
    why = ": a single recording costs that much here" if sampling.get("looks", 0.0) <= 1.0 else ""
    return f"{share}, above {100 * budget:g} %{why}"


def _looks(record: Record) -> str:
    """Return the number of recordings of each tensor: sampled steps, or recordings spread over steps in a budget."""
    steps, looks = len(record.sampled), record.sampling.get("looks")
    if record.sampling.get("max_overhead") is None or looks is None:
        return f"{steps} sampled step{'s'[: steps != 1]}"
    return f"{looks:.1f} recording{'s'[: looks != 1]} of each module over {steps} step{'s'[: steps != 1]}"


def unseen(record: Record) -> str:
    """Return a sentence on modules that were not recorded within the budget; '' if all were."""
    part = part_seen(record)
    if not part or not record.complete:
        return ""
    share = 100 * record.sampling["max_overhead"]
    return (
        f"{part} were recorded in {share:g} % of {record.sampling['total_seconds']:.2g} s: "
        "--max-overhead none records all of them, and so does a longer run"
    )


def part_seen(record: Record) -> str:
    """Return the number of modules recorded within the budget, in words; '' for all of them."""
    if not record.is_partial:
        return ""
    modules = record.sampling.get("modules")
    return "a part of the modules" if modules is None else f"{record.sampling['modules_seen']} of {modules} modules"


def recommendation(record: Record, advice: Advice) -> str:
    """Return what to do in one sentence: the format, its loss scale, what is kept out of it, and on what it rests."""
    if record.part.faults:
        fault = record.part.faults[0]
        where = " of ".join(filter(None, (fault["op"], fault["module"]))) or "an unknown operation"
        line = f" ({fault['line']})" if fault["line"] else ""
        return f"Mend the training first: in {failure(fault).replace(':', '', 1)}, first in {where}{line}"
    if not advice.verdicts:
        return "No format can be judged: no product of the model (linear, convolution, matmul) was recorded"
    part, window = part_seen(record), advice.window
    told = "Train in bf16 and keep the weights in fp32"
    if advice.policy.loss_scale is not None:
        scale = "a dynamic loss scale" if record.is_partial else f"loss scale 2^{window.recommended}"
        told = f"Train in fp16 with {scale} and keep the weights in fp32"
        if apart := [rule.where for rule in advice.policy.rules if rule.where != "*"]:
            more = f" and {counted(len(apart) - 3, 'more layer')}" if len(apart) > 3 else ""
            told += f", {', '.join(apart[:3])}{more} in bf16"
    elif window.is_unknown:
        told += ": no gradient was recorded, by which fp16 is judged"
    else:
        told += ": no loss scale brings the gradients into fp16"
    lost = next((one.stalled for one in advice.verdicts if one.format == "pure bf16" and not one.usable), None)
    if lost:
        told += f"{';' if ':' in told else ':'} stored in bf16 they would lose {100 * lost:.0f} % of their updates"
    return told + (f" (judged by {part} alone)" if part else "")


def findings(advice: Advice) -> list[str]:
    """Return one line per finding in rich's markup, and the number of tensors without one."""
    lines = []
    for finding in advice.findings:
        mark, *_, style = _MARKS[finding.severity]
        text = escape(f"{finding.id}  {finding.summary}   {finding.evidence} → {finding.change}")
        lines.append(f" [{style}]{mark}[/{style}] {text}")
    if advice.more:
        lines.append(f"   and {advice.more} more in the report")
    mark, *_, style = GRADES["safe"]
    quiet = "1 tensor needs" if advice.quiet == 1 else f"{advice.quiet:,} tensors need"
    lines.append(f" [{style}]{mark}[/{style}] {quiet} no change")
    return lines


def numbers_of(verdict: FormatVerdict, unknown: str = "-") -> tuple[str, str, str, str]:
    """Return the share flushed, the number that overflow, the share stalled, or `unknown`, and signal to noise."""
    stalled = unknown if verdict.stalled is None else f"{100 * verdict.stalled:.2f} %"
    ratio = "exact" if math.isinf(verdict.signal_to_noise) else f"{verdict.signal_to_noise:.0f} dB"
    return f"{100 * verdict.flushed:.3f} %", str(verdict.overflow), stalled, ratio


def verdict_table(verdicts: Sequence[FormatVerdict]) -> Table:
    """Return a table with one line per format."""
    heads = ("format", "use", "flushed", "overflow", "stalled", "SQNR", "verdict")
    table = plain_table(None, heads, left=("use",))
    for verdict in verdicts:
        mark, *_, style = GRADES[verdict.grade]
        use = Text(f"{mark} {verdict.grade}", style)
        table.add_row(verdict.format, use, *numbers_of(verdict), verdict.verdict)
    return table


def scale_line(window: Window, part: str = "") -> str:
    """Return the window of loss scales for fp16 and the recommended one; `part`: the modules to which it applies."""
    if window.is_unknown:
        return "Scale window: unknown, no gradient was recorded"
    if window.is_empty:
        return "Scale window: no scale fits any layer"
    low, high, width = max(window.lowest, -24), min(window.highest, 40), 24
    marker = round((window.recommended - low) / max(high - low, 1) * (width - 1))
    bar = "".join("■" if position == marker else "─" for position in range(width))
    if part:
        return f"Scale window of {part} alone 2^{low} ├{bar}┤ 2^{high}: the first step finds what fits the others too"
    return f"Scale window 2^{low} ├{bar}┤ 2^{high}, recommended 2^{window.recommended}"


def print_precision(
    console: Console,
    name: str,
    effects: Mapping[Key, Effect],
    products: Mapping[tuple[str, str], Mapping[str, Product]],
    changes: Mapping[str, float],
    high: HighLayers,
) -> None:
    """Print what a precision would do: to tensors, to the products of each layer, to the loss."""
    overflow = sum(one.overflows for one in effects.values())
    rounded = "1 tensor is" if len(effects) == 1 else f"{len(effects):,} tensors are"
    lines = [f"{name}: {rounded} rounded, {overflow} overflow; those that lose most:"]
    for key, one in worst(effects):
        bound = ", a bound" if one.is_bound else ""
        lines.append(
            f"  {key}: {100 * one.flushed:.3f} % flushed, {100 * one.overflow:.3f} % too large, "
            f"{one.signal_to_noise:.0f} dB{bound}"
        )
    console.print(escape("\n".join(lines)), soft_wrap=True)
    if products:
        show(console, product_table(products))
    if changes:
        text = ", ".join(f"{name} {size:.1e}" for name, size in changes.items())
        told = f"predicted change of the loss if only one of these tensors is rounded: {text}"
        console.print(escape(told), soft_wrap=True)
    if any(high.shares.values()):
        console.print(escape(high_line(high)), soft_wrap=True)


def product_table(products: Mapping[tuple[str, str], Mapping[str, Product]]) -> Table:
    """Return a table of the layers whose products have the largest errors, in the order of the model."""
    largest = sorted(products, key=lambda place: -max(one.error for one in products[place].values()))[:_MOST_LAYERS]
    names = ("forward", "input_gradient", "weight_gradient")
    heads = ["layer", *(name.replace("_", " ") for name in names)]
    table = plain_table("products: the share flushed, the mean square error", heads)
    for place in products:
        if place in largest:
            found = (products[place].get(name) for name in names)
            cells = ("-" if one is None else f"{100 * one.flushed:.1f} %  {100 * one.error:6.3f} %" for one in found)
            table.add_row(f"{place[0] or 'the model itself'} {place[1]}", *cells)
    return table


def high_line(high: HighLayers) -> str:
    """Return which layers to keep in bf16, if any stand out."""
    shares = {module or "the model itself": share for module, share in high.shares.items()}
    some = ", ".join(f"{name} {share:.0%}" for name, share in [*shares.items()][:3])
    kept = ", ".join([*shares][: len(high.kept)])
    advice = f"keep {kept} in bf16 (--high {len(high.kept)})" if kept else "no layer stands out"
    return f"{advice}: of the layers' predicted changes of the loss, squared, {some}"


# -- exports -----------------------------------------------------------------------------------------------------------
_NUMBERS = ("count", "zeros", "nan", "inf", "maximum", "root_mean_square", "lowest", "highest")
_FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")


def to_csv(record: Record, path: Path) -> None:
    """Write one line per tensor: counts, range, and the predicted effect of some formats."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    effects = [f"{effect_name}_{name}" for name in _FORMATS for effect_name in ("flushed", "overflow", "sqnr")]
    writer.writerow([*Key._fields, *_NUMBERS, *effects])
    for key, tensor in record.tensors.items():
        row: list[Any] = [*key, *(getattr(tensor, name) for name in _NUMBERS)]
        for name in _FORMATS:
            predicted = effect(tensor, name)
            row += [predicted.flushed, predicted.overflow, predicted.signal_to_noise]
        writer.writerow(["" if value is None else value for value in row])
    files.write(path, text.getvalue())


def to_tensorboard(record: Record, folder: Path) -> None:
    """Write a histogram of exponents per tensor, and the loss; raise Unavailable without the package tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Unavailable("writing TensorBoard files needs the package tensorboard: pip install tensorboard") from None
    with SummaryWriter(str(folder)) as writer:
        for key, tensor in record.tensors.items():
            if not tensor.nonzero:
                continue
            # every octave from the first to the last: a bucket reaches from the previous limit to its own
            filled = np.flatnonzero(tensor.octaves)
            present = [
                (index - 127, int(tensor.octaves[index])) for index in range(int(filled[0]), int(filled[-1]) + 1)
            ]
            writer.add_histogram_raw(
                tag=f"{key.role}/{key.module or 'model'}/{key.op}",
                min=present[0][0],
                max=present[-1][0] + 1,
                num=sum(count for _, count in present),
                sum=sum(exponent * count for exponent, count in present),
                sum_squares=sum(exponent * exponent * count for exponent, count in present),
                bucket_limits=[exponent + 1 for exponent, _ in present],
                bucket_counts=[count for _, count in present],
                global_step=max(record.sampled, default=0),
            )
        for step in record.steps:
            for name in ("loss", "scale", "largest_gradient"):
                if getattr(step, name) is not None:
                    writer.add_scalar(name, getattr(step, name), step.step)
