"""Compare casts of lowp and of every installed library with rational arithmetic on the same inputs.

    python bench/exactness.py [--json bench/results/exactness.json] [--keep]

Writes docs/exactness.md, a row a library, and bench/results/exactness.md, a row a cast, between their markers; `--keep`
uses recorded results instead of measuring.
qtorch and microxcaling take part if they can be imported, Berkeley SoftFloat if SOFTFLOAT_LIBRARY names a shared
library of its conversions.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

from exactness_cases import KINDS, SEED, cases, differ, kinds, right  # noqa: E402
from exactness_emulated import example, integers, stochastic  # noqa: E402
from exactness_peers import Peer, formats, ours, peers  # noqa: E402

from lowp.casts import Cast, Rounding, possible_overflows  # noqa: E402
from lowp.formats import FloatFormat  # noqa: E402

Row = dict[str, Any]
END = "<!-- exactness: end -->"


def casts(format: FloatFormat) -> Iterator[Cast]:
    """Yield every rounding with every overflow, stochastic rounding with all and with 8 random bits."""
    for overflow in possible_overflows(format):
        for rounding in Rounding:
            if rounding not in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C):
                yield Cast(format, rounding, overflow)
        for rounding in Rounding:
            if rounding.is_stochastic:
                yield Cast(format, rounding, overflow, None, 8)


def measure(
    format: FloatFormat, dtype: torch.dtype, libraries: Iterable[Peer], own: Iterable[Peer], thinned: int = 1
) -> Iterator[Row]:
    """Yield a row for every cast to a format that a library supports; lowp's rows have every cast."""
    every = cases(format, dtype)[::thinned]
    # the default overflow and nearest-even run on every input, the others on inputs that can overflow
    large = every[~(every.abs() < format.maximum / 2)]
    for cast in casts(format):
        is_full = cast.rounding is Rounding.NEAREST_EVEN or cast.overflow is Cast(format).overflow
        x = every if is_full else large
        # cases without a right answer: NaN to a format without one, and negative numbers to unsigned ones
        fair = (~x.isnan() | format.has_nan) & (format.signed | (x > 0) | x.isnan())
        results = right(x, cast)
        for peer in own:
            function = peer.function(cast, dtype)
            assert function is not None
            yield _row(peer, cast, x, function(x, seed=SEED), results)  # type: ignore[call-arg]
        if cast.is_stochastic:
            continue
        for peer in libraries:
            if (function := peer.function(cast, dtype)) is not None:
                chosen = [result for result, take in zip(results, fair.tolist(), strict=True) if take]
                yield _row(peer, cast, x[fair], function(x[fair]), chosen)


def _row(peer: Peer, cast: Cast, x: torch.Tensor, found: torch.Tensor, results: list[float]) -> Row:
    wrong = differ(found, results)
    row: Row = {"peer": peer.name, "format": str(cast.format)}
    row["rounding"] = str(cast.rounding) + (f"-{cast.random_bits}" if cast.random_bits else "")
    row |= {"overflow": str(cast.overflow), "dtype": str(x.dtype).removeprefix("torch."), "cases": len(x)}
    row["wrong"] = {}
    if wrong.any():
        bad = [result for result, is_wrong in zip(results, wrong.tolist(), strict=True) if is_wrong]
        row["wrong"] = dict(Counter(kinds(x[wrong], cast, bad)))
        row["example"] = example(x[wrong][0], found[wrong][0], bad[0])
    return row


def measure_all() -> dict[str, Any]:
    """Return the whole matrix, with the libraries that took part and those that did not."""
    libraries, absent = peers()
    own = list(ours())
    rows: list[Row] = []
    for format in formats():
        for dtype in (torch.float32, torch.float64):
            if not (dtype == torch.float32 and format.bits == 32):
                rows += measure(format, dtype, libraries, own)
        print(f"{format}: {len(rows)} rows", file=sys.stderr)
    names = [peer.name for peer in libraries]
    return {
        "versions": {peer.name: peer.version for peer in [*own, *libraries]},
        "absent": absent,
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "lowp": _totals([row for row in rows if row["peer"].startswith("lowp ")]),
        "rows": [row for row in rows if not row["peer"].startswith("lowp ")] + list(integers(names)),
        "stochastic": stochastic(names),
    }


def _totals(rows: list[Row]) -> list[Row]:
    totals: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        key = row["format"], row["dtype"], row["peer"]
        total = totals.setdefault(key, {**dict(zip(("format", "dtype", "peer"), key, strict=True)), "casts": 0})
        total["casts"] += 1
        total["cases"] = total.get("cases", 0) + row["cases"]
        total["wrong"] = total.get("wrong", 0) + sum(row["wrong"].values())
    return list(totals.values())


# -- tables -----------------------------------------------------------------------------------------------------------
def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [f"Measured on {results['machine']}.", "", "### lowp", ""]
    lines += _own_table(results["lowp"])
    for name in dict.fromkeys(row["peer"] for row in results["rows"]):
        version = results["versions"].get(name)
        lines += ["", f"### {name}{f' {version}' if version else ''}", ""]
        lines += _peer_table([row for row in results["rows"] if row["peer"] == name])
    lines += ["", "### Stochastic rounding", "", *_stochastic_table(results["stochastic"])]
    if results["absent"]:
        lines += ["", "### Not measured", ""]
        lines += [f"* {name}: {why}" for name, why in results["absent"].items()]
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> str:
    """Return a row for each library as Markdown: its casts, those with a mismatch, and the kinds of wrong results."""
    own = results["lowp"]
    most = max(row["casts"] for row in own)
    cells = ["lowp, all its kernels", f"up to {most} a format", f"{sum(row['cases'] for row in own):,}"]
    lines = [
        "| library | casts | cases | wrong | casts with a mismatch | of these |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    lines.append(f"| {' | '.join(cells)} | {sum(row['wrong'] for row in own)} | 0 | |")
    for name in dict.fromkeys(row["peer"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["peer"] == name]
        found = sum((Counter(row["wrong"]) for row in rows), Counter())
        which = ", ".join(f"{kind} {found[kind]:,}" for kind in KINDS if found[kind])
        cells = [f"{name} {results['versions'].get(name) or ''}".strip(), f"{len(rows)}"]
        cells += [f"{sum(row['cases'] for row in rows):,}", f"{found.total():,}"]
        lines.append(f"| {' | '.join(cells)} | {sum(bool(row['wrong']) for row in rows)} | {which} |")
    return "\n".join([f"Measured on {results['machine']}.", "", *lines])


def _own_table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ["| format | from | casts | cases | " + " | ".join(f"wrong: {name}" for name in names) + " |"]
    lines.append("| --- | --- | --: | --: |" + " --: |" * len(names))
    for format, dtype in dict.fromkeys((row["format"], row["dtype"]) for row in rows):
        group = [row for row in rows if (row["format"], row["dtype"]) == (format, dtype)]
        wrong = " | ".join(str(row["wrong"]) for row in group)
        lines.append(f"| {format} | {dtype} | {group[0]['casts']} | {group[0]['cases']:,} | {wrong} |")
    return lines


def _peer_table(rows: list[Row]) -> list[str]:
    clean = [row for row in rows if not row["wrong"]]
    lines = []
    if clean:
        total = sum(row["cases"] for row in clean)
        lines += [f"No mismatch in {total:,} cases of {len(clean)} casts:", "", *_grouped(clean), ""]
    bad = [row for row in rows if row["wrong"]]
    if not bad:
        return lines[:-1]
    lines.append("| format | rounding | overflow | from | cases | wrong | of these | first: input → found (right) |")
    lines.append("| --- | --- | --- | --- | --: | --: | --- | --- |")
    for row in bad:
        one = row["example"]
        given = _short(one["input"], 17 if row["dtype"] == "float64" else 9)
        shown = f"`{one['bits']}` {given} → {_short(one['found'])} ({_short(one['right'])})"
        order = {kind: place for place, kind in enumerate(KINDS)}
        which = ", ".join(f"{kind} {row['wrong'][kind]}" for kind in sorted(row["wrong"], key=lambda kind: order[kind]))
        lines.append(
            f"| {row['format']} | {row['rounding']} | {row['overflow']} | {row['dtype']} | {row['cases']:,} "
            f"| {sum(row['wrong'].values())} | {which} | {shown} |"
        )
    return lines


def _grouped(rows: list[Row]) -> list[str]:
    """Return a line for each set of roundings, with its formats."""
    modes: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        modes.setdefault(f"{row['format']} ({row['overflow']})", {}).setdefault(row["dtype"], []).append(
            row["rounding"]
        )
    groups: dict[str, list[str]] = {}
    for format, dtypes in modes.items():
        said: dict[str, list[str]] = {}
        for dtype, names in dtypes.items():
            said.setdefault(", ".join(names), []).append(dtype)
        text = "; ".join(f"{names} from {' and '.join(dtypes)}" for names, dtypes in said.items())
        groups.setdefault(text, []).append(format)
    return [f"* {text}: {', '.join(formats)}" for text, formats in groups.items()]


def _short(number: str, digits: int = 9) -> str:
    return f"{float(number):.{digits}g}"


def _stochastic_table(rows: list[Row]) -> list[str]:
    lines = ["| library | number | input | goes up: should | does | in standard errors | to neither neighbour |"]
    lines.append("| --- | --- | --: | --: | --: | --: | --: |")
    for row in rows:
        lines.append(
            f"| {row['peer']} | {row['number']} | {row['input']:.9g} | {row['expected']:.3g} | {row['measured']:.3g} "
            f"| {row['standard_errors']} | {row['neither']} |"
        )
    return lines


MARKERS = {"<!-- exactness: tables -->": tables, "<!-- exactness: summary -->": summary}
PAGES = (ROOT / "docs" / "exactness.md", ROOT / "bench" / "results" / "exactness.md")


def written(document: str, results: dict[str, Any]) -> str:
    """Return a document with what its marker names up to the end marker."""
    ((begin, shown),) = ((marker, shown) for marker, shown in MARKERS.items() if marker in document)
    before, _, rest = document.partition(begin)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the document has no line {END}")
    return f"{before}{begin}\n{shown(results)}\n{END}{after}"


def main() -> None:
    """Measure, save the results, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "exactness.json")
    parser.add_argument("--keep", action="store_true", help="use the recorded results and measure nothing")
    arguments = parser.parse_args()
    if arguments.keep:
        results = json.loads(arguments.json.read_text())
    else:
        results = measure_all()
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    for page in PAGES:
        page.write_text(written(page.read_text(), results))
    wrong = sum(row["wrong"] for row in results["lowp"])
    print(f"lowp: {wrong} wrong in {sum(row['cases'] for row in results['lowp']):,} cases")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
