"""A profile as one HTML file that works offline, by keyboard and with a screen reader.

At the top stands what to do, then what each format would do, then the evidence, with strips of the numbers of each
tensor. All values come from the record and the advice; the script only counts numbers beyond the chosen limits.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from lowp.errors import counted
from lowp.numerics.advice import Advice, FormatVerdict
from lowp.numerics.part import failure
from lowp.numerics.record import Record, difference
from lowp.report import palette
from lowp.report.profile import headline, numbers_of, overhead_words, part_seen, recommendation
from lowp.report.profile_strips import FORMATS_SHOWN, MAPS, raised, scale_words, strips

_COMMAND = "lowp run --policy policy.toml train.py"
_LONG = 60  # letters of a title that is a whole command
_SEVERITIES = {"error": "loses", "warning": "with care"}


def page(record: Record, advice: Advice, other: Record | None = None, command: str = _COMMAND) -> str:
    """Return the HTML report of a profile, with `other` beside a second run; `command` uses the policy.

    Raises InvalidInput for runs of different models, or without a common step.
    """
    folder = files("lowp.report")
    whole, style, script = (
        folder.joinpath(f"profile.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    compared = "" if other is None else _comparison(record, other)
    parts = (_faults(record), _formats(record, advice), _findings(record, advice), compared, _timeline(record))
    return Template(whole).substitute(
        title=escape(f"{record.header.get('title', 'profile')}: lowp profile"),
        style=palette.css() + style,
        what=_text(_what(record) + (", the first of two runs" if other is not None else "")),
        told=_text(recommendation(record, advice)),
        policy=_policy(record, advice, command) if advice.verdicts else "",
        parts="".join(parts),
        **_evidence(record, advice, other),
        method=_method(record),
        data=json.dumps(strips(record, other), separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
    )


# -- parts ------------------------------------------------------------------------------------------------------------
def _text(words: object) -> str:
    """Return words as HTML, with powers of two raised."""
    return escape(raised(str(words)))


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>'
        f"{_text(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>{content}</details>"


def _what(record: Record) -> str:
    """Return the headline, in which a whole command is called by its script."""
    words = headline(record)
    title = str(record.header.get("title", ""))
    if len(title) > _LONG:  # a whole command, which stands below
        parts = title.split(" ")
        words = words.replace(title, Path(next((one for one in parts if one.endswith(".py")), parts[0])).name, 1)
    return words


def _policy(record: Record, advice: Advice, command: str) -> str:
    """Return the policy and the command to copy."""
    policy = (
        '<div class="use"><p><button type="button" data-copy="toml" class="main">Copy the policy</button> '
        "into the file <code>policy.toml</code>, then run</p>"
        f'<p><code id="command">{escape(command)}</code> '
        '<button type="button" data-copy="command">Copy the command</button></p>'
        "<details><summary>Show the policy</summary>"
        f'<pre id="toml" tabindex="0" role="region" aria-label="policy.toml">{escape(advice.policy.to_toml())}</pre>'
        "</details></div>"
    )
    return _folded("The policy for the steps before", policy) if record.part.faults else policy


def _formats(record: Record, advice: Advice) -> str:
    """Return a card a format, and its numbers as a table."""
    if not advice.verdicts:
        return ""
    cards = "".join(
        f'<li class="{verdict.grade.replace(" ", "-")}"><h3>{verdict.format}</h3><p class="grade">'
        f'<span aria-hidden="true">{palette.GRADES[verdict.grade].mark}</span> {verdict.grade}</p>'
        f"<p>{_text(_card_words(verdict))}</p></li>"
        for verdict in advice.verdicts
    )
    rows = [(one.format, one.grade, one.verdict, *numbers_of(one, unknown="")) for one in advice.verdicts]
    finite = " in the steps before" if record.part.faults else ""
    finite += f", judged by {part} alone" if (part := part_seen(record)) else ""
    head = ("format", "use", "how", "zero gradients", "tensors that overflow", "updates lost", "signal to noise")
    return (
        f'<section id="formats"><h2>What each format would do{finite}</h2><ul class="formats">{cards}</ul>'
        + _folded("In numbers", _table("Each format on the recorded numbers", head, rows))
        + "</section>"
    )


def _card_words(verdict: FormatVerdict) -> str:
    how = verdict.verdict.removeprefix("not judged: ").replace("STALLS", "stalls")
    words = [how.replace("WILL STALL", "the weights would stop moving")]
    if verdict.overflow:
        words.append(f"{counted(verdict.overflow, 'tensor')} overflow{'s' * (verdict.overflow == 1)}")
    if verdict.flushed >= 1e-5:
        words.append(f"{100 * verdict.flushed:.2g} % of the gradients become zero")
    if verdict.stalled:
        words.append(f"{100 * verdict.stalled:.2g} % of the updates are lost")
    return "; ".join(words)


def _findings(record: Record, advice: Advice) -> str:
    shown = [finding for finding in advice.findings if finding.id != "N401"]  # a fault has a section of its own
    if not shown:
        if record.part.faults:
            return ""
        return '<section id="findings"><h2>What to change</h2><p>Nothing needs a change.</p></section>'
    items = "".join(
        f'<li class="{_SEVERITIES[finding.severity].replace(" ", "-")}"><h3>'
        f'<span aria-hidden="true">{palette.GRADES[_SEVERITIES[finding.severity]].mark}</span> {_text(finding.summary)}'
        f"</h3><p>{_text(finding.evidence)}</p>"
        f"<p><strong>Change:</strong> {_text(finding.change)}. <strong>Then:</strong> {_text(finding.effect)}.</p>"
        f"<details><summary>Why, and finding {finding.id}</summary><p>{_text(finding.kind.cause)}</p>"
        f"<p>{_text(finding.kind.change)}</p></details></li>"
        for finding in shown
    )
    more = f"<p>{counted(advice.more, 'more finding')}: lowp profile --json</p>" if advice.more else ""
    return f'<section id="findings"><h2>What to change</h2><ul class="findings">{items}</ul>{more}</section>'


# -- steps ------------------------------------------------------------------------------------------------------------
def _timeline(record: Record) -> str:
    """Return the figures of the loss, and of the loss scale with the skipped steps."""
    steps = [step for step in record.steps if step.scale is not None or step.loss is not None]
    if not steps:
        return ""
    losses = [(step.step, step.loss) for step in steps if step.loss is not None and math.isfinite(step.loss)]
    scales = [(step.step, math.log2(step.scale)) for step in steps if step.scale]
    skipped = [step.step for step in steps if step.skipped]
    rows = [
        (one.step, *map(_number, (one.loss, one.scale, one.largest_gradient)), "skipped: overflow" * one.skipped)
        for one in steps
    ]
    head = ("step", "loss", "loss scale", "largest gradient", "note")
    return (
        f'<section id="timeline"><h2>Steps</h2><div class="curves">{_curve("Loss", losses, "{:.4g}".format)}'
        f"{_curve('Loss scale', scales, lambda power: scale_words(2.0**power), skipped)}</div>"
        + _folded("Each step in numbers", _table("Recorded steps", head, rows))
        + "</section>"
    )


def _curve(
    title: str, points: Sequence[tuple[int, float]], words_of: Callable[[float], str], marked: Sequence[int] = ()
) -> str:
    """Return a line through the steps, with its ends in words; '' without points. `marked` steps were skipped."""
    if not points:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    last = max(step for step, _ in points) or 1

    def across(step: int) -> str:
        return f"{100 * step / last:.2f}"

    def vertical(kind: str, x: str) -> str:
        return f'<line class="{kind}" x1="{x}" x2="{x}" y1="0" y2="31"/>'

    line = " ".join(f"{across(step)},{30 - 28 * (value - low) / ((high - low) or 1):.2f}" for step, value in points)
    lines = "".join(vertical("skipped", across(step)) for step in marked) + vertical("now", "-1")
    (first, begin), (end, final) = points[0], points[-1]
    words = f"{title}: {words_of(begin)} at step {first}, {words_of(final)} at step {end}"
    if {low, high} != {begin, final}:
        words += f"; from {words_of(low)} to {words_of(high)}"
    words += f"; {len(marked)} skipped" if marked else ""
    return (
        f'<figure><svg viewBox="0 0 100 31" preserveAspectRatio="none" role="img" aria-label="{_text(words)}" '
        f'data-last="{last}">{lines}<polyline points="{line}"/></svg><figcaption>{_text(words)}</figcaption></figure>'
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _faults(record: Record) -> str:
    parts = []
    for fault in record.part.faults:
        inputs = []
        for index, entry in enumerate(fault["inputs"]):
            shape = "x".join(map(str, entry["shape"])) or "one number"
            span = f"{entry['smallest']:.6g} .. {entry['largest']:.6g}" if "smallest" in entry else "none is finite"
            inputs.append((index, shape, entry["dtype"], span, entry.get("nan", 0), entry.get("inf", 0)))
        before = [
            (entry["step"], _number(entry["loss"]), _number(entry["scale"]), _number(entry["largest_gradient"]))
            for entry in fault["history"]
        ]
        where = " ".join(filter(None, (f"in {fault['module']}" if fault["module"] else "", fault["line"])))
        parts.append(
            f"<h3>{escape(failure(fault).capitalize())}</h3><p>First: <strong>{escape(fault['op'])}</strong> "
            f"({escape(fault['operation'])}, {escape(fault['phase'])}) {escape(where)}: {fault['nan']} NaN, "
            f"{fault['inf']} infinite. {_text(fault['hint'])}</p>"
            + _table("Its inputs", ("input", "shape", "dtype", "range", "NaN", "infinite"), inputs)
            + (_table("The steps before", ("step", "loss", "loss scale", "largest gradient"), before) if before else "")
        )
    return f'<section id="divergence"><h2>Where it began</h2>{"".join(parts)}</section>' if parts else ""


# -- evidence ---------------------------------------------------------------------------------------------------------
def _evidence(record: Record, advice: Advice, other: Record | None) -> dict[str, object]:
    """Return what fills the fields that choose format and loss scale, and an empty section a kind of tensor."""
    options = "".join(f"<option>{name}</option>" for name in FORMATS_SHOWN)
    window = advice.window
    span = "none fits all layers" if window.is_empty else f"2^{window.lowest} to 2^{window.highest}"
    span = "unknown, no gradient was recorded" if window.is_unknown else span
    span += f", of {part} alone" if (part := part_seen(record)) else ""
    scale = 0 if window.is_empty or window.is_unknown else max(window.recommended, -10)
    second = "" if other is None else ' <span class="second">The lower strip is the second run.</span>'
    sections = "".join(
        f'<section class="map" data-map="{name}" aria-labelledby="{name}"><h3 id="{name}">{title}</h3>'
        '<div class="ruler"></div><div class="rows"></div></section>'
        for name, (title, _) in MAPS.items()
    )
    return {"second": second, "formats": options, "scale": scale, "window": _text(span), "maps": sections}


def _comparison(record: Record, other: Record) -> str:
    """Return the comparison of two runs: their first difference, and the tensors that changed most."""
    first_difference = difference(record, other)
    words = "bitwise equal in every step that both recorded" if first_difference is None else str(first_difference)
    summary = f"{words[0].upper()}{words[1:]}."
    rows = [row for name, (title, role) in MAPS.items() if (row := _change(record, other, role, title))]
    head = ("kind of tensor", "median change of the root mean square", "largest change", "of")
    table = _table("The second run beside the first, by kind of tensor", head, rows) if rows else ""
    return f'<section id="comparison"><h2>Two runs</h2><p>{_text(summary)}</p>{table}</section>'


def _change(record: Record, other: Record, role: str, title: str) -> tuple[str, ...]:
    """Return how the tensors of a role changed between two runs; () without one."""
    changes = [
        (math.log2(two.root_mean_square / one.root_mean_square), str(key).removesuffix(f" {role}"))
        for key, one in record.tensors.items()
        if key.role == role and (two := other.tensors.get(key)) and one.root_mean_square and two.root_mean_square
    ]
    if not changes:
        return ()
    middle = statistics.median(change for change, _ in changes)
    largest, name = max(changes, key=lambda change: abs(change[0]))
    title = "Updates" if role == "update" else title
    return title, f"{2**middle:.3g} times", f"{2**largest:.3g} times", name if largest else "none"


def _method(record: Record) -> str:
    header, sampling = record.header, record.sampling
    rows = [
        ("what ran", header.get("title", "")),
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
    return f'<section id="method"><h2>How it was recorded</h2>{_table("The run", ("what", "value"), rows)}</section>'
