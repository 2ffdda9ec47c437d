"""Draw a figure of the literature from a real run, with its numbers as JSON beside it.

lowp figure autoflex                       the Flexpoint paper's figure 3: Γ, κ, predicted and representable maximum
lowp figure flex-window                    its figure 2: histograms of log2|x| and the window of a 16-bit mantissa
lowp figure autoflex --recipe cifar10-mlp --data DIR --steps 400 --out autoflex.svg
lowp figure --list
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowp.cli.interrupts import Interrupts


@dataclass(frozen=True)
class Figure:
    """A figure by name: what records it (``module:function``, settings and options to a document) and what draws it."""

    summary: str
    record: str
    draw: str
    steps: int
    precision: str


FIGURES = {
    "autoflex": Figure(
        "Γ, κ and the predicted maximum of weights, activations and updates, step by step (Flexpoint, figure 3)",
        "lowp.recipes.recording:record_series",
        "lowp.report.figures:autoflex",
        400,
        "flex16+5",
    ),
    "flex-window": Figure(
        "log2 histograms of weights, activations and updates with the 16-bit window (Flexpoint, figure 2)",
        "lowp.recipes.recording:record_windows",
        "lowp.report.figures:flex_window",
        400,
        "flex16+5",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="?", help=f"the figure: {' or '.join(FIGURES)}")
    parser.add_argument("--list", action="store_true", help="list the figures")
    parser.add_argument("--recipe", default="digits", help="the network that is trained (digits)")
    parser.add_argument("--precision", help="in place of the figure's own: flex16+5:frozen ...")
    parser.add_argument("--layer", metavar="PATH", help="the module whose tensors are drawn; the first if not given")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (400)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")
    parser.add_argument("--data", metavar="DIR", help="the real data set, where the recipe takes one")
    parser.add_argument("--out", metavar="FILE", type=Path, help=".png, .svg or .pdf; figure-NAME.png if not given")


def run(arguments: argparse.Namespace) -> int:
    """Record and draw; 130 for Ctrl-C, with nothing written."""
    from lowp.errors import InvalidInput, UnknownName, unknown
    from lowp.recipes import results
    from lowp.recipes.training import Settings
    from lowp.report import plots

    if arguments.list:
        width = max(map(len, FIGURES))
        print("\n".join(f"{name:<{width}}  {figure.summary}" for name, figure in FIGURES.items()))
        return 0
    if arguments.name not in FIGURES:
        raise UnknownName(unknown("figure", arguments.name, FIGURES))
    figure = FIGURES[arguments.name]
    steps = figure.steps if arguments.steps is None else arguments.steps
    if steps < 1:
        raise InvalidInput(f"--steps {steps}: give 1 or more")
    out = arguments.out or Path(f"figure-{arguments.name}.png")
    numbers = out.with_suffix(".json")
    plots.check_suffix(out)
    results.check_writable(out)
    results.check_writable(numbers)
    data = None if arguments.data is None else str(arguments.data)
    precision = arguments.precision or figure.precision
    settings = Settings(arguments.recipe, precision=precision, seed=arguments.seed, data=data).filled()
    with Interrupts() as interrupts:
        document = _named(figure.record)(settings, steps, arguments.layer, interrupts)
    if interrupts():
        return interrupts.exit_code
    results.write(numbers, document)
    if not plots.can_plot():
        print(f"written: {numbers}; no picture: {plots.NO_MATPLOTLIB}")
        return 0
    _named(figure.draw)(document, out)
    print(f"written: {numbers}, {out}")
    return 0


def _named(spelled: str) -> Callable[..., Any]:
    from importlib import import_module

    module, _, name = spelled.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
