"""`lowp compare --inference`: trains one model and evaluates it in several formats."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowp.cli import EXIT_INTERRUPTED, run_options
from lowp.cli.interrupts import Interrupts
from lowp.cli.output import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table


def run(arguments: argparse.Namespace) -> int:
    """Train, evaluate, print a table and write all numbers; return 130 after Ctrl-C, with the finished rows written."""
    from lowp.cli.lists import split_list
    from lowp.recipes import get, results
    from lowp.recipes.serving import Serving
    from lowp.recipes.training import threads_of
    from lowp.report.progress import Bar

    out = arguments.out or Path(f"inference-{get(arguments.recipe).name}.json")
    results.check_writable(out)
    named = run_options.given(arguments)
    serving = Serving(run_options.filled(named), split_list(arguments.inference, "--inference"), arguments.recover)
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
    from lowp.report import terminal

    console = terminal.console()
    terminal.show(console, _table(document))
    lines = []
    for row in document["rows"]:
        for name, why in row.get("unquantized", {}).items():
            lines.append(f"{row['format']}: {name} stays as it was: {why}.")
        if "failure" in row:
            lines.append(f"{row['format']}: {row['failure']}.")
    lines += [f"{name}: {text}." for name, text in document["methods"].items()]
    lines.append(f"{document['machine']['words']}.")
    console.print("\n".join(textwrap.fill(line, console.width, subsequent_indent="  ") for line in lines), markup=False)


def _table(document: Mapping[str, Any]) -> Table:
    from lowp.report.tables import bytes_of, number, points, seconds
    from lowp.report.terminal import plain_table

    recipe, rows = document["recipe"], document["rows"]
    metric, share = recipe["metric"], recipe["metric_is_share"]
    recovered = any("trained" in row for row in rows)
    columns = ["format", metric, "to fp32", *["trained\nin it"] * recovered, "bytes", "time", "energy"]
    table = plain_table(f"{recipe['name']}: served in other formats", columns)
    base = rows[0]
    for row in rows:
        if "failure" in row:
            table.add_row(row["format"], "failed", *["-"] * (len(columns) - 2))
            continue
        value = row["numbers"][metric]
        trained = row.get("trained", {}).get(metric)
        table.add_row(
            row["format"],
            number(value, share),
            points(value - base["numbers"][metric], share),
            *[number(trained, share)] * recovered,
            f"{bytes_of(row['bytes'])} ({row['bytes'] / base['bytes']:.2f}x)",
            f"{seconds(row['seconds'])} ({row['seconds'] / base['seconds']:.2f}x)",
            f"{row['energy'] / 1e6:.3g} µJ ({row['energy'] / base['energy']:.2f}x)",
        )
    return table
