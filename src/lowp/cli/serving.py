"""`lowp compare --inference` and `--mismatch`: one model evaluated in several formats, and its log-probabilities."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli import EXIT_INTERRUPTED
from lowp.cli.interrupts import Interrupts
from lowp.cli.options import TRAINING, filled, given, split_list
from lowp.cli.output import print_json, print_table, say
from lowp.errors import InvalidInput, counted
from lowp.recipes import RECIPES, get

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from lowp.recipes.recipe import Data
    from lowp.recipes.training import Settings


def run(arguments: argparse.Namespace) -> int:
    """Train, evaluate, print a table and write all numbers; return 130 after Ctrl-C, with the finished rows written."""
    from lowp.recipes import results
    from lowp.recipes.serving import Serving
    from lowp.recipes.training import threads_of
    from lowp.report.terminal import Bar

    out = arguments.out or Path(f"inference-{get(arguments.recipe).name}.json")
    results.check_writable(out)
    settings = filled(given(TRAINING, arguments))
    serving = Serving(settings, split_list(arguments.inference, "--inference"), arguments.recover)
    epochs = (serving.settings.epochs or 1) * serving.trainings
    with (
        Interrupts(lambda: "stopped within a step: nothing was written") as interrupts,
        threads_of(get(arguments.recipe).threads),
        Bar(serving.settings.recipe, epochs, "epochs") as bar,
    ):
        for row in serving.run(lambda title: bar.advance(1, title), interrupts):
            bar.line(f"{len(serving.rows)}/{len(serving.formats)}  {row['format']}")
    if not serving.rows:
        return EXIT_INTERRUPTED
    document = serving.document()
    results.write(out, document)
    if arguments.json:
        print_json(document)
    else:
        _print(document)
        print(f"written: {out}")
    return 0 if document["complete"] else EXIT_INTERRUPTED


def _print(document: Mapping[str, Any]) -> None:
    from lowp.report.terminal import console

    _print_rows(document["recipe"], document["rows"])
    lines = []
    for row in document["rows"]:
        for name, why in row.get("unquantized", {}).items():
            lines.append(f"{row['format']}: {name} stays as it was: {why}.")
        if "failure" in row:
            lines.append(f"{row['format']}: {row['failure']}.")
    lines += [f"{name}: {text}." for name, text in document["methods"].items()]
    lines.append(f"{document['machine']['words']}.")
    screen = console()
    screen.print("\n".join(textwrap.fill(line, screen.width, subsequent_indent="  ") for line in lines), markup=False)


def _print_rows(recipe: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    from lowp.report.tables import bytes_of, number, points, seconds

    metric, share = recipe["metric"], recipe["metric_is_share"]
    recovered = any("trained" in row for row in rows)
    columns = ["format", metric, "to fp32", *["trained\nin it"] * recovered, "bytes", "time", "energy"]
    cells, base = [], rows[0]
    for row in rows:
        if "failure" in row:
            cells.append([row["format"], "failed", *["-"] * (len(columns) - 2)])
            continue
        value = row["numbers"][metric]
        trained = row.get("trained", {}).get(metric)
        measured = {"bytes": bytes_of(row["bytes"]), "seconds": seconds(row["seconds"])}
        measured["energy"] = f"{row['energy'] / 1e6:.3g} µJ"
        metrics = [number(value, share), points(value - base["numbers"][metric], share)]
        costs = [f"{shown} ({row[name] / base[name]:.2f}x)" for name, shown in measured.items()]
        cells.append([row["format"], *metrics, *[number(trained, share)] * recovered, *costs])
    print_table(f"{recipe['name']}: served in other formats", columns, cells)


SUFFIXES = (".safetensors", ".json", ".pt", ".pth", ".bin", ".ckpt")


def is_file(name: str) -> bool:
    """Whether a name stands for a file of weights, and not for a recipe."""
    return name not in RECIPES and (Path(name).suffix in SUFFIXES or Path(name).exists())


# -- mismatch ----------------------------------------------------------------------------------------------------------
def run_mismatch(arguments: argparse.Namespace) -> int:
    """Read or train a model, compare, print a table; return 130 after Ctrl-C."""
    from dataclasses import asdict

    from lowp import presets
    from lowp.inference.mismatch import served_format
    from lowp.recipes import results
    from lowp.recipes import serving as mismatching
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
        _print_mismatch(document)
    return 0


def _trained(arguments: argparse.Namespace, precision: str) -> tuple[Settings, nn.Module, Data] | int:
    """Train the recipe with a progress bar; return the exit code after Ctrl-C."""
    from lowp.recipes.runs import Paced
    from lowp.recipes.training import Training, threads_of
    from lowp.report.terminal import Bar

    training = Training(filled({**given(TRAINING, arguments), "precision": precision}))
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


def _print_mismatch(document: dict[str, Any]) -> None:
    columns = ["served in", "mean\n|Δ log p|", "largest\n|Δ log p|", "mean KL", "largest\nKL", "argmax\nchanged"]
    title = f"{document['recipe']['name']}: served, beside training in {document['training']}"
    rows, notes = [], []
    for row in document["rows"]:
        if row["failure"] is not None:
            rows.append([row["format"], *["-"] * 5, ""])
            notes.append(f"{row['format']}: {row['failure']}")
            continue
        numbers = [f"{row[name]:.2g}" for name in ("mean", "largest", "kl", "largest_kl")]
        layers = ", ".join(f"{one['layer']} ({one['kl']:.1g})" for one in row["layers"])
        rows.append([row["format"], *numbers, f"{row['changed']:.2%}", layers])
        notes += [f"{row['format']}: {name} stays as it was: {why}" for name, why in row["kept"].items()]
    print_table(title, [*columns, "most by (KL, alone)"], rows, left=("most by (KL, alone)",))
    tokens = max((row["tokens"] for row in document["rows"]), default=0)
    print(
        f"{tokens:,} predictions of the validation set, in nats. mean: of a class drawn from training's "
        "probabilities;\nlargest: of any class at least 1 % as probable as the most probable one."
    )
    for note in notes:
        print(note)
