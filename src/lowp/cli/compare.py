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

from lowp.cli import serving
from lowp.cli.interrupts import Interrupts
from lowp.cli.options import OUTPUT, PLOT, TRAINING, Option, check_json_name, filled, given, split_list
from lowp.cli.output import picture_path, print_json, say, written_line
from lowp.errors import InvalidInput, counted
from lowp.recipes import get
from lowp.report import plots

if TYPE_CHECKING:
    from lowp.recipes.comparison import Study

DEFAULT = "fp32,fp16,bf16,bf16-tpu,e4m3fn"
_SEEDS, _SEEDS_OF_A_SWEEP = 3, 1


OPTIONS = (
    *TRAINING,
    Option("--precision", f"presets, formats, policy files (default: {DEFAULT})", "LIST"),
    Option("--seeds", f"runs of each precision (default: {_SEEDS}; {_SEEDS_OF_A_SWEEP} in a sweep)", "N", int, least=1),
    Option("--loss-scale", "list of none, numbers, dynamic: a row for each, in fp16 by default", "LIST"),
    Option("--sweep", "exponent=3..8,mantissa=2..10[,subnormals=no]: train every eXmY with half the epochs", "GRID"),
    Option("--out", "output file (default: compare-RECIPE.json or sweep-RECIPE.json)", "FILE.json", Path),
    Option("--inference", "train in fp32 and evaluate in these formats: int8,int4,binary", "LIST"),
    Option("--recover", "with --inference: also train for each format", kind=bool),
    Option("--mismatch", "compare log-probabilities of a model (a file, or a recipe) when served in these", "LIST"),
    Option(
        "--recipe", "with --mismatch FILE: the recipe of the model (default: found)", "NAME", more={"dest": "of_recipe"}
    ),
    PLOT,
    *OUTPUT,
    Option("--resume", "continue with the runs in the JSON file", kind=bool),
    Option("--jobs", "number of processes (default: chosen by the size of the work)", "N", int, least=1),
    Option("--timing", "seconds to time steps of each precision; 0: measure no time and memory", "SECONDS", float, 1.5),
)


def run(arguments: argparse.Namespace) -> int:
    """Compare; return 0 for any verdicts, 130 after Ctrl-C, with the finished runs written."""
    from lowp.benchmarking.timing import measure
    from lowp.recipes import results
    from lowp.report.figures.curves import curves, grid

    _check(arguments)
    if arguments.mismatch is not None:
        return serving.run_mismatch(arguments)
    if arguments.inference is not None:
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
    if not 0 <= arguments.timing < 3600:
        raise InvalidInput(f"--timing {arguments.timing:g}: give seconds, 0 or more, below 3600")
    if arguments.sweep is not None and arguments.precision is not None:
        raise InvalidInput("--sweep trains the formats of its grid: omit --precision")
    if arguments.recover and arguments.inference is None:
        raise InvalidInput("--recover trains for the formats of --inference: give --inference too")
    if arguments.inference is not None and (arguments.precision or arguments.sweep or arguments.loss_scale):
        raise InvalidInput("--inference trains in fp32 and serves in its formats: omit --precision and --sweep")
    check_json_name(arguments.out)


def _study(arguments: argparse.Namespace) -> Study:
    from lowp.recipes.comparison import Study, variants_of
    from lowp.recipes.sweep import Grid, Sweep

    scales = split_list(arguments.loss_scale, "--loss-scale")
    named = given(OPTIONS, arguments)
    if arguments.sweep is not None:
        if len(scales) > 1:
            raise InvalidInput(
                f"--loss-scale {arguments.loss_scale}: a sweep takes a single loss scale, or none without this option"
            )
        grid = Grid.parse(arguments.sweep)
        settings = filled({**named, "loss_scale": scales[0] if scales else None})
        if arguments.epochs is None:
            settings = replace(settings, epochs=max(1, (settings.epochs or 1) // 2))
        return Sweep(settings, grid, range(arguments.seeds or _SEEDS_OF_A_SWEEP))
    precisions = split_list(arguments.precision, "--precision") or split_list("fp16" if scales else DEFAULT)
    if "fp32" not in precisions:
        say("fp32 is trained too, as what the others are compared with")
    variants = variants_of(filled(named), precisions, scales)
    return Study(variants, range(arguments.seeds or _SEEDS))


def _take_over(study: Study, out: Path, resume: bool) -> None:
    """Continue with the runs of an interrupted comparison, or refuse to overwrite them."""
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
    from lowp.report.terminal import Bar

    jobs = study.jobs()
    epochs = study.settings.epochs or 1
    labels = ", ".join(variant.label for variant in study.variants)
    names = labels if len(study.variants) <= 12 else f"{len(study.variants)} formats"
    numbers = f"{counted(len(study.seeds), 'seed')}, {counted(epochs, 'epoch')}"
    title = f"{study.recipe.name}: {names}; {numbers}; {study.data.description}"
    with Bar(study.recipe.name, len(jobs) * epochs, "epochs") as bar:
        bar.line(title)
        results.write(out, study.document())  # so that --resume continues a run that is killed, too
        for done, (name, result) in enumerate(study.run(bar.move_part, processes, stop), 1):
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
