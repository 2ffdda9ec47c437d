"""Train one recipe in several precisions with several seeds, and report which converge as fp32 does.

  lowp compare digits --precision fp32,fp16,bf16,bf16-tpu,e4m3fn
  lowp compare digits-hard --precision fp16,fp16-naive
  lowp compare digits --precision fp16 --loss-scale 1,8,256,dynamic
  lowp compare digits --sweep exponent=3..8,mantissa=2..10
  lowp compare digits --inference fp16,int8,int4,mxfp4,binary --recover
  lowp compare model.safetensors --mismatch bf16,fp16,int8,fp8

fp32 is always trained first; the other precisions are compared with it. A seed gives the same initial weights and
batches in every precision. All numbers are written to a JSON file, and the curves to a picture beside it. After Ctrl-C
the file contains the finished runs, and --resume continues with the rest.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli import run_options
from lowp.cli.interrupts import Interrupts
from lowp.cli.lists import split_list
from lowp.cli.output import add_output_arguments, counted, print_json, say
from lowp.cli.pictures import add_plot, picture_path, written_line

if TYPE_CHECKING:
    from lowp.recipes.comparison import Study

DEFAULT = "fp32,fp16,bf16,bf16-tpu,e4m3fn"
_SEEDS, _SEEDS_OF_A_SWEEP = 3, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    run_options.add_run_arguments(parser)
    parser.add_argument("--precision", metavar="LIST", help=f"presets, formats, policy files (default: {DEFAULT})")
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help=f"runs of each precision (default: {_SEEDS}; {_SEEDS_OF_A_SWEEP} in a sweep)",
    )
    parser.add_argument(
        "--loss-scale", metavar="LIST", help="list of none, numbers, dynamic: a row for each, in fp16 by default"
    )
    parser.add_argument(
        "--sweep",
        metavar="GRID",
        help="exponent=3..8,mantissa=2..10[,subnormals=no]: train every eXmY with half the epochs",
    )
    parser.add_argument(
        "--out", metavar="FILE.json", type=Path, help="output file (default: compare-RECIPE.json or sweep-RECIPE.json)"
    )
    parser.add_argument(
        "--inference", metavar="LIST", help="train in fp32 and evaluate in these formats: int8,int4,binary"
    )
    parser.add_argument("--recover", action="store_true", help="with --inference: also train for each format")
    parser.add_argument(
        "--mismatch",
        metavar="LIST",
        help="compare log-probabilities of a model (a file, or a recipe) when served in these",
    )
    parser.add_argument(
        "--recipe",
        dest="of_recipe",
        metavar="NAME",
        help="with --mismatch FILE: the recipe of the model (default: found)",
    )
    add_plot(parser)
    add_output_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="continue with the runs in the JSON file")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of processes (default: chosen by the size of the work)"
    )
    parser.add_argument(
        "--timing",
        type=float,
        default=1.5,
        metavar="SECONDS",
        help="seconds to time steps of each precision; 0: measure no time and memory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare; return 0 for any verdicts, 130 after Ctrl-C, with the finished runs written."""
    from lowp.benchmarking.comparing import measure
    from lowp.recipes import get, results
    from lowp.report import plots
    from lowp.report.figures.comparison import grid
    from lowp.report.figures.curves import curves

    _check(arguments)
    if arguments.mismatch is not None:
        from lowp.cli import mismatch

        return mismatch.run(arguments)
    if arguments.inference is not None:
        from lowp.cli import serving

        return serving.run(arguments)
    kind = "compare" if arguments.sweep is None else "sweep"
    out = arguments.out or Path(f"{kind}-{get(arguments.recipe).name}.json")
    study = _study(arguments)
    study.command = results.command_line()
    plot = picture_path(arguments.plot, out)
    study.folder = out.with_name(f"{out.stem}-parts")
    _take_over(study, out, arguments.resume)
    with Interrupts(lambda: _interrupted(study, out)) as interrupts:
        _train(study, out, arguments.jobs, interrupts)
        if arguments.timing and arguments.sweep is None and not interrupts():
            say("measuring the time and the memory of a step ...")
            measure(study, arguments.timing, interrupts)
    with contextlib.suppress(OSError):  # interrupted runs are in it
        study.folder.rmdir()
    if interrupts():
        results.write(out, study.document())
        say(_interrupted(study, out))
        return interrupts.exit_code
    document = study.document()
    results.write(out, document)
    if plots.can_plot():  # before the tables, whose reader (head, less) may have exited
        (curves if arguments.sweep is None else grid)(document, plot)
    if arguments.json:
        print_json(document)
    else:
        _print(document)
        print(written_line(out, plot))
    return 0


def _interrupted(study: Study, out: Path) -> str:
    done, jobs = len(study.runs), study.jobs()
    begun = sum(job.kept is not None and job.kept.exists() for job in jobs)
    parts = f", and {begun} begun in {study.folder}" if begun else ""
    return (
        f"interrupted; {done} of {done + len(jobs)} runs are in {out}{parts}. "
        "To continue, repeat the command with --resume"
    )


def _check(arguments: argparse.Namespace) -> None:
    from lowp.errors import InvalidInput
    from lowp.recipes import get

    if arguments.recipe.endswith(".py"):
        raise InvalidInput(
            f"{arguments.recipe} is a script, and lowp compare trains recipes: compare whole runs of a script by "
            f"lowp run --compare fp32,bf16 {arguments.recipe}"
        )
    if arguments.mismatch is not None:
        given = {"--sweep": arguments.sweep, "--inference": arguments.inference, "--loss-scale": arguments.loss_scale}
        if also := [name for name, value in given.items() if value is not None]:
            raise InvalidInput(f"--mismatch compares one model when it is served: omit {also[0]}")
        return
    if arguments.of_recipe is not None:
        raise InvalidInput("--recipe names the recipe of a file for --mismatch: give the recipe itself first")
    get(arguments.recipe)
    for option, value, minimum in (("--seeds", arguments.seeds, 1), ("--jobs", arguments.jobs, 1)):
        if value is not None and value < minimum:
            raise InvalidInput(f"{option} {value}: give {minimum} or more")
    if not 0 <= arguments.timing < 3600:
        raise InvalidInput(f"--timing {arguments.timing:g}: give seconds, 0 or more")
    if arguments.sweep is not None and arguments.precision is not None:
        raise InvalidInput("--sweep trains the formats of its grid: omit --precision")
    if arguments.recover and arguments.inference is None:
        raise InvalidInput("--recover trains for the formats of --inference: give --inference too")
    if arguments.inference is not None and (arguments.precision or arguments.sweep or arguments.loss_scale):
        raise InvalidInput("--inference trains in fp32 and serves in its formats: omit --precision and --sweep")
    if arguments.out is not None and arguments.out.suffix != ".json":
        raise InvalidInput(f"--out {arguments.out}: the numbers are written as JSON: give a name that ends in .json")


def _study(arguments: argparse.Namespace) -> Study:
    from lowp.errors import InvalidInput
    from lowp.recipes.comparison import Study, variants_of
    from lowp.recipes.sweep import Grid, Sweep

    scales = split_list(arguments.loss_scale, "--loss-scale")
    named = run_options.given(arguments)
    if arguments.sweep is not None:
        if len(scales) > 1:
            raise InvalidInput(
                f"--loss-scale {arguments.loss_scale}: a sweep takes a single loss scale, or none without this option"
            )
        grid = Grid.parse(arguments.sweep)
        settings = run_options.filled({**named, "loss_scale": scales[0] if scales else None})
        if arguments.epochs is None:
            settings = replace(settings, epochs=max(1, (settings.epochs or 1) // 2))
        return Sweep(settings, grid, range(arguments.seeds or _SEEDS_OF_A_SWEEP))
    precisions = split_list(arguments.precision, "--precision") or split_list("fp16" if scales else DEFAULT)
    if "fp32" not in precisions:
        say("fp32 is trained too, as what the others are compared with")
    variants = variants_of(run_options.filled(named), precisions, scales)
    return Study(variants, range(arguments.seeds or _SEEDS))


def _take_over(study: Study, out: Path, resume: bool) -> None:
    """Continue with the runs of an interrupted comparison, or refuse to overwrite them."""
    from lowp.errors import InvalidInput
    from lowp.recipes import results

    if resume:
        say(f"{counted(study.resume(out), 'run')} taken over from {out}")
        return
    if out.exists() and out.stat().st_size:
        try:
            is_complete = results.read(out, study.kind).get("complete")
        except InvalidInput:  # results of another kind or version: complete, and written by lowp, as checked before
            is_complete = True
        if not is_complete:
            raise InvalidInput(
                f"{out} holds the runs of an interrupted {study.kind}: give --resume to continue it, or another --out"
            )
    for job in study.jobs():  # runs that were interrupted and are not to be continued
        if job.kept is not None:
            job.kept.unlink(missing_ok=True)


def _train(study: Study, out: Path, processes: int | None, stop: Interrupts) -> None:
    """Train the remaining runs with a progress bar, and write the file after each run."""
    from lowp.recipes import results
    from lowp.recipes.comparison import result_line
    from lowp.report.progress import Bar

    jobs = study.jobs()
    epochs = study.settings.epochs or 1
    labels = ", ".join(variant.label for variant in study.variants)
    names = labels if len(study.variants) <= 12 else f"{len(study.variants)} formats"
    numbers = f"{counted(len(study.seeds), 'seed')}, {counted(epochs, 'epoch')}"
    title = f"{study.recipe.name}: {names}; {numbers}; {study.data.description}"
    with Bar(study.recipe.name, len(jobs) * epochs, "epochs") as bar:
        bar.line(title)
        results.write(out, study.document())  # so that --resume continues a run that is killed, too
        done_epochs: dict[str, float] = {}

        def on_epoch(name: str, epoch: float) -> None:
            done_epochs[name] = epoch
            bar.move(sum(done_epochs.values()), name)

        runs = study.run(on_epoch, processes, stop)
        for done, (name, result) in enumerate(runs, 1):
            results.write(out, study.document())
            bar.line(f"{done}/{len(jobs)}  {result_line(study, name, result)}")


def _print(document: dict[str, Any]) -> None:
    from lowp.report import tables, terminal

    console = terminal.console()
    if document["kind"] == "sweep":
        terminal.show(console, tables.heat_map(document))
        console.print(tables.sweep_words(document, console.width), markup=False)
        return
    for table in tables.comparison_tables(document):
        terminal.show(console, table)
    console.print(tables.notes(document, console.width), markup=False)
