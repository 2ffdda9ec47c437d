"""Draw a figure of the literature from a real run.

  lowp figure --list
  lowp figure updates
  lowp figure loss-scaling --scale dynamic
  lowp figure autoflex --recipe cifar10-mlp --steps 400 --out autoflex.svg
  lowp figure curves --from compare-digits.json --out curves.svg

Its numbers are written to a JSON file beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli.interrupts import Interrupts
from lowp.cli.options import DATA, EPOCHS, OUTPUT, SIZE, Option, split_list
from lowp.cli.output import print_json, print_table, written_line
from lowp.errors import InvalidInput, Unavailable, check_name
from lowp.report import plots

if TYPE_CHECKING:
    from lowp.recipes.training import Settings


@dataclass(frozen=True)
class Figure:
    """A figure, whose functions are named after it: `record_NAME` of a module of `lowp.recipes.recording` records it,
    `NAME` of the module of that name in `lowp.report.figures` draws it, and `NAME_words` says its numbers in words.

    `run` holds the options for the settings of its training with the figure's defaults, empty for a figure without a
    training; `options` holds the keyword arguments of its recorder. `trainings` is the number of runs for each
    precision and seed. `document`: the kind of its document, if it is not its own.
    """

    name: str
    summary: str
    module: str
    run: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    trainings: int = 1
    document: str = ""

    @property
    def kind(self) -> str:
        """The kind of its document."""
        return self.document or f"figure-{self.name}"

    @property
    def record(self) -> Callable[..., Any]:
        """The function that returns its document."""
        return _function(f"recipes.recording.{self.module}", f"record_{self._function}")

    @property
    def draw(self) -> Callable[..., Any]:
        """The function that draws a document to a path."""
        return _function(f"report.figures.{self.module}", self._function)

    def words(self, document: Mapping[str, Any]) -> list[str]:
        """Return the numbers of a document in words, where there are some."""
        words = getattr(import_module(f"lowp.report.figures.{self.module}"), f"{self._function}_words", None)
        return [] if words is None else list(words(document))

    @property
    def _function(self) -> str:
        return self.name.replace("-", "_")


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"lowp.{module}"), name)
    return function


_RUN = {"size": None, "seed": 0, "data": None}
_flex = partial(
    Figure,
    module="flex",
    run={**_RUN, "recipe": "digits", "precision": "flex16+5"},
    options={"steps": 400, "layer": None},
)
_ROWS = (
    _flex(
        "autoflex",
        "Γ, κ and the predicted maximum of weights, activations and updates, step by step (Flexpoint, figure 3)",
    ),
    _flex(
        "flex-window",
        "log2 histograms of weights, activations and updates with the 16-bit window (Flexpoint, figure 2)",
    ),
    Figure(
        "updates",
        "weight gradients and update:weight ratios early and late, and what bf16 and fp16 lose of the updates",
        "gradients",
        {**_RUN, "recipe": "resnet-20", "precision": "fp32", "epochs": None},
    ),
    Figure(
        "gradients",
        "weight gradients and updates of a naive fp16 run, and what fp16 loses (Micikevicius et al., figure 2b)",
        "gradients",
        {**_RUN, "recipe": "digits-hard", "precision": "fp16-naive", "epochs": None},
        trainings=2,
    ),
    Figure(
        "activation-gradients",
        "gradients of activations in fp16's window, and their medians beside those of weights (figure 3)",
        "gradients",
        {**_RUN, "recipe": "ssd", "precision": "fp32", "epochs": None},
    ),
    Figure(
        "loss-scaling",
        "the same gradients without and with a loss scale: what falls out of fp16 before and after",
        "gradients",
        {**_RUN, "recipe": "ssd", "precision": "fp16", "epochs": 6, "loss_scale": "256"},
    ),
    Figure(
        "stall",
        "weights that stop moving in bf16, beside fp32 masters and stochastic rounding, which go on",
        "stall",
        {**_RUN, "recipe": "digits-hard", "precision": "bf16-storage", "epochs": None},
        {"layer": None},
        trainings=4,
    ),
    Figure(
        "curves",
        "error by epoch, top-1 and top-5, in several precisions; also from a file of lowp compare",
        "curves",
        {"recipe": "digits", "size": None, "data": None, "epochs": None},
        {"precisions": "fp16,flex16+5", "seeds": 3},
        document="comparison",
    ),
    Figure(
        "cost",
        "energy and silicon area of numbers, from a published table and estimates between its rows",
        "costs",
        {},
        {"formats": "fp32,tf32,fp16,bf16,e4m3fn,e5m2,flex16+5,int8"},
    ),
)
FIGURES = {one.name: one for one in _ROWS}
# The spelling of options that differs from the name of the setting.
_SPELLED = {"loss_scale": "scale", "precisions": "precision"}
# `setting` marks what is for recording
OPTIONS = (
    Option("name", f"name of the figure: {', '.join(FIGURES)}", more={"nargs": "?"}),
    Option("--list", "list the figures", kind=bool),
    Option("--from", "draw a recorded file without training", "FILE.json", Path, more={"dest": "source"}),
    Option("--recipe", "the recipe to train (default: the figure's)", setting="recipe"),
    SIZE,
    Option(
        "--precision",
        "the precision (default: the figure's); for curves a list of precisions besides fp32",
        setting="precision",
    ),
    replace(EPOCHS, metavar="N"),
    Option(
        "--steps",
        "for autoflex and flex-window: number of training steps (default: 400)",
        "N",
        int,
        setting="steps",
        least=1,
    ),
    Option("--layer", "path of the module whose tensors are drawn (default: the first)", "PATH", setting="layer"),
    Option(
        "--scale", "for loss-scaling: a number, dynamic or dynamic(1024) (default: 256)", "SCALE", setting="loss_scale"
    ),
    Option("--formats", "for cost: list of formats, such as fp16,e5m7", "LIST", setting="formats"),
    Option("--seed", "seed of the weights and batches (default: 0)", "N", int, setting="seed"),
    Option("--seeds", "for curves: runs of each precision (default: 3)", "N", int, setting="seeds", least=1),
    DATA,
    *OUTPUT,
    Option("--out", ".png, .svg or .pdf file (default: figure-NAME.png)", "FILE", Path),
)


def run(arguments: argparse.Namespace) -> int:
    """Record and draw a figure, or draw a recorded file; return 130 after Ctrl-C, with nothing written."""
    from lowp.recipes import results

    if arguments.list:
        _list(arguments.json)
        return 0
    if arguments.name is None:
        raise InvalidInput(f"the name of a figure is missing; allowed: {', '.join(FIGURES)}")
    check_name("figure", arguments.name, FIGURES)
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
        figure.draw(document, out)
    _print(figure, document, written_line(numbers, out), arguments.json)
    return 0


def _print(figure: Figure, document: Mapping[str, Any], written: str, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        print("\n".join([*figure.words(document), written]))


def _given(arguments: argparse.Namespace, figure: Figure) -> dict[str, Any]:
    """Return the given options by the name of the setting; raise InvalidInput for one the figure does not take."""
    takes = {_SPELLED.get(name, name): name for name in {**figure.run, **figure.options}}
    for one in OPTIONS:
        if one.setting and one.dest not in takes and getattr(arguments, one.dest) is not None:
            allowed = ", ".join(f"--{option}" for option in takes)
            raise InvalidInput(f"{arguments.name} does not take {one.name}; allowed: {allowed}, --from, --out")
    values = {name: getattr(arguments, option) for option, name in takes.items()}
    return {name: value for name, value in values.items() if value is not None}


def _record(figure: Figure, given: Mapping[str, Any], interrupts: Interrupts) -> dict[str, Any]:
    """Return the figure's document, recorded with a progress bar."""
    from lowp.recipes.recording.runs import Onlooker
    from lowp.report.terminal import Bar

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
        return dict(figure.record(**options, onlooker=Onlooker(interrupts, bar.move_part)))


def _settings(figure: Figure, given: Mapping[str, Any]) -> Settings:
    from lowp.recipes.training import Settings

    values = {name: given.get(name, value) for name, value in figure.run.items()}
    if "recipe" in given and "epochs" not in given and "epochs" in values:
        values["epochs"] = None  # the figure's number of epochs is for its default recipe
    return Settings(**values).filled()


def _redraw(arguments: argparse.Namespace, figure: Figure, given: Mapping[str, Any], out: Path) -> int:
    """Draw a recorded file, and print its numbers in words."""
    from lowp.recipes import results

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
        figure.draw(document, out)
        _print(figure, document, f"written: {out}", arguments.json)
    return 0


def _other_command(path: Path) -> str:
    """Return the command that draws a file of another figure, as an addition to an error message."""
    from lowp.recipes import results

    for name, figure in FIGURES.items():
        try:
            results.read(path, figure.kind)
        except InvalidInput:
            continue
        return f": lowp figure {name} --from {path} draws it"
    return ""


def _list(as_json: bool) -> None:
    """Print what each figure shows, and its default training."""
    rows = []
    for name, figure in FIGURES.items():
        recipe = figure.run.get("recipe")
        precision = figure.run.get("precision") or f"fp32,{figure.options.get('precisions')}"
        rows.append((name, figure.summary, f"{recipe} in {precision}" if recipe else "none"))
    print_table(None, ("figure", "what", "training"), rows, as_json=as_json)
