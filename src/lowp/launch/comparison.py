"""One script in several precisions: last line of output and how long it took, side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowp.launch.settings import RUN

__all__ = ["RunOutcome", "run", "waited"]

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
    skipped: int | None
    loss_scale: float | None
    notes: tuple[str, ...]


def run(
    command: Sequence[str],
    environments: Sequence[tuple[str, Mapping[str, str]]],
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Run the script once per environment, one after the other, and print a table. Return 0 if every run returned 0.

    The whole output of each run is kept in a folder whose name is printed at the end. When `stop()` becomes true, the
    current run is ended and the table has the runs so far.
    """
    folder = Path(tempfile.mkdtemp(prefix="lowp-compare-"))
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
    print(f"complete outputs: {folder}", file=sys.stderr)
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


def _once(
    precision: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, stop: Callable[[], bool]
) -> RunOutcome:
    out, report = folder / f"{precision.replace(os.sep, '-')}.txt", folder / "report.json"
    report.unlink(missing_ok=True)
    settings = json.loads(environment[RUN])
    directory = settings["directory"]
    started = time.monotonic()
    with out.open("wb") as file:
        # the leader is the script's process, whose number is not known before it runs
        given = {**environment, RUN: json.dumps({**settings, "leader": 0, "started": time.time()})}
        process = subprocess.Popen(command, env=given, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            code = waited(process, stop)
        finally:
            process.kill()
            process.wait()
    seconds = time.monotonic() - started
    summary = _summary(directory, precision)
    lines = [line for line in out.read_text(errors="replace").splitlines() if line.strip()]
    return RunOutcome(
        precision,
        code,
        seconds,
        lines[-1].strip()[:_SHOWN] if lines else "",
        summary.get("skipped"),
        summary.get("loss_scale"),
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


def _table(outcomes: Sequence[RunOutcome]) -> Table:
    table = Table()
    for name, justify in (("precision", "left"), ("exit", "right"), ("time", "right"), ("skipped", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("last line of output", overflow="fold")
    for one in outcomes:
        skipped = "" if one.skipped is None else str(one.skipped)
        table.add_row(one.precision, str(one.code), f"{one.seconds:.1f} s", skipped, one.last_line)
    return table
