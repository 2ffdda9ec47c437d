"""Write the tables and the figures of the claims from bench/results.

    python bench/tables.py

The rows of every table listed here are replaced by the recorded results; other text is not changed. A picture names the
file that it shows by a hash of it. `tests/test_docs.py` fails if a page or a picture and the results differ.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Rows = list[list[str]]


class Table(NamedTuple):
    """A table of a page: `first`, the start of its header, and a function that returns its rows as lists of cells."""

    page: str
    first: str
    rows: Callable[[], Rows]


def result(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def told(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def span(values: list[float], digits: int) -> str:
    """Return the smallest and the largest number, or one number if they are equal when printed."""
    low, high = told(min(values), digits), told(max(values), digits)
    return low if low == high else f"{low} to {high}"


# -- the rows of each table -------------------------------------------------------------------------------------------
def steps(name: str) -> Rows:
    """Return the training step of each network in each format beside fp32 and torch.autocast."""
    return [
        [
            *(network, format, *(told(row[key], 1) for key in ("fp32_ms", "lowp_ms", "torch_autocast_ms"))),
            *(told(row[key], 2) for key in ("lowp_over_fp32", "torch_over_fp32")),
            row["products"],
        ]
        for network, formats in result(name)["results"].items()
        for format, row in formats.items()
    ]


def ratios(name: str) -> Rows:
    """Return the step of each format as a multiple of fp32's, a column a network; torch.autocast's in brackets."""
    networks = [*result(name)["results"].values()]
    rows = []
    for format in networks[0]:
        pairs = [(told(one[format]["lowp_over_fp32"], 2), one[format]["torch_over_fp32"]) for one in networks]
        cells = [ours if theirs is None else f"{ours} ({told(theirs, 2)})" for ours, theirs in pairs]
        rows.append([format, *cells])
    return rows


def threads() -> Rows:
    """Return the same steps with one and with two threads."""
    rows = []
    for kind, suffix in (("AVX-512", ""), ("AVX2", "-avx2")):
        two, one = result(f"step{suffix}")["results"], result(f"step-1{suffix}")["results"]
        for network, formats in one.items():
            for format, alone in formats.items():
                both = two[network][format]
                times = [(alone[key], both[key]) for key in ("fp32_ms", "lowp_ms")]
                cells = [told(value, 1) for pair in times for value in pair]
                gains = [told(first / second, 2) for first, second in times]
                rows.append([kind, network, format, *cells, *gains, told(alone["lowp_over_fp32"], 2)])
    return rows


def integer_steps(*names: str) -> Rows:
    """Return a step of a wide MLP in integers, with a column per instruction set."""
    kinds = [result(name)["rows"] for name in names]

    def cells(row: dict[str, Any]) -> list[str]:
        return [told(1e3 * row["seconds"], 0), told(row["of_fp32"], 2)]

    return [[name, *(cell for kind in kinds for cell in cells(kind[name]))] for name in kinds[0]]


PRODUCTS = ("chained, 14 bits", "chained, 16 bits", "exact, 16 bits", "exact, full range")


def products(name: str) -> Rows:
    """Return int16 matrix products as multiples of the fp32 product."""
    rows = []
    for title, ways in result(name)["rows"].items():
        if "convolution" not in title:
            size, _, count = title.partition(", threads: ")
            rows.append([f"{size.split(' ')[0]}, {count}", *(told(ways[way]["relative"], 2) for way in PRODUCTS)])
    return rows


def memory() -> Rows:
    """Return memory saved for backward, peak and process of a step in MiB."""
    return [
        [network, way, *(told(row[key] / 2**20, 1) for key in ("saved", "peak", "process"))]
        for network, ways in result("memory")["results"].items()
        for way, row in ways.items()
    ]


def calls(name: str) -> Rows:
    """Return the fixed cost of an operation in each region in microseconds."""
    ops = ("linear", "linear and its backward", "relu")
    measured = result(name)["microseconds"]
    return [[region, *(told(row[op], 1) for op in ops)] for region, row in measured.items() if "linear" in row]


CASTS = {
    "fp16, to nearest even": "lowp fp16",
    "bf16, to nearest even": "lowp bf16",
    "e4m3fn, to nearest even": "lowp e4m3fn",
    "fp16, stochastic": "lowp fp16:stochastic",
    "statistics: exponent histogram, maximum, energy, counts": "lowp statistics",
}


def casts() -> Rows:
    """Return the bandwidth of kernels as a share of a copy's."""
    rows = result("kernels")["rows"]
    return [[words, f"{rows[name]['percent_of_copy']:.0f} %"] for words, name in CASTS.items()]


def served() -> Iterator[tuple[bool, list[str]]]:
    """Yield whether a result has one input row, and its cells: layers of quantized models as multiples of fp32."""
    formats = ("int8", "int4", "mxfp4", "nvfp4", "ternary", "binary")
    for name, instructions in (("inference", "AVX-512 VNNI"), ("inference-avx2", "AVX2")):
        recorded = result(name)
        for row in recorded["rows"]:
            times = {way: told(row["seconds"]["fp32"] / seconds, 1) for way, seconds in row["seconds"].items()}
            if row["batch"] == 1:
                yield True, [instructions, *(times[f"lowp {format}"] for format in formats)]
                continue
            held = recorded["kernels"] == "avx2"  # the others are not calibrated
            peers = [""] * 3 if held else [times[f"{peer} int8"] for peer in ("torch", "onnxruntime", "torchao")]
            own = [times["lowp int8, calibrated"], times["lowp int8, dynamic"]]
            yield False, [instructions, str(row["batch"]), *own, *peers]


def compressed() -> Rows:
    """Return loss and bytes of recipes whose gradients travel between ranks in few bits."""
    return [
        [f"{recipe}, {ranks}", way, told(row["loss"], 4), told(row["sent"] / 1e3, 0), told(row["share"], 2)]
        for recipe, worlds in result("exchange")["results"].items()
        for ranks, ways in worlds.items()
        for way, row in ways.items()
    ]


def optimizers() -> Rows:
    """Return bytes a parameter, the time of a step, and losses of short runs, with the spread of fp32 AdamW's seeds."""
    measured, losses = result("optimizers"), result("optimizers-loss")["losses"]
    rows = []
    for way in {**measured["bytes"], **measured["seconds"]}:
        held, seconds = measured["bytes"].get(way, {}), measured["seconds"].get(way)
        cells = [told(held.get(key), 2) for key in ("reported", "process")]
        runs = [losses[recipe].get(way) for recipe in sorted(losses)]
        means = ["-" if one is None else told(sum(one) / len(one), 3) for one in runs]
        if way == "torch.optim.AdamW":
            means = [f"{mean} ({span(one, 3)})" for mean, one in zip(means, runs, strict=True)]
        rows.append([f"`{way}`", *cells, told(None if seconds is None else 1e3 * seconds, 1), *means])
    return rows


def gpu_steps() -> Rows:
    """Return the milliseconds of a step in each precision, of recipes whose steps took turns on a GPU."""
    found = result("gpu")["parts"]["turns"]["recipes"]
    recipes = [found[name]["rows"] for name in ("rossmann", "unet", "bert")]
    return [[name, *(told(1e3 * one[name]["whole"], 1) for one in recipes)] for name in recipes[0]]


def gpu_kernels() -> Rows:
    """Return the bandwidth of each kernel on a GPU, in TB/s and beside torch's copy."""
    kernels = result("gpu")["parts"]["bandwidth"]["kernels"]
    return [[name, told(one["bytes_per_second"] / 1e12, 2), told(one["of_copy"], 2)] for name, one in kernels.items()]


def gpu_products() -> Rows:
    """Return the time of each product on a GPU, in microseconds and beside torch's in fp16."""
    products = result("gpu")["parts"]["products"]["products"]
    return [[name, told(1e6 * one["seconds"], 0), told(one["of_fp16"], 2)] for name, one in products.items()]


TABLES = (
    Table("docs/gpu.md", "a step of", gpu_steps),
    Table("bench/results/README.md", "kernel, H200", gpu_kernels),
    Table("bench/results/README.md", "product, H200", gpu_products),
    Table("bench/results/README.md", "optimizer | bytes a parameter", optimizers),
    Table("docs/ranks.md", "recipe, ranks | gradients", compressed),
    Table("bench/results/README.md", "network, AVX2 | format", lambda: steps("step-avx2")),
    Table("bench/results/README.md", "network, AVX-512 | format", lambda: steps("step")),
    Table("bench/results/README.md", "network, AMX | format", lambda: steps("step-1-amx")),
    Table("bench/results/README.md", "network, Zen 4 | format", lambda: steps("step-zen4")),
    Table("docs/performance.md", "format, AVX-512 | mlp", lambda: ratios("step")),
    Table("docs/performance.md", "format, AVX2 | mlp", lambda: ratios("step-avx2")),
    Table("docs/performance.md", "precision | ms a step", lambda: integer_steps("flex", "flex-avx2")),
    Table(
        "bench/results/README.md", "precision, Zen 4 | ms a step", lambda: integer_steps("flex-zen4", "flex-avx2-zen4")
    ),
    Table("bench/results/README.md", "n, threads (AVX2)", lambda: products("gemm-avx2")),
    Table("bench/results/README.md", "n, threads (AVX-512)", lambda: products("gemm")),
    Table("bench/results/README.md", "processor | network", threads),
    Table("docs/memory.md", "network, MiB | way", memory),
    Table("bench/results/README.md", "region | linear, no gradient", lambda: calls("call")),
    Table("bench/results/README.md", "region, Zen 4 | linear, no gradient", lambda: calls("call-zen4")),
    Table("bench/results/README.md", "what | share", casts),
    Table("docs/serving-results.md", "instructions | n", lambda: [row for alone, row in served() if not alone]),
    Table("docs/serving-results.md", "instructions | int8", lambda: [row for alone, row in served() if alone]),
)


# -- the figures of the claims ------------------------------------------------------------------------------------
def _share(names: str) -> str:
    """Return the bandwidths, as shares of a copy's, of the casts whose names match."""
    rows = result("kernels")["rows"]
    shares = [row["percent_of_copy"] for name, row in rows.items() if re.fullmatch(names, name)]
    return span(shares, 0 if max(shares) >= 1 else 1)


def _nanoseconds(name: str) -> float:
    return float(result("kernels")["rows"][name]["nanoseconds_an_element_a_thread"])


def _of_steps(name: str, formats: str, key: str) -> list[float]:
    networks = result(name)["results"].values()
    return [row[key] for network in networks for format, row in network.items() if format in formats.split()]


def _of_products(name: str, kind: str) -> str:
    titles = result(name)["rows"].items()
    ways = [row for title, row in titles if "convolution" not in title]
    return span([row[way]["relative"] for row in ways for way in row if way.startswith(kind)], 1)


def _of_integers(name: str, format: str) -> str:
    return told(result(name)["rows"][format]["of_fp32"], 2)


def _without_arithmetic() -> str:
    faster = [
        row["torch_autocast_ms"] / row["lowp_ms"]
        for network in result("step-avx2")["results"].values()
        for format, row in network.items()
        if format in ("bf16", "fp16")
    ]
    ours = span(_of_steps("step-avx2", "bf16 fp16", "lowp_over_fp32"), 2)
    return f"{ours} times the fp32 step, {span(faster, 0)} times faster than torch.autocast"


def _benched(recipe: str, row: str) -> float:
    (found,) = [one for one in result(f"bench-{recipe}")["recipes"][0]["variants"] if one["label"] == row]
    return float(found["step"]["relative"])


CLAIMS: dict[str, Callable[[], str]] = {  # by the beginning of a claim: that of its figure
    "rounding to nearest even, any format": lambda: (
        f"{_share('lowp (?!statistics)[^: ]*(:saturate)?')} % of the bandwidth of `torch.copy_`; torch's own "
        f"conversions {_share('torch .to.*')} %, ml_dtypes {_share('ml_dtypes .*')} %, gfloat {_share('gfloat .*')} %"
    ),
    "stochastic rounding": lambda: f"{_share('lowp .*:stochastic.*')} % of `torch.copy_`",
    "statistics of a tensor": lambda: f"{_nanoseconds('lowp statistics'):.1f} ns per element and thread",
    "a bf16 or fp16 step without 16-bit arithmetic": _without_arithmetic,
    "a bf16 step where the processor multiplies bf16": lambda: (
        f"{span(_of_steps('step', 'bf16', 'lowp_over_fp32'), 2)} of the fp32 step, "
        f"{span(_of_steps('step', 'bf16', 'lowp_over_torch'), 2)} of torch.autocast's"
    ),
    "int16 matrix products": lambda: (
        f"int32 chains {_of_products('gemm', 'chained')} times as fast, exact sums {_of_products('gemm', 'exact')}; "
        f"restricted to AVX2 {_of_products('gemm-avx2', 'chained')} and {_of_products('gemm-avx2', 'exact')}"
    ),
    "an int16 step of an MLP": lambda: (
        f"dfp16 {_of_integers('flex', 'dfp16')}, flex16+5 {_of_integers('flex', 'flex16+5')} times the fp32 step on "
        f"Zen 5 with AVX-512, {_of_integers('flex-avx2', 'dfp16')} and {_of_integers('flex-avx2', 'flex16+5')} "
        "restricted to AVX2"
    ),
    "a dfp16 step of BERT": lambda: f"{_benched('bert', 'lowp dfp16'):.2f} times the fp32 step",
}


def claimed(text: str) -> str:
    """Return docs/evidence.md with the figures of its claims replaced: the second cell, up to what it adds to them."""
    for claim, figure in CLAIMS.items():
        begin = re.search(rf"^\| {re.escape(claim)}[^|]* \| ", text, re.MULTILINE)
        if begin is None:
            raise SystemExit(f"docs/evidence.md has no claim that begins with {claim!r}")
        cell, bar, after = text[begin.end() :].partition(" | ")
        added = re.search(r" \(MLP.*|; the same peak.*", cell)
        text = text[: begin.end()] + figure() + (added[0] if added else "") + bar + after
    return text


# -- `lowp bench` ------------------------------------------------------------------------------------------------------
EXAMPLE = "```console not-run\n$ lowp bench unet --seconds 2\n"


def example(text: str) -> str:
    """Return docs/benchmark.md with the tables of its example replaced: times, and what was published."""
    from lowp.report import terminal
    from lowp.report.benchmark import benchmark_tables

    times, *_, published = benchmark_tables(result("bench-unet"))
    parts = []
    for table in (times, published):
        console = terminal.console(stream := io.StringIO())
        console.width = 160
        terminal.show(console, table)
        parts.append(stream.getvalue().strip())
    before, begin, rest = text.partition(EXAMPLE)
    if not begin:
        raise SystemExit(f"docs/benchmark.md has no block that begins with {EXAMPLE!r}")
    _, end, after = rest.partition("\n```\n")
    return f"{before}{begin}{parts[0]}\n...\n{parts[1]}\n...{end}{after}"


# -- the monitor -------------------------------------------------------------------------------------------------------
MODES = {"plain": "are named in plain runs", "compiled": "in compiled ones", "ddp": "in DDP"}


def recorded(name: str) -> Any:
    """Return the results of a bench, None where none were recorded yet."""
    return result(name)["results"] if (ROOT / "bench" / "results" / f"{name}.json").exists() else None


def watched(text: str) -> str:
    """Return docs/monitoring.md with the figures of bench/monitoring.py, as far as they were recorded."""
    if faults := recorded("monitoring-faults"):
        named = {mode: sum(how != "NOT NAMED" for how in faults[mode].values()) for mode in MODES}
        counts = ", ".join(f"{named[mode]} of {len(faults[mode])} {words}" for mode, words in MODES.items())
        text = re.sub(r"within 50 steps .*? in DDP", f"within 50 steps {counts}", text)
    if trained := recorded("monitoring-quiet"):
        alarms = sum(len(one["alarms"]) for of in trained.values() for one in of.values())
        text = re.sub(r"\((no|\d+) alarms?\)", f"({alarms or 'no'} alarm{'s' if alarms > 1 else ''})", text)
    if taken := recorded("monitoring-cost"):
        shares = ", ".join(f"{one['added']:.1%} of {name}'s {one['ms']:.2g} ms a step" for name, one in taken.items())
        text = re.sub(r"`cost` measures[^\n]*\.", f"`cost` measures {shares}.", text)
    return text


OTHER: dict[str, Callable[[str], str]] = {
    "docs/evidence.md": claimed,
    "docs/benchmark.md": example,
    "docs/monitoring.md": watched,
}


# -- pages ------------------------------------------------------------------------------------------------------------
def written(text: str, table: Table) -> str:
    """Return a page's text with the rows of a table replaced."""
    before, header, after = text.partition(f"| {table.first} |")
    if not header:
        raise SystemExit(f"{table.page} has no table whose header begins with {table.first!r}")
    old, blank, rest = after.partition("\n\n")
    head = "\n".join(old.split("\n")[:2])
    lines = ["| " + " | ".join(cells) + " |" for cells in table.rows()]
    return "\n".join([before + header + head, *lines]) + blank + rest


def main() -> None:
    """Write all pages and pictures, and print which were changed."""
    for page in dict.fromkeys([*(table.page for table in TABLES), *OTHER]):
        path = ROOT / page
        text = old = path.read_text()
        for table in TABLES:
            if table.page == page:
                text = written(text, table)
        text = OTHER.get(page, str)(text)
        path.write_text(text)
        print(f"{page}: {'unchanged' if text == old else 'written'}")


if __name__ == "__main__":
    main()
