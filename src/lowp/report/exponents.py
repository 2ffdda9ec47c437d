"""The table of the shared exponents of a comparison: saturated writes, and free bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from lowp.report.terminal import plain_table

_COLUMNS = (
    "precision",
    "tensors",
    "saturated\nwrites",
    "writes",
    "raises\nin time",
    "changes of\nexponents",
    "free\nbits",
)


def exponent_table(document: Mapping[str, Any]) -> Table | None:
    """Return a table with one line per precision with shared exponents, summed over its runs; None without one.

    Free bits: the mean of log2(32768 / Γ) over the writes. Raises in time: the writes that did not saturate, out of
    those that would have saturated under the exponent of the previous write.
    """
    rows = [(row["label"], _sums(row)) for row in document["variants"]]
    if not any(sums for _, sums in rows):
        return None
    table = plain_table("shared exponents", _COLUMNS)
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
