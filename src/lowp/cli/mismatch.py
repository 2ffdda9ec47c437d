"""`lowp compare --mismatch`: log-probabilities of a model in training beside those of formats that serve it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli import run_options
from lowp.cli.interrupts import Interrupts
from lowp.cli.lists import split_list
from lowp.cli.output import counted, print_json, say

if TYPE_CHECKING:
    from torch import nn

    from lowp.recipes.recipe import Data
    from lowp.recipes.training import Settings

SUFFIXES = (".safetensors", ".json", ".pt", ".pth", ".bin", ".ckpt")


def is_file(name: str) -> bool:
    """Whether a name stands for a file of weights, and not for a recipe."""
    from lowp.recipes import RECIPES

    return name not in RECIPES and (Path(name).suffix in SUFFIXES or Path(name).exists())


def run(arguments: argparse.Namespace) -> int:
    """Read or train a model, compare, print a table; return 130 after Ctrl-C."""
    from dataclasses import asdict

    from lowp import presets
    from lowp.errors import InvalidInput
    from lowp.inference.mismatch import served_format
    from lowp.recipes import get, mismatching, results
    from lowp.recipes.training import threads_of

    formats = split_list(arguments.mismatch, "--mismatch")
    training = arguments.precision or "fp32"
    presets.parse(training)  # a single one
    for format in formats:
        served_format(format)
    if arguments.out is not None:
        results.check_writable(arguments.out)
    data: Data | None = None
    if is_file(arguments.recipe):
        if arguments.epochs is not None or arguments.lr is not None:
            raise InvalidInput(f"{arguments.recipe} is trained: omit --epochs and --lr, or name a recipe to be trained")
        settings, model = mismatching.read_model(Path(arguments.recipe), arguments.of_recipe, arguments.size)
    else:
        mismatching.check(get(arguments.recipe))
        trained = _trained(arguments, training)
        if isinstance(trained, int):
            return trained
        settings, model, data = trained
    with threads_of(get(settings.recipe).threads):
        found, data = mismatching.compared(settings, model, formats, training, data)
    document = {
        **results.header("mismatch", results.command_line()),
        "recipe": results.recipe_head(get(settings.recipe), data, settings.size),
        "settings": asdict(settings),
        **found.document(),
    }
    if arguments.out is not None:
        results.write(arguments.out, document)
    if arguments.json:
        print_json(document)
    else:
        _print(document)
    return 0


def _trained(arguments: argparse.Namespace, precision: str) -> tuple[Settings, nn.Module, Data] | int:
    """Train the recipe with a progress bar; return the exit code after Ctrl-C."""
    from lowp.errors import InvalidInput
    from lowp.recipes.runs import Paced
    from lowp.recipes.training import Training, threads_of
    from lowp.report.progress import Bar

    training = Training(run_options.filled({**run_options.given(arguments), "precision": precision}))
    with (
        Interrupts(lambda: "stopped within a step: nothing was written") as interrupts,
        threads_of(training.recipe.threads),
        Bar(training.recipe.name, training.epochs, "epochs") as bar,
    ):
        moved = Paced(lambda training: bar.move(training.progress * training.epochs))
        if not training.run(lambda training: bar.move(training.epoch), interrupts, on_step=moved):
            return interrupts.exit_code
    if training.failure is not None:
        raise InvalidInput(f"{training.recipe.name} in {precision} failed: {training.failure}")
    say(f"{training.recipe.name} is trained in {precision}, {counted(training.epochs, 'epoch')}")
    return training.settings, training.model, training.data


def _print(document: dict[str, Any]) -> None:
    from rich.markup import escape

    from lowp.report import terminal

    columns = ["served in", "mean\n|Δ log p|", "largest\n|Δ log p|", "mean KL", "largest\nKL", "argmax\nchanged"]
    title = f"{document['recipe']['name']}: served, beside training in {document['training']}"
    table = terminal.plain_table(title, [*columns, "most by (KL, alone)"], left=("most by (KL, alone)",))
    notes = []
    for row in document["rows"]:
        if row["failure"] is not None:
            table.add_row(escape(row["format"]), *["-"] * 5, "")
            notes.append(f"{row['format']}: {row['failure']}")
            continue
        numbers = [f"{row[name]:.2g}" for name in ("mean", "largest", "kl", "largest_kl")]
        layers = ", ".join(f"{one['layer']} ({one['kl']:.1g})" for one in row["layers"])
        table.add_row(escape(row["format"]), *numbers, f"{row['changed']:.2%}", escape(layers))
        notes += [f"{row['format']}: {name} stays as it was: {why}" for name, why in row["kept"].items()]
    terminal.show(terminal.console(), table)
    tokens = max((row["tokens"] for row in document["rows"]), default=0)
    print(
        f"{tokens:,} predictions of the validation set, in nats. mean: of a class drawn from training's "
        "probabilities;\nlargest: of any class at least 1 % as probable as the most probable one."
    )
    for note in notes:
        print(note)
