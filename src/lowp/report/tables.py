"""Terminal tables of comparisons, shared exponents and sweeps, from their documents, and numbers as text."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeGuard

from rich.style import Style
from rich.table import Table
from rich.text import Text

from lowp.report.palette import GRADES
from lowp.report.terminal import WIDTH, plain_table

_NOTHING = "-"
_GRADES = {"converges as fp32": "safe", "loses": "with care", "fails": "loses", "undecided": "not judged"}
_STYLES = {verdict: GRADES[grade].terminal for verdict, grade in _GRADES.items()}


# -- a comparison -----------------------------------------------------------------------------------------------------
def comparison_tables(document: Mapping[str, Any]) -> list[Table]:
    """Return tables with one line per precision: convergence, cost and losses of the format, and shared exponents."""
    document = named(document)
    exponents = exponent_table(document)
    return [_convergence(document), _costs(document), *([] if exponents is None else [exponents])]


def named(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the document with policy files called by their name without folder, where that tells them apart."""
    rows = document["variants"]
    files = [row.get("precision", "") for row in rows]
    short = [
        row["label"].replace(file, Path(file).stem) if file.endswith(".toml") else row["label"]
        for row, file in zip(rows, files, strict=True)
    ]
    count = Counter(short)
    names = [name if count[name] == 1 else row["label"] for name, row in zip(short, rows, strict=True)]
    return {**document, "variants": [{**row, "label": name} for name, row in zip(names, rows, strict=True)]}


def _convergence(document: Mapping[str, Any]) -> Table:
    recipe, metric = document["recipe"], document["recipe"]["metric"]
    seeds = len(document["seeds"])
    title = f"{recipe['name']}: mean ± standard deviation over {seeds} seed{'s' * (seeds > 1)}"
    with_steps = _has_steps(document)
    columns = ["precision", metric, "loss", "gap to\nfp32", *["to the\nrow above"] * with_steps]
    table = plain_table(title, [*columns, "in seed\ndeviations", "verdict"])
    above = None
    for row in document["variants"]:
        numbers, verdict = row.get("statistics"), row.get("verdict") or {}
        if numbers is None:
            table.add_row(row["label"], *[_NOTHING] * (len(columns)), "not run")
            continue
        words = Text(verdict.get("verdict", "no fp32 to judge by"), _STYLES.get(verdict.get("verdict", ""), ""))
        baseline = row["label"] == document["baseline"]
        table.add_row(
            row["label"],
            _spread(numbers[metric], recipe["metric_is_share"]),
            _spread(numbers["loss"], False),
            _NOTHING if baseline else _gap(verdict.get("gap"), recipe["metric_is_share"]),
            *[_step(row, above, recipe)] * with_steps,
            _NOTHING if baseline else _signed(verdict.get("gap_in_deviations"), "{:+.1f}"),
            words,
        )
        above = row
    return table


def _has_steps(document: Mapping[str, Any]) -> bool:
    """Whether rows are compared with those above: several are policy files, as of single ingredients."""
    files = [row for row in document["variants"] if row.get("precision", "").endswith(".toml")]
    return len(files) > 1


def _step(row: Mapping[str, Any], above: Mapping[str, Any] | None, recipe: Mapping[str, Any]) -> str:
    """Return by how much a row is worse than the one above: mean and deviation of the differences of equal seeds."""
    if above is None:
        return _NOTHING
    found, before = (
        dict(zip((run["seed"] for run in one["runs"]), one["statistics"][recipe["metric"]]["values"], strict=True))
        for one in (row, above)
    )
    pairs = [(found[seed], before[seed]) for seed in found if seed in before]
    if not pairs or not all(_is_number(one) for pair in pairs for one in pair):
        return _NOTHING
    gaps = [two - one if recipe["higher_is_better"] else one - two for one, two in pairs]
    share = recipe["metric_is_share"]
    spread = f" ± {_gap(stdev(gaps), share)[1:]}" if len(gaps) > 1 else ""
    return _gap(mean(gaps), share) + spread


def _costs(document: Mapping[str, Any]) -> Table:
    rows = document["variants"]
    measured = _is_measured(document)
    names = ["precision", *["time a step", "peak\nmemory"] * measured, "skipped\nsteps", "loss\nscale"]
    names += ["flushed\ngradients", "lost\nupdates", "updates\n< 2^-24"]
    table = plain_table("cost, and lost numbers" if measured else "lost numbers", names)
    base = rows[0].get("step_seconds")
    for row in rows:
        statistics = row.get("statistics")
        if statistics is None:
            continue
        time, memory = row.get("step_seconds"), row.get("peak_memory_bytes")
        ratio = row.get("step_relative") or (time / base if time and base else None)
        relative = f" ({ratio:.2f}x)" if ratio else ""
        cost = [_NOTHING if not time else f"{seconds(time)}{relative}", _NOTHING if not memory else bytes_of(memory)]
        table.add_row(
            row["label"],
            *cost * measured,
            _counts(statistics["skipped_steps"]["values"]),
            "none" if row["loss_scaling"] == "none" else _counts(statistics["loss_scale"]["values"]),
            *(_share(statistics[name]["values"]) for name in ("flushed_gradients", "lost_updates", "small_updates")),
        )
    return table


def _is_measured(document: Mapping[str, Any]) -> bool:
    """Return whether any row has a time or a memory peak: with --timing 0 there is neither."""
    return any(row.get("step_seconds") or row.get("peak_memory_bytes") for row in document["variants"])


def notes(document: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the text below the tables: the reasons of the verdicts, the methods, the machine."""
    document = named(document)
    lines = [
        f"{row['label']}: {row['verdict']['verdict']}: {row['verdict']['reason']}."
        for row in document["variants"]
        if row.get("verdict") and row["verdict"]["verdict"] not in ("baseline", "converges as fp32")
    ]
    left_out = () if _is_measured(document) else ("time", "memory")
    methods = [f"{text}." for name, text in document["methods"].items() if name not in left_out]
    steps = ["to the row above: the same, of runs with the same seed."] * _has_steps(document)
    lines += ["gap to fp32: + is worse, - better.", *steps, *methods]
    return with_machine(lines, document, width)


def with_machine(lines: Iterable[str], document: Mapping[str, Any], width: int) -> str:
    """Return wrapped lines, and one of the machine and the versions with which the numbers were measured."""
    versions = document["versions"]
    machine = f"{document['machine']['words']}; torch {versions['torch']}, lowp {versions['lowp']}."
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ") for line in [*lines, machine])


# -- a sweep ----------------------------------------------------------------------------------------------------------
def heat_map(document: Mapping[str, Any]) -> Table:
    """Return the grid of a sweep: a line per exponent width, a column per mantissa width, coloured by the metric."""
    grid, recipe = document["grid"], document["recipe"]
    fp32 = (document["variants"][0].get("statistics") or {}).get(recipe["metric"], {}).get("mean")
    kind = "eXmY" if grid["subnormals"] else "eXmY without subnormals"
    title = f"{recipe['name']}: {recipe['metric']} of {kind} (fp32: {number(fp32, recipe['metric_is_share'])})"
    table = plain_table(title, ["", *(f"m{bits}" for bits in grid["mantissa_bits"])])
    known = [value for line in grid["values"] for value in line if _is_number(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    for bits, line in zip(grid["exponent_bits"], grid["values"], strict=True):
        cells = [_cell(value, low, high, recipe) for value in line]
        table.add_row(f"e{bits}", *cells)
    return table


def _cell(value: float | None, low: float, high: float, recipe: Mapping[str, Any]) -> Text:
    if not _is_number(value):
        return Text(_NOTHING)
    share = (value - low) / (high - low) if high > low else 1.0
    if not recipe["higher_is_better"]:
        share = 1 - share
    red, green, blue = (round(dark + (light - dark) * share) for dark, light in ((68, 253), (1, 231), (84, 37)))
    style = Style(color="black" if share > 0.5 else "white", bgcolor=f"#{red:02x}{green:02x}{blue:02x}")
    return Text(f" {number(value, recipe['metric_is_share'])} ", style)


def sweep_words(document: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return sentences on the change of the metric with exponent bits and with mantissa bits."""
    grid, recipe = document["grid"], document["recipe"]
    if "effect_of_exponent" not in grid:
        return "The grid is not complete: --resume continues it."
    share = recipe["metric_is_share"]
    by_exponent, by_mantissa = (grid[f"effect_of_{name}"]["spread"] for name in ("exponent", "mantissa"))
    if by_exponent == by_mantissa:
        conclusion = "neither matters more here"
    else:
        more, less = ("exponent", "mantissa") if by_exponent > by_mantissa else ("mantissa", "exponent")
        conclusion = f"{more} bits matter more than {less} bits here"
    exponents, mantissas, seeds = grid["exponent_bits"], grid["mantissa_bits"], len(document["seeds"])
    return textwrap.fill(
        f"Between {exponents[0]} and {exponents[-1]} exponent bits the mean {recipe['metric']} moves by "
        f"{points(by_exponent, share)}, between {mantissas[0]} and {mantissas[-1]} mantissa bits by "
        f"{points(by_mantissa, share)}: {conclusion}. Each number is the {recipe['metric']} after the last epoch "
        f"({seeds} seed{'s' * (seeds > 1)}), loss scale {document['variants'][-1]['loss_scaling']}."
        + " A mantissa bit also halves the smallest subnormal number: ,subnormals=no excludes this effect."
        * grid["subnormals"],
        width,
    )


# -- numbers ----------------------------------------------------------------------------------------------------------
def number(value: float | None, share: bool, missing: str = _NOTHING) -> str:
    """Return a value of a metric: a share in percent, others with four digits; `missing` for none, or no number."""
    if not _is_number(value):
        return missing
    return f"{value:.1%}" if share else f"{value:.4g}"


def points(difference: float, share: bool) -> str:
    """Return a difference of a metric, of shares in percentage points."""
    return f"{100 * difference:.1f} points" if share else f"{difference:.4g}"


def amount(value: float) -> str:
    """Return a number with three digits, from 100 on as a whole one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Return a time with three digits and its unit."""
    return with_unit(value, ("s", "ms", "µs"))


def with_unit(value: float, units: Sequence[str]) -> str:
    """Return a number with three digits in the first of the units, each a thousandth of the one before, that fits."""
    place = next((place for place in range(len(units)) if value * 1e3**place >= 1), len(units) - 1)
    return f"{value * 1e3**place:.3g} {units[place]}"


def bytes_of(value: int) -> str:
    """Return a size with three digits and its binary unit."""
    size, units = float(value), ["B", "KiB", "MiB", "GiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def _spread(statistics: Mapping[str, Any], share: bool) -> str:
    mean, deviation = statistics["mean"], statistics["deviation"]
    if not _is_number(mean):
        return "not a number"
    shown = f"{mean:.2%}" if share else f"{mean:.4f}"
    if not _is_number(deviation):
        return shown
    return f"{shown} ± {100 * deviation:.2f}" if share else f"{shown} ± {deviation:.4f}"


def _gap(value: float | None, share: bool) -> str:
    return _signed(
        None if not _is_number(value) else 100 * value if share else value, "{:+.2f}" if share else "{:+.4f}"
    )


def _signed(value: float | None, pattern: str) -> str:
    return pattern.format(value + 0.0) if _is_number(value) else _NOTHING


def _counts(values: Sequence[float]) -> str:
    """Return skipped steps: one number if all seeds agree, otherwise the range."""
    if not values:
        return _NOTHING
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _share(values: Iterable[float | None]) -> str:
    present = [value for value in values if _is_number(value)]
    if not present:
        return _NOTHING
    mean = sum(present) / len(present)
    return "0" if mean == 0 else f"{mean:.2%}" if mean >= 5e-5 else "< 0.01%"


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


# -- shared exponents --------------------------------------------------------------------------------------------------
def exponent_table(document: Mapping[str, Any]) -> Table | None:
    """Return a table with one line per precision with shared exponents, summed over its runs; None without one.

    Free bits: the mean of log2(32768 / Γ) over the writes. Raises in time: the writes that did not saturate, out of
    those that would have saturated under the exponent of the previous write.
    """
    rows = [(row["label"], _sums(row)) for row in document["variants"]]
    if not any(sums for _, sums in rows):
        return None
    columns = ("tensors", "saturated\nwrites", "writes", "raises\nin time", "changes of\nexponents", "free\nbits")
    table = plain_table("shared exponents", ["precision", *columns])
    for label, sums in rows:
        if sums:
            needed, in_time = sums["raises_needed"], sums["raises_in_time"]
            free = sums["headroom_sum"] / sums["measured"] if sums["measured"] else 0.0
            table.add_row(
                label,
                f"{sums['tensors']:.0f}",
                f"{sums['saturated']:,.0f}",
                f"{sums['writes']:,.0f}",
                f"{in_time:,.0f} of {needed:,.0f}",
                f"{sums['moved']:,.0f}",
                f"{free:.2f}",
            )
    return table


def _sums(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the sums of the numbers over all runs of a row; the number of tensors is that of one run."""
    summaries = [run["shared_exponents"]["all"] for run in row["runs"] if run.get("shared_exponents")]
    if not summaries:
        return {}
    sums = {name: sum(summary[name] for summary in summaries) for name in summaries[0] if name != "headroom_bits"}
    return {**sums, "tensors": max(summary["tensors"] for summary in summaries)}
