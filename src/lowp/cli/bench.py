"""Measure the cost of training steps: time, wall time, memory and its use, operations in 16 bits.

  lowp bench rossmann
  lowp bench rossmann unet bert --out bench.json --plot bench.png
  lowp bench unet --precision fp16,bf16 --memory 512MB
  lowp bench bert --size full --device cuda

The rows take turns in one process: fp32 (on a GPU with TF32 off and on), torch.amp in fp16 and bf16, and lowp in each
--precision. A row with very slow steps runs few of them and is marked. All numbers are written to a JSON file together
with the methods of measurement, and a picture beside it. After Ctrl-C the file contains the measurements so far.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli.interrupts import Interrupts
from lowp.cli.options import BATCH, DATA, DEVICE, OUTPUT, PLOT, SIZE, Option, check_json_name, given, split_list
from lowp.cli.output import picture_path, print_json, say, written_line
from lowp.errors import InvalidInput
from lowp.recipes import get
from lowp.report import plots

if TYPE_CHECKING:
    from lowp.benchmarking.benchmark import Benchmark, BenchmarkPlan
    from lowp.recipes.training import Settings

DEFAULT = "fp16,bf16,flex16+5,dfp16"
_SECONDS = 3.0


OPTIONS = (
    Option("recipes", "one or more; `lowp recipes` lists them", "RECIPE", more={"nargs": "+"}),
    Option("--precision", f"presets, formats, policy files (default: {DEFAULT})", "LIST", default=DEFAULT),
    Option("--no-torch-amp", "omit torch.autocast and its GradScaler", kind=bool),
    Option("--seconds", f"seconds of timed steps for each row (default: {_SECONDS:g})", "S", float, default=_SECONDS),
    Option("--memory", "find the largest batch that fits: 2GB, 512MiB ...", "SIZE"),
    SIZE,
    BATCH,
    DEVICE,
    Option("--threads", "number of CPU threads (default: chosen by the recipe)", "N", int, least=1),
    DATA,
    Option("--out", "output file (default: bench-RECIPE.json, or bench.json for several recipes)", "FILE.json", Path),
    PLOT,
    *OUTPUT,
    Option("--notes", "also print how each number was measured", kind=bool),
)


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results; return 130 after Ctrl-C, with the finished measurements written."""
    from lowp.benchmarking.benchmark import Benchmark
    from lowp.recipes import results

    names = list(dict.fromkeys(arguments.recipes))
    settings, plan = _settings(arguments, names), _plan(arguments)
    out = arguments.out or Path(f"bench-{names[0]}.json" if len(names) == 1 else "bench.json")
    plot = picture_path(arguments.plot, out)
    benchmark = Benchmark(settings, plan)
    benchmark.command = results.command_line()
    interrupted = f"interrupted; what was measured is in {out}"
    with Interrupts(lambda: interrupted) as interrupts:
        _measure(benchmark, out, interrupts)
    document = benchmark.document()
    results.write(out, document)
    if plots.can_plot() and not interrupts():  # before the tables, whose reader (head, less) may have exited
        from lowp.report.figures.benchmark import chart

        chart(document, plot)
    if arguments.json:
        print_json(document)
    elif document["recipes"]:
        _print(document, arguments.notes)
    if interrupts():
        say(interrupted)
        return interrupts.exit_code
    if not arguments.json:
        print(written_line(out, plot))
    return 0


def _settings(arguments: argparse.Namespace, names: list[str]) -> list[Settings]:
    from lowp.recipes.training import Settings

    for name in names:
        get(name)
    if arguments.data is not None and len(names) > 1:
        raise InvalidInput(
            f"--data {arguments.data} is for one recipe, not for {', '.join(names)}: run them one at a time"
        )
    check_json_name(arguments.out)
    if arguments.device is not None and arguments.device.partition(":")[0] in ("mps", "xpu", "meta"):
        raise InvalidInput(
            f"--device {arguments.device}: memory can be measured on cpu and cuda only: give one of these"
        )
    named = given(OPTIONS, arguments)
    return [Settings(name, **named).filled() for name in names]


def _plan(arguments: argparse.Namespace) -> BenchmarkPlan:
    from lowp import presets
    from lowp.benchmarking.benchmark import BenchmarkPlan
    from lowp.benchmarking.largest_batch import bytes_from

    if not 0 < arguments.seconds < 3600:
        raise InvalidInput(f"--seconds {arguments.seconds:g}: give seconds above 0, such as {_SECONDS:g}")
    precisions = split_list(arguments.precision, "--precision")
    for precision in precisions:
        presets.parse(precision)
    return BenchmarkPlan(
        precisions=precisions,
        torch_amp=not arguments.no_torch_amp,
        seconds=arguments.seconds,
        threads=arguments.threads,
        memory=None if arguments.memory is None else bytes_from(arguments.memory),
    )


def _measure(benchmark: Benchmark, out: Path, stop: Interrupts) -> None:
    """Measure with a progress bar, and write the file after each measurement."""
    from lowp.recipes import results
    from lowp.report.terminal import Bar

    with Bar("benchmark", benchmark.stages, "measured") as bar:
        for words in benchmark.run(stop):
            results.write(out, benchmark.document())
            bar.advance(1, words)
            bar.line(words)


def _print(document: dict[str, Any], methods: bool) -> None:
    from lowp.report import terminal
    from lowp.report.benchmark import benchmark_notes, benchmark_tables

    console = terminal.console()
    for table in benchmark_tables(document):
        terminal.show(console, table)
    console.print(benchmark_notes(document, methods, console.width), markup=False)
