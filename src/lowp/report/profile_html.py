"""A profile as one HTML file that works offline, by keyboard and with a screen reader, with interactive figures.

All values come from the record and the advice; the script only counts bins beyond the chosen limits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from lowp.formats import FORMATS, FloatFormat
from lowp.numerics.advice import Advice
from lowp.numerics.difference import difference
from lowp.numerics.part import failure
from lowp.numerics.record import Record
from lowp.report.profile import headline, overhead_words, part_seen, verdict_line

__all__ = ["page"]

_BIAS = 127
_MOST_ROWS = 160  # of a heat map: keeps a report under a megabyte for any model
_MAPS = {
    "weights": ("Weights", ("weight",)),
    "activations": ("Activations (outputs)", ("output",)),
    "gradients": ("Gradients of activations", ("grad",)),
    "weight_gradients": ("Gradients of weights", ("weight_grad",)),
    "updates": ("Applied updates", ("update",)),
}
_LIMITS = ("fp16", "bf16", "e5m2", "e4m3fn", "tf32", "fp32")


_COMMAND = "lowp run --policy policy.toml train.py"


def page(record: Record, advice: Advice, other: Record | None = None, command: str = _COMMAND) -> str:
    """Return the HTML report of a profile, with `other` compared with a second run; `command` is the next command."""
    folder = files("lowp.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("profile.css", "profile.js"))
    title = f"lowp profile: {record.header.get('title', '')}"
    body = "".join(
        (
            _verdict(record, advice, command),
            _findings(advice),
            _controls(record, advice),
            *(_map(name) for name in _MAPS),
            _ratios(record),
            _timeline(record),
            _faults(record),
            _policy(advice),
            "" if other is None else _comparison(record, other),
            _method(record),
        )
    )
    data = json.dumps(_data(record, advice), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>'
        f'<a class="skip" href="#verdict">Skip to the verdict</a><main>{body}</main>'
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>\n'
    )


def _data(record: Record, advice: Advice) -> dict[str, Any]:
    """Return the data of the script as JSON: for each heat map one row per tensor, with counts by octave.

    Powers of two are also counted apart: one that equals half the smallest number of a format is rounded to zero.
    """
    maps: dict[str, list[list[Any]]] = {name: [] for name in _MAPS}
    left_out: dict[str, int] = dict.fromkeys(_MAPS, 0)
    for key, tensor in record.tensors.items():
        name = next((name for name, (_, roles) in _MAPS.items() if key.role in roles), None)
        op = record.ops.get((key.module, key.op))
        if name is None or not tensor.nonzero or (key.role == "grad" and op is not None and op.op_class == "wide"):
            continue  # gradients of losses are fp32 in every precision
        if len(maps[name]) >= _MOST_ROWS:
            left_out[name] += 1
            continue
        present = [index for index, count in enumerate(tensor.octaves) if count]
        first, last = present[0], present[-1]
        label = f"{key.module} {key.op}".strip()
        powers = tensor.powers[first : last + 1]
        row = [label, first - _BIAS, tensor.octaves[first : last + 1].tolist(), tensor.maximum]
        maps[name].append([*row, powers.tolist()] if powers.any() else row)
    scale = 0 if advice.window.is_empty or advice.window.is_unknown else advice.window.recommended
    return {
        "maps": maps,
        "left_out": left_out,
        "formats": {name: _limits(name) for name in _LIMITS},
        "scale": max(min(scale, 40), -10),
        "scaled": ["gradients", "weight_gradients"],
    }


def _limits(name: str) -> dict[str, Any]:
    format = FORMATS[name]
    assert isinstance(format, FloatFormat)
    return {
        "smallest": format.min_exponent - format.precision,
        "normal": format.min_exponent,
        "maximum": format.maximum,
    }


# -- parts ------------------------------------------------------------------------------------------------------------
def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"


def _verdict(record: Record, advice: Advice, command: str) -> str:
    rows = [
        (
            verdict.format,
            verdict.verdict,
            f"{100 * verdict.flushed:.3f} %",
            verdict.overflow,
            "" if verdict.stalled is None else f"{100 * verdict.stalled:.2f} %",
            "exact" if math.isinf(verdict.signal_to_noise) else f"{verdict.signal_to_noise:.0f} dB",
        )
        for verdict in advice.verdicts
    ]
    head = ("format", "verdict", "gradients flushed", "tensors that overflow", "updates lost", "signal to noise")
    return (
        f"<h1>{escape(str(record.header.get('title', 'profile')))}</h1><p>{escape(headline(record))}</p>"
        f'<section id="verdict"><h2>Verdict</h2><p class="verdict">{escape(verdict_line(record, advice))}</p>'
        f'<p><code id="command">{escape(command)}</code> <button type="button" data-copy="command">Copy</button></p>'
        f"{_table('What each format would do', head, rows) if rows else ''}</section>"
    )


def _findings(advice: Advice) -> str:
    if not advice.findings:
        return '<section id="findings"><h2>Findings</h2><p>Nothing needs a change.</p></section>'
    items = "".join(
        f'<li class="{finding.severity}"><h3>{finding.id} {escape(finding.summary)}</h3>'
        f"<p>{escape(finding.evidence)}</p>"
        f"<p><strong>Change:</strong> {escape(finding.change)}. <strong>Then:</strong> {escape(finding.effect)}.</p>"
        f"<details><summary>Why</summary><p>{escape(finding.kind.cause)}</p><p>{escape(finding.kind.change)}</p></details></li>"
        for finding in advice.findings
    )
    return f'<section id="findings"><h2>Findings</h2><ul class="findings">{items}</ul></section>'


def _controls(record: Record, advice: Advice) -> str:
    options = "".join(f"<option>{name}</option>" for name in _LIMITS)
    window = advice.window
    span = "none fits all layers" if window.is_empty else f"2^{window.lowest} to 2^{window.highest}"
    span = "unknown, no gradient was recorded" if window.is_unknown else span
    span += f", of {part} alone" if (part := part_seen(record)) else ""
    return (
        '<section id="controls" aria-label="Limits of the heat maps"><h2>Limits</h2>'
        f'<label>Format <select id="format">{options}</select></label> '
        '<label>Smallest 2^<input id="low" type="number" value="-25"></label> '
        '<label>Largest 2^<input id="high" type="number" value="15"></label> '
        '<label>Loss scale <input id="scale" type="range" min="-10" max="40" step="1" '
        'aria-describedby="window"></label> '
        '<output id="scale-value" for="scale"></output>'
        '<p class="key"><span class="limit">smallest and largest number</span> <span class="normal">smallest normal '
        "number</span> The stronger the colour of a cell, the more numbers of its tensor.</p>"
        f'<p id="window">Loss scales that fit fp16: {escape(span)}</p>'
        '<p id="totals" role="status" aria-live="polite"></p></section>'
    )


def _map(name: str) -> str:
    title = _MAPS[name][0]
    return (
        f'<section class="map" data-map="{name}"><h2>{title}</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Heat map of {title.lower()}"><svg role="img" aria-label="{title} by layer and exponent; '
        f"the table "
        'below has the figures"></svg></div><details><summary>The same as a table</summary><table>'
        f"<caption>{title} at these limits</caption><thead><tr>"
        '<th scope="col">layer</th><th scope="col">numbers</th><th scope="col">exponents</th><th scope="col">'
        "flushed</th>"
        '<th scope="col">subnormal</th><th scope="col">overflow</th></tr></thead><tbody></tbody></table>'
        "</details></section>"
    )


def _ratios(record: Record) -> str:
    """Return the figure of update:weight ratios: a bar per power of two, and the limit of each format."""
    counts: dict[int, int] = {}
    for updates in record.updates.values():
        for ratio, count in updates.ratios().items():
            if -4 <= ratio <= 40:
                counts[ratio] = counts.get(ratio, 0) + count
    if not counts:
        return ""
    low, high = min(*counts, 0), max(*counts, 14)
    max_count, step, height = max(counts.values()), 16, 160
    bars = "".join(
        f'<rect class="bar" x="{(ratio - low) * step + 20}" y="{height - 140 * count / max_count:.1f}" '
        f'width="{step - 2}" height="{140 * count / max_count:.1f}"><title>2^{-ratio}: {count}</title></rect>'
        for ratio, count in sorted(counts.items())
    )
    stalls = [((precision + 1 - low) * step + 19, name) for name, precision in (("e4m3", 4), ("bf16", 8), ("fp16", 11))]
    lines = "".join(f'<line class="limit" x1="{x}" x2="{x}" y1="6" y2="{height}"/>' for x, _ in stalls) + "".join(
        f'<text x="{x + 3}" y="{14 + 14 * index}">{name} stalls →</text>' for index, (x, name) in enumerate(stalls)
    )
    width = (high - low + 8) * step
    ticks = "".join(
        f'<text x="{(ratio - low) * step + 20}" y="{height + 14}">2^{-ratio}</text>'
        for ratio in range(math.ceil(low / 4) * 4, high + 1, 4)
    )
    rows = [(f"2^{-ratio}", count) for ratio, count in sorted(counts.items())]
    return (
        f'<section id="ratios"><h2>Update beside weight</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Ratios">'
        f'<svg width="{width}" height="{height + 38}" role="img" aria-label="How many updates are a power of '
        f"two smaller "
        f'than their weight">{bars}{lines}{ticks}<text x="20" y="{height + 32}">|update| / |weight|'
        f"</text></svg></div><details><summary>The same as a table</summary>"
        f"{_table('Updates', ('ratio', 'updates'), rows)}"
        "</details></section>"
    )


def _timeline(record: Record) -> str:
    """Return the figures of the loss, and of the loss scale with the skipped steps."""
    steps = [step for step in record.steps if step.scale is not None or step.loss is not None]
    if not steps:
        return ""
    losses = [(step.step, step.loss) for step in steps if step.loss is not None and math.isfinite(step.loss)]
    scales = [(step.step, math.log2(step.scale)) for step in steps if step.scale]
    last = max(step.step for step in steps) or 1
    marks = "".join(
        f'<circle class="skipped" cx="{_across(step.step, last):.1f}" cy="12" r="4"><title>step {step.step} '
        "was skipped: a gradient overflowed</title></circle>"
        for step in steps
        if step.skipped
    )
    rows = [
        (
            step.step,
            _number(step.loss),
            _number(step.scale),
            _number(step.largest_gradient),
            "skipped: overflow" if step.skipped else "",
        )
        for step in steps
    ]
    head = ("step", "loss", "loss scale", "largest gradient", "")
    drawn = _curve("Loss", losses, last, "{:.4g}") + (
        _curve("Loss scale, skipped steps marked", scales, last, "2^{:g}", marks) or "<p>No loss scale was used.</p>"
    )
    return (
        f'<section id="timeline"><h2>Steps</h2>{drawn}<details><summary>The same as a table</summary>'
        f"{_table('Recorded steps', head, rows)}</details></section>"
    )


def _across(step: int, last: int) -> float:
    """Return the x coordinate of a step; the steps fill the width."""
    return 90 + 560 * step / last


def _curve(title: str, points: Sequence[tuple[int, float]], last: int, label: str, marks: str = "") -> str:
    """Return a line through the steps, labelled with its minimum and maximum; '' without points."""
    if not points:
        return ""
    low, high, height = min(value for _, value in points), max(value for _, value in points), 110
    points_text = " ".join(
        f"{_across(step, last):.1f},{height - 80 * (value - low) / ((high - low) or 1):.1f}" for step, value in points
    )
    low_label = f'<text x="0" y="{height + 4}">{label.format(low)}</text>' if low < high else ""
    y = 34 if low < high else height + 4
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}, picture">'
        f'<svg width="680" height="{height + 24}" role="img" aria-label="{title} over the steps; '
        f'the table below has the figures"><text x="90" y="{height + 20}">{title}, step 0 to {last}</text>'
        f'<text x="0" y="{y}">{label.format(high)}</text>{low_label}'
        f'<polyline class="line" points="{points_text}"/>{marks}</svg></div>'
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _faults(record: Record) -> str:
    parts = []
    for fault in record.part.faults:
        inputs = [
            (
                index,
                "x".join(map(str, entry["shape"])) or "one number",
                entry["dtype"],
                f"{entry['smallest']:.6g} .. {entry['largest']:.6g}" if "smallest" in entry else "none is finite",
                entry.get("nan", 0),
                entry.get("inf", 0),
            )
            for index, entry in enumerate(fault["inputs"])
        ]
        before = [
            (entry["step"], _number(entry["loss"]), _number(entry["scale"]), _number(entry["largest_gradient"]))
            for entry in fault["history"]
        ]
        where = " ".join(filter(None, (f"in {fault['module']}" if fault["module"] else "", fault["line"])))
        parts.append(
            f"<h3>{failure(fault).capitalize()}</h3><p>First: <strong>"
            f"{escape(fault['op'])}</strong> "
            f"({escape(fault['operation'])}, {fault['phase']}) {escape(where)}: {fault['nan']} NaN, "
            f"{fault['inf']} infinite. "
            f"{escape(fault['hint'])}</p>"
            + _table("Its inputs", ("input", "shape", "dtype", "range", "NaN", "infinite"), inputs)
            + _table("The steps before", ("step", "loss", "loss scale", "largest gradient"), before)
        )
    return f'<section id="divergence"><h2>Divergence</h2>{"".join(parts)}</section>' if parts else ""


def _policy(advice: Advice) -> str:
    rows = [(str(index), str(rule)) for index, rule in enumerate(advice.policy.rules, 1)]
    return (
        '<section id="policy"><h2>Policy</h2><p>The first rule that matches an op wins. Loss scale: '
        f"{escape(str(advice.policy.loss_scale or 'none'))}.</p>"
        f'{_table("Rules", ("", "rule"), rows)}<details><summary>As a file</summary><pre id="toml">'
        f'{escape(advice.policy.to_toml())}</pre><button type="button" data-copy="toml">Copy</button>'
        f"</details></section>"
    )


def _comparison(record: Record, other: Record) -> str:
    """Return the comparison of two runs: their first difference, and the maximum and root mean square of each tensor.

    Raises InvalidInput for runs of different models, or without a common step.
    """
    first_difference = difference(record, other)
    summary = (
        "Bitwise equal in every step that both recorded."
        if first_difference is None
        else f"First difference: {first_difference}."
    )
    rows = [
        (
            str(key),
            f"{first.maximum:.4g}",
            f"{second.maximum:.4g}",
            f"{first.root_mean_square:.4g}",
            f"{second.root_mean_square:.4g}",
        )
        for key, first in record.tensors.items()
        if (second := other.tensors.get(key)) is not None
    ][: 3 * _MOST_ROWS]
    names = [str(run.header.get("title", "")) for run in (record, other)]
    if names[0] == names[1]:
        names = ["first run", "second run"]
    head = ("tensor", f"largest: {names[0]}", f"largest: {names[1]}", f"rms: {names[0]}", f"rms: {names[1]}")
    table = _table("Side by side", head, rows)
    return f'<section id="comparison"><h2>Two runs</h2><p>{escape(summary)}</p>{table}</section>'


def _method(record: Record) -> str:
    header, sampling = record.header, record.sampling
    rows = [
        ("sampled steps", ", ".join(map(str, record.sampled))),
        ("steps in all", sampling.get("steps", "")),
        ("recorded modules", f"{sampling.get('modules_seen', '')} of {sampling.get('modules', '')}"),
        ("overhead", overhead_words(sampling) if "overhead" in sampling else "unknown: the run was killed"),
        ("steps without a guard against NaN", sampling.get("unguarded", "")),
        ("precision of the run", header.get("precision", "")),
        ("device, torch, lowp", f"{header.get('device')}, {header.get('torch')}, {header.get('lowp')}"),
        ("started", header.get("started", "")),
        ("not observed", "optimizer state, steps that were not sampled"),
    ]
    return f'<section id="method"><h2>Method</h2>{_table("How it was recorded", ("what", "value"), rows)}</section>'
