"""Draw a figure of the literature from a real run, and write its numbers to a JSON file beside it.

lowp figure --list
lowp figure updates
lowp figure loss-scaling --scale dynamic
lowp figure autoflex --recipe cifar10-mlp --steps 400 --out autoflex.svg
lowp figure curves --from compare-digits.json --out curves.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli.interrupts import Interrupts
from lowp.cli.lists import split_list
from lowp.cli.output import add_output_arguments, print_json

if TYPE_CHECKING:
    from lowp.recipes.training import Settings


@dataclass(frozen=True)
class Figure:
    """A figure: the functions that record it, draw it and describe its numbers in words, as ``module:function``.

    `kind` is the kind of its document. `run` holds the options for the settings of its training with the figure's
    defaults, empty for a figure without a training; `options` holds the keyword arguments of its recorder. `trainings`
    is the number of runs for each precision and seed.
    """

    summary: str
    kind: str
    record: str
    draw: str
    words: str | None
    run: Mapping[str, Any]
    options: Mapping[str, Any]
    trainings: int = 1


_RUN = {"size": None, "seed": 0, "data": None}


def _figure(summary: str, name: str, module: str, run: Mapping[str, Any], **options: Any) -> Figure:
    """Return a row whose functions are named after the figure: record_NAME, NAME and NAME_words."""
    function = name.replace("-", "_")
    places = f"lowp.recipes.recording.{module}:record_{function}", f"lowp.report.figures.{module}:{function}"
    return Figure(summary, f"figure-{name}", *places, f"{places[1]}_words", run, options)


FIGURES = {
    "autoflex": Figure(
        "Γ, κ and the predicted maximum of weights, activations and updates, step by step (Flexpoint, figure 3)",
        "figure-autoflex",
        "lowp.recipes.recording.flex:record_series",
        "lowp.report.figures.flex:autoflex",
        None,
        {**_RUN, "recipe": "digits", "precision": "flex16+5"},
        {"steps": 400, "layer": None},
    ),
    "flex-window": Figure(
        "log2 histograms of weights, activations and updates with the 16-bit window (Flexpoint, figure 2)",
        "figure-flex-window",
        "lowp.recipes.recording.flex:record_windows",
        "lowp.report.figures.flex:flex_window",
        None,
        {**_RUN, "recipe": "digits", "precision": "flex16+5"},
        {"steps": 400, "layer": None},
    ),
    "updates": _figure(
        "weight gradients and update:weight ratios early and late, and what bf16 and fp16 lose of the updates",
        "updates",
        "gradients",
        {**_RUN, "recipe": "resnet-20", "precision": "fp32", "epochs": None},
    ),
    "gradients": Figure(
        "weight gradients and updates of a naive fp16 run, and what fp16 loses (Micikevicius et al., figure 2b)",
        "figure-gradients",
        "lowp.recipes.recording.gradients:record_gradients",
        "lowp.report.figures.gradients:gradients",
        "lowp.report.figures.gradients:gradients_words",
        {**_RUN, "recipe": "digits-hard", "precision": "fp16-naive", "epochs": None},
        {},
        trainings=2,
    ),
    "activation-gradients": _figure(
        "gradients of activations in fp16's window, and their medians beside those of weights (figure 3)",
        "activation-gradients",
        "activations",
        {**_RUN, "recipe": "ssd", "precision": "fp32", "epochs": None},
    ),
    "loss-scaling": _figure(
        "the same gradients without and with a loss scale: what falls out of fp16 before and after",
        "loss-scaling",
        "activations",
        {**_RUN, "recipe": "ssd", "precision": "fp16", "epochs": 6, "loss_scale": "256"},
    ),
    "stall": Figure(
        "weights that stop moving in bf16, beside fp32 masters and stochastic rounding, which go on",
        "figure-stall",
        "lowp.recipes.recording.stall:record_stall",
        "lowp.report.figures.stall:stall",
        "lowp.report.figures.stall:stall_words",
        {**_RUN, "recipe": "digits-hard", "precision": "bf16-storage", "epochs": None},
        {"layer": None},
        trainings=4,
    ),
    "curves": Figure(
        "error by epoch, top-1 and top-5, in several precisions; also from a file of lowp compare",
        "comparison",
        "lowp.recipes.recording.curves:record_curves",
        "lowp.report.figures.curves:curves",
        "lowp.report.figures.curves:curves_words",
        {"recipe": "digits", "size": None, "data": None, "epochs": None},
        {"precisions": "fp16,flex16+5", "seeds": 3},
    ),
    "cost": _figure(
        "energy and silicon area of numbers, from a published table and estimates between its rows",
        "cost",
        "costs",
        {},
        formats="fp32,tf32,fp16,bf16,e4m3fn,e5m2,flex16+5,int8",
    ),
}
# The spelling of options that differs from the name of the setting.
_SPELLED = {"loss_scale": "scale", "precisions": "precision"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", help=f"name of the figure: {', '.join(FIGURES)}")
    parser.add_argument("--list", action="store_true", help="list the figures")
    parser.add_argument(
        "--from", dest="source", metavar="FILE.json", type=Path, help="draw a recorded file without training"
    )
    parser.add_argument("--recipe", help="the recipe to train (default: the figure's)")
    parser.add_argument("--size", help="size of the recipe: cpu (default) or full")
    parser.add_argument(
        "--precision", help="the precision (default: the figure's); for curves a list of precisions besides fp32"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="number of epochs (default: the recipe's)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="for autoflex and flex-window: number of training steps (default: 400)"
    )
    parser.add_argument(
        "--layer", metavar="PATH", help="path of the module whose tensors are drawn (default: the first)"
    )
    parser.add_argument(
        "--scale", metavar="SCALE", help="for loss-scaling: a number, dynamic or dynamic(1024) (default: 256)"
    )
    parser.add_argument("--formats", metavar="LIST", help="for cost: list of formats, such as fp16,e5m7")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the weights and batches (default: 0)")
    parser.add_argument("--seeds", type=int, metavar="N", help="for curves: runs of each precision (default: 3)")
    parser.add_argument("--data", metavar="DIR", help="folder or file of the real data set")
    add_output_arguments(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help=".png, .svg or .pdf file (default: figure-NAME.png)")


def run(arguments: argparse.Namespace) -> int:
    """Record and draw a figure, or draw a recorded file; return 130 after Ctrl-C, with nothing written."""
    from lowp.errors import InvalidInput, UnknownName, unknown
    from lowp.recipes import results
    from lowp.report import plots

    if arguments.list:
        _list(arguments.json)
        return 0
    if arguments.name is None:
        raise InvalidInput(f"the name of a figure is missing; allowed: {', '.join(FIGURES)}")
    if arguments.name not in FIGURES:
        raise UnknownName(unknown("figure", arguments.name, FIGURES))
    figure = FIGURES[arguments.name]
    out = arguments.out or Path(f"figure-{arguments.name}.png")
    plots.check_suffix(out)
    results.check_writable(out)
    given = _given(arguments, figure)
    if arguments.source is not None:
        return _redraw(arguments, figure, given, out)
    numbers = out.with_suffix(".json")
    results.check_writable(numbers)
    words = "interrupted; nothing was written"
    with Interrupts(lambda: words) as interrupts:
        document = _record(figure, given, interrupts)
    if interrupts():
        print(words, file=sys.stderr)
        return interrupts.exit_code
    results.write(numbers, document)
    document = results.read(numbers, figure.kind)  # as --from reads it
    if plots.can_plot():
        _import(figure.draw)(document, out)
        written = f"written: {numbers}, {out}"
    else:
        written = f"written: {numbers}; no picture: {plots.NO_MATPLOTLIB}"
    _print(figure, document, written, arguments.json)
    return 0


def _print(figure: Figure, document: Mapping[str, Any], written: str, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        print("\n".join([*_words(figure, document), written]))


def _given(arguments: argparse.Namespace, figure: Figure) -> dict[str, Any]:
    """Return the given options by the name of the setting; raise InvalidInput for one the figure does not take."""
    from lowp.errors import InvalidInput

    allowed_names = {**figure.run, **figure.options}
    every = {name for one in FIGURES.values() for name in {**one.run, **one.options}}
    options = {name: _SPELLED.get(name, name) for name in sorted(every)}
    values = {name: getattr(arguments, option) for name, option in options.items() if name in allowed_names}
    refused = [
        option
        for option in dict.fromkeys(options.values())
        if getattr(arguments, option) is not None and option not in {options[name] for name in allowed_names}
    ]
    if refused:
        allowed = ", ".join(f"--{options[name]}" for name in allowed_names)
        raise InvalidInput(f"{arguments.name} does not take --{refused[0]}; allowed: {allowed}, --from, --out")
    for name in ("steps", "seeds"):
        if values.get(name) is not None and values[name] < 1:
            raise InvalidInput(f"--{name} {values[name]}: give 1 or more")
    return {name: value for name, value in values.items() if value is not None}


def _record(figure: Figure, given: Mapping[str, Any], interrupts: Interrupts) -> dict[str, Any]:
    """Return the figure's document, recorded with a progress bar."""
    from lowp.report.progress import Bar

    options: dict[str, Any] = {name: given.get(name, value) for name, value in figure.options.items()}
    for name in ("precisions", "formats"):
        if name in options:
            options[name] = split_list(options[name], "--precision" if name == "precisions" else "")
    total, unit = options.get("steps", 0), "steps"
    if figure.run:
        options["settings"] = _settings(figure, given)
    if figure.run and not total:
        rows = 1 + len(options["precisions"]) if "precisions" in options else 1
        total, unit = options["settings"].epochs * figure.trainings * rows * options.get("seeds", 1), "epochs"
    with Bar(figure.kind, total, unit) as bar:
        done_by_name: dict[str, float] = {}

        def on_progress(name: str, done: float) -> None:
            done_by_name[name] = done
            bar.move(sum(done_by_name.values()), name)

        return dict(_import(figure.record)(**options, stop=interrupts, on_progress=on_progress))


def _settings(figure: Figure, given: Mapping[str, Any]) -> Settings:
    from lowp.recipes.training import Settings

    values = {name: given.get(name, value) for name, value in figure.run.items()}
    if "recipe" in given and "epochs" not in given and "epochs" in values:
        values["epochs"] = None  # the figure's number of epochs is for its default recipe
    return Settings(**values).filled()


def _redraw(arguments: argparse.Namespace, figure: Figure, given: Mapping[str, Any], out: Path) -> int:
    """Draw a recorded file, and print its numbers in words."""
    from lowp.errors import InvalidInput, Unavailable
    from lowp.recipes import results
    from lowp.report import plots

    if given:
        option = next(iter(_SPELLED.get(name, name) for name in given))
        raise InvalidInput(f"--from draws a recorded file, and --{option} is for recording: omit one of them")
    try:
        document = results.read(arguments.source, figure.kind)
    except InvalidInput as error:
        raise InvalidInput(f"{error}{_other_command(arguments.source)}") from None
    if not plots.can_plot():
        raise Unavailable(plots.NO_MATPLOTLIB)
    with results.reading(arguments.source):
        _import(figure.draw)(document, out)
        _print(figure, document, f"written: {out}", arguments.json)
    return 0


def _other_command(path: Path) -> str:
    """Return the command that draws a file of another figure, as an addition to an error message."""
    from lowp.errors import InvalidInput
    from lowp.recipes import results

    for name, figure in FIGURES.items():
        try:
            results.read(path, figure.kind)
        except InvalidInput:
            continue
        return f": lowp figure {name} --from {path} draws it"
    return ""


def _words(figure: Figure, document: Mapping[str, Any]) -> list[str]:
    return [] if figure.words is None else list(_import(figure.words)(document))


def _list(as_json: bool) -> None:
    """Print what each figure shows, and its default training."""
    from lowp.report import terminal

    rows = []
    for name, figure in FIGURES.items():
        recipe = figure.run.get("recipe")
        precision = figure.run.get("precision") or f"fp32,{figure.options.get('precisions')}"
        rows.append((name, figure.summary, f"{recipe} in {precision}" if recipe else "none"))
    if as_json:
        print_json([dict(zip(("figure", "what", "training"), row, strict=True)) for row in rows])
        return
    table = terminal.plain_table(None, ["figure", "what", "training"])
    for row in rows:
        table.add_row(*row)
    terminal.show(terminal.console(), table)


def _import(reference: str) -> Callable[..., Any]:
    from importlib import import_module

    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
