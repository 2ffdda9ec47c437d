"""One script in several precisions, each in a folder of its own: last lines, times and differences side by side."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowp.launch.folders import NAME, Workplace, from_above, new_folder
from lowp.launch.settings import RUN

__all__ = ["RunOutcome", "difference", "run", "waited"]

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\bnan\b|[-+]?\binf\b")

_SHOWN = 160  # characters of a last line
_LOOK = 0.1  # seconds between two checks of `stop`
_GRACE = 0.5  # seconds to exit after Ctrl-C, and again after SIGTERM


@dataclass(frozen=True)
class RunOutcome:
    """How one run of the script ended. `notes` are lowp's sentences on the parts that did not run in the precision."""

    precision: str
    code: int
    seconds: float
    last_line: str
    steps: int
    skipped: int
    writes: int
    saturated: int
    notes: tuple[str, ...]


def run(
    command: Sequence[str],
    environments: Sequence[tuple[str, Mapping[str, str]]],
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Run the script once per environment, one after the other, and print a table. Return 0 if every run returned 0.

    The runs work in folders of their own, where relative paths that they write remain, in a folder lowp-compare whose
    name is printed at the end. When `stop()` becomes true, the current run is ended and the table has the runs so far.
    """
    folder = new_folder(Path.cwd(), NAME)
    command = [command[0], *(from_above(argument, Path.cwd()) for argument in command[1:])]
    console = Console(stderr=True)
    outcomes = []
    for precision, environment in environments:
        with console.status(f"{precision}: {' '.join(command[1:])}"):
            outcomes.append(_once(precision, command, environment, folder, stop))
        if stop():
            break
    Console().print(_table(outcomes))
    for outcome in outcomes:
        for note in outcome.notes:
            print(f"{outcome.precision}: {note}")
    print(f"complete outputs, and what the runs have written: {folder}", file=sys.stderr)
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


def _once(
    precision: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, stop: Callable[[], bool]
) -> RunOutcome:
    workplace = Workplace(new_folder(folder, precision.replace(os.sep, "-")), Path.cwd())
    out = folder / f"{workplace.folder.name}.txt"
    settings = json.loads(environment[RUN])
    directory = settings["directory"]
    started = time.monotonic()
    with out.open("wb") as file:
        # the leader is the script's process, whose number is not known before it runs
        given = {**environment, RUN: json.dumps({**settings, "leader": 0, "started": time.time()})}
        process = subprocess.Popen(
            command,
            cwd=workplace.folder,
            env=given,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            code = waited(process, stop)
        finally:
            process.kill()
            process.wait()
            workplace.leave()
    seconds = time.monotonic() - started
    summary = _summary(directory, precision)
    lines = [line for line in out.read_text(errors="replace").splitlines() if line.strip()]
    return RunOutcome(
        precision,
        code,
        seconds,
        lines[-1].strip()[:_SHOWN] if lines else "",
        summary.get("steps", 0),
        summary.get("skipped", 0),
        summary.get("writes", 0),
        summary.get("saturated", 0),
        tuple(filter(None, [*summary.get("notes", ()), summary.get("stood_down", "")])),
    )


def waited(process: subprocess.Popen[bytes], stop: Callable[[], bool], grace: float = _GRACE) -> int:
    """Return a process's exit code; end the process when `stop()` becomes true.

    Ctrl-C in a terminal reaches the process too, so the process gets `grace` seconds to exit by itself, and again after
    SIGTERM.
    """
    while not stop():
        try:
            return process.wait(_LOOK)
        except subprocess.TimeoutExpired:
            continue
    for end in (process.terminate, process.kill):
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            end()
    return process.wait()


def _summary(directory: str, precision: str) -> dict[str, Any]:
    from dataclasses import asdict

    from lowp.launch.record import gathered, merged

    try:
        found = gathered(directory)
        return asdict(merged(found, precision)) if found else {}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def difference(line: str, other: str) -> str:
    """Return how a last line differs from that of another run: the number that differs most, and by how much."""
    if line == other:
        return "the same line"
    found, expected = _NUMBER.findall(line), _NUMBER.findall(other)
    if not found or _NUMBER.sub("", line) != _NUMBER.sub("", other):
        return "other words"
    pairs = [(one, two) for one, two in zip(found, expected, strict=True) if one != two]
    far, one, two = max((_apart(float(one), float(two)), one, two) for one, two in pairs)
    share = f"{100 * far:.2g} % off" if math.isfinite(far) else "off"
    return f"{share}: {one} for {two}"


def _apart(one: float, other: float) -> float:
    far = abs(one - other) / abs(other) if other else math.inf
    return far if math.isfinite(far) else math.inf


def _table(outcomes: Sequence[RunOutcome]) -> Table:
    """Return a row for each run, compared with that in fp32, or else with the first."""
    base = next((one for one in outcomes if one.precision == "fp32"), outcomes[0])
    table = Table()
    for name in ("precision", "exit", "time", "skipped steps", "saturated tensors"):
        table.add_column(name, justify="left" if name == "precision" else "right", no_wrap=name == "precision")
    table.add_column("last line of output", overflow="fold")
    table.add_column(f"against {base.precision}", overflow="fold")
    for one in outcomes:
        skipped = f"{one.skipped} of {one.steps}" if one.steps else ""
        saturated = f"{one.saturated} of {one.writes}" if one.writes else ""
        apart = "" if one is base else "failed" if one.code else difference(one.last_line, base.last_line)
        table.add_row(one.precision, str(one.code), f"{one.seconds:.1f} s", skipped, saturated, one.last_line, apart)
    return table
