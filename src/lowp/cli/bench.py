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
from lowp.cli.lists import split_list
from lowp.cli.output import add_output_arguments, print_json, say
from lowp.cli.pictures import add_plot, picture_path, written_line

if TYPE_CHECKING:
    from lowp.benchmarking.benchmark import Benchmark, BenchmarkPlan
    from lowp.recipes.training import Settings

DEFAULT = "fp16,bf16,flex16+5,dfp16"
_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="one or more; `lowp recipes` lists them")
    parser.add_argument(
        "--precision", default=DEFAULT, metavar="LIST", help=f"presets, formats, policy files (default: {DEFAULT})"
    )
    parser.add_argument("--no-torch-amp", action="store_true", help="omit torch.autocast and its GradScaler")
    parser.add_argument(
        "--seconds",
        type=float,
        default=_SECONDS,
        metavar="S",
        help=f"seconds of timed steps for each row (default: {_SECONDS:g})",
    )
    parser.add_argument("--memory", metavar="SIZE", help="find the largest batch that fits: 2GB, 512MiB ...")
    parser.add_argument("--size", help="size of the recipe: cpu (default) or full")
    parser.add_argument("--batch", type=int, help="batch size (default: the recipe's)")
    parser.add_argument("--device", help="cpu (default), cuda, cuda:1 ...")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="number of CPU threads (default: chosen by the recipe)"
    )
    parser.add_argument("--data", metavar="DIR", help="folder or file of the real data set")
    parser.add_argument(
        "--out",
        metavar="FILE.json",
        type=Path,
        help="output file (default: bench-RECIPE.json, or bench.json for several recipes)",
    )
    add_plot(parser)
    add_output_arguments(parser)
    parser.add_argument("--notes", action="store_true", help="also print how each number was measured")


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the results; return 130 after Ctrl-C, with the finished measurements written."""
    from lowp.benchmarking.benchmark import Benchmark
    from lowp.recipes import results
    from lowp.report import plots

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
    from lowp.errors import InvalidInput
    from lowp.recipes import get
    from lowp.recipes.training import Settings

    for name in names:
        get(name)
    if arguments.data is not None and len(names) > 1:
        raise InvalidInput(
            f"--data {arguments.data} is for one recipe, not for {', '.join(names)}: run them one at a time"
        )
    if arguments.out is not None and arguments.out.suffix != ".json":
        raise InvalidInput(f"--out {arguments.out}: the numbers are written as JSON: give a name that ends in .json")
    if arguments.device is not None and arguments.device.partition(":")[0] in ("mps", "xpu", "meta"):
        raise InvalidInput(
            f"--device {arguments.device}: memory can be measured on cpu and cuda only: give one of these"
        )
    given = {"size": arguments.size, "batch": arguments.batch, "device": arguments.device, "data": arguments.data}
    named = {name: value for name, value in given.items() if value is not None}
    return [Settings(name, **named).filled() for name in names]


def _plan(arguments: argparse.Namespace) -> BenchmarkPlan:
    from lowp import presets
    from lowp.benchmarking.benchmark import BenchmarkPlan
    from lowp.benchmarking.largest_batch import bytes_from
    from lowp.errors import InvalidInput

    if not 0 < arguments.seconds < 3600:
        raise InvalidInput(f"--seconds {arguments.seconds:g}: give seconds above 0, such as {_SECONDS:g}")
    if arguments.threads is not None and arguments.threads < 1:
        raise InvalidInput(f"--threads {arguments.threads}: give 1 or more")
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
    from lowp.report.progress import Bar

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
