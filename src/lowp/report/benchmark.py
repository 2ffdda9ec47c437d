"""Terminal tables of a benchmark, made from its document."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from lowp.errors import counted
from lowp.report.tables import amount, bytes_of, seconds, with_machine, with_unit
from lowp.report.terminal import WIDTH, plain_table

Rows = list[Mapping[str, Any]]
_NOTHING = "-"
_COLUMNS = 8


def benchmark_tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """Yield for each recipe the tables of time, memory and its use, hardware estimates and published figures."""
    for subject in document["recipes"]:
        yield _times(subject)
        for name, tables in (("memory", _memory), ("largest_batch", _largest), ("estimates", _estimates)):
            if rows := [row for row in subject["variants"] if name in row]:
                yield from tables(rows)
        if subject["published"] is not None:
            yield _published(subject)


def _times(subject: Mapping[str, Any]) -> Table:
    recipe = subject["recipe"]
    title = (
        f"{recipe['name']}, size {recipe['size']}: {recipe['parameters']:,} parameters, batch {recipe['batch']}, "
        f"{counted(subject['threads'], 'CPU thread')}"
    )
    columns = ["", "time\na step", "quartiles", "steps", "to\nfp32", "wall\na step", "of it\ndata", "an\nepoch"]
    table = plain_table(title, [*columns, f"{recipe['unit']}\na second", "in 16\nbits"])
    for row in subject["variants"]:
        if not row["step"]["steps"]:
            table.add_row(row["label"], "failed", *[_NOTHING] * 8)
            continue
        step, wall = row["step"], row["wall"]
        table.add_row(
            row["label"],
            seconds(step["median"]),
            _NOTHING if step["quartiles"] is None else _range(*map(seconds, step["quartiles"])),
            f"{step['steps']}{'*' * step['only_one']}",
            _NOTHING if step["relative"] is None else f"{step['relative']:.2f}x",
            _NOTHING if wall is None else seconds(wall["seconds_per_step"]),
            _NOTHING if wall is None else f"{wall['data_seconds'] / wall['seconds']:.0%}",
            _NOTHING if wall is None else seconds(wall["epoch_seconds"]),
            _NOTHING if row["throughput"] is None else amount(row["throughput"]),
            _share((row.get("operations") or {}).get("share")),
        )
    return table


def _memory(rows: Rows) -> Iterator[Table]:
    """Yield tables with one line per part and one column per row of the benchmark; several if one is too wide."""
    names = [name for name in rows[0]["memory"]["parts"] if any(row["memory"]["parts"][name] for row in rows)]
    for start in range(0, len(rows), _COLUMNS):
        columns = rows[start : start + _COLUMNS]
        table = plain_table(
            "memory at the peak of a step", ["", *(row["label"].replace(" ", "\n", 1) for row in columns)]
        )
        for name in names:
            sizes = [row["memory"]["parts"][name] for row in columns]
            table.add_row(name, *(_bytes(size) if size else _NOTHING for size in sizes))
        for name in ("allocated", "reserved", "slack"):
            table.add_row(name, *(_bytes(row["memory"][name]) for row in columns), style="bold" * (name == "allocated"))
        table.add_row("kept for backward", *(_bytes(row["memory"]["held"]["activations"]) for row in columns))
        yield table


def _largest(rows: Rows) -> Iterator[Table]:
    base = next((row["largest_batch"]["batch"] for row in rows if row["label"] == "fp32"), 0)
    limit = bytes_of(rows[0]["largest_batch"]["limit"])
    columns = ["", "batch", "to\nfp32", "its peak", "does not fit", "measured", "what"]
    table = plain_table(f"largest batch that fits into {limit}", columns)
    for row in rows:
        largest = row["largest_batch"]
        table.add_row(
            row["label"],
            f"{largest['batch']:,}",
            f"{largest['batch'] / base:.2f}x" if base else _NOTHING,
            _bytes(largest["peak"]),
            _NOTHING if largest["too_large"] is None else f"{largest['too_large']:,}",
            f"{len(largest['measured'])} batches",
            "verified" if largest["verified"] else f"at least this: {largest['ended']}",
        )
    yield table


def _estimates(rows: Rows) -> Iterator[Table]:
    base = rows[0]["estimates"]
    columns = ["", "format", "arithmetic", "to\nfp32", "DRAM", "to\nfp32", "multiply-add\nunit", "to\nfp32"]
    table = plain_table("ESTIMATES for hardware with such arithmetic, a step (Horowitz, ISSCC 2014, 45 nm)", columns)
    for row in rows:
        estimates = row["estimates"]
        approximate = "~" if estimates["how"] != "table" else ""
        table.add_row(
            row["label"],
            estimates["format"],
            f"{approximate}{_joules(estimates['arithmetic_joules'])}",
            _ratio(estimates["arithmetic_joules"], base["arithmetic_joules"]),
            _joules(estimates.get("dram_joules")),
            _ratio(estimates.get("dram_joules"), base.get("dram_joules")),
            f"{'~' if estimates['unit_area_how'] != 'table' else ''}{estimates['unit_area_um2']:,.0f} um2",
            f"{estimates['unit_area_relative_to_fp32']:.2f}x",
        )
    yield table


def _published(subject: Mapping[str, Any]) -> Table:
    columns = ["", "time fp32 → torch.amp", "to\nfp32", "memory fp32 → torch.amp", "to\nfp32"]
    table = plain_table("as published, size full, on GPUs", columns)
    for row in subject["published"]["gpus"]:
        times = " → ".join(f"{int(value // 60)}m{value % 60:02.0f}" for value in row["seconds"])
        memory = " → ".join(f"{value:g}" for value in row["gigabytes"])
        ratios = f"{row['time_ratio']:.2f}x", f"{row['memory_ratio']:.2f}x"
        table.add_row(row["gpu"], times, ratios[0], f"{memory} GB", ratios[1])
    return table


def benchmark_notes(document: Mapping[str, Any], methods: bool = True, width: int = WIDTH) -> str:
    """Return the text below the tables: rows that failed or took few steps, `methods` and sources, the machine."""
    rows = [(subject, row) for subject in document["recipes"] for row in subject["variants"]]
    lines = [
        f"{subject['recipe']['name']}, {row['label']}: failed: {row['failure']}"
        for subject, row in rows
        if row["failure"]
    ]
    ways = {row["label"]: row["products"] for _, row in rows if "products" in row}
    if ways:
        products = "; ".join(f"{label}: {way}" for label, way in ways.items())
        lines.append(f"products of linear layers on this machine: {products}.")
    lines += [f"{subject}: {words}." for subject, words in document.get("products", {}).items()]
    if any(row["step"]["only_one"] for _, row in rows):
        lines.append("*: a step took so long that only one step was timed.")
    if methods:
        lines += [f"{text}." for text in document["methods"].values()]
        lines.append(f"{document['tf32']}.")
    else:
        lines.append("--notes prints how each number was measured; see also docs/benchmark.md and the JSON file.")
    sources = {subject["published"]["source"] for subject in document["recipes"] if subject["published"]}
    lines += [f"published: {source}." for source in sorted(sources)]
    return with_machine(lines, document, width)


# -- numbers ----------------------------------------------------------------------------------------------------------
def _bytes(value: int | None) -> str:
    if value is None:
        return _NOTHING
    return f"-{bytes_of(-value)}" if value < 0 else bytes_of(value)


def _range(low: str, high: str) -> str:
    """Return two numbers with their unit, written once if it is the same."""
    number, _, unit = low.partition(" ")
    return f"{number}-{high}" if high.endswith(f" {unit}") else f"{low}-{high}"


def _share(value: float | None) -> str:
    """Return a share in percent, rounded down so that only 1 is 100 %."""
    if value is None:
        return _NOTHING
    return f"{math.floor(1000 * value) / 10:.4g}%"


def _joules(value: float | None) -> str:
    return _NOTHING if value is None else with_unit(value, ("J", "mJ", "µJ", "nJ"))


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value is not None and base else _NOTHING
