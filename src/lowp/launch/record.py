"""A run's settings in the environment, and its report: one line on standard error, and JSON if requested."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lowp import files
from lowp.errors import InvalidInput, LowpError, counted

PRECISION = "LOWP_PRECISION"
RUN = "LOWP_RUN"


@dataclass(frozen=True)
class RunSettings:
    """How the scripts of one `lowp run`, and the processes they start, train.

    Each process leaves its record in `directory` for process `leader`, which reports on all of them at its end. The
    first process that leaves a record creates the directory. Both are empty if the environment was set by hand; then
    each process that trained reports on itself.
    """

    precision: str
    loss_scale: str = ""
    strict: bool = False
    override: bool = False
    report: str = ""
    monitor: str | None = None  # the file of a monitor, "" for one without a file, None for none
    directory: str = ""
    leader: int = 0
    started: float = field(default_factory=time.time)

    @classmethod
    def from_environment(cls) -> RunSettings | None:
        """Return the settings of the environment, None if it has none. Raises InvalidInput if they are damaged."""
        precision, text = os.environ.get(PRECISION, "").strip(), os.environ.get(RUN, "")
        if not precision:
            return None
        try:
            given = json.loads(text) if text else {}
            return cls(**{**given, "precision": precision})
        except (ValueError, TypeError):
            raise InvalidInput(
                f"{RUN} is set by `lowp run` for the processes that it starts, and {text[:80]!r} was not set by it: "
                f"unset {RUN}; {PRECISION} sets the precision"
            ) from None

    def to_environment(self) -> dict[str, str]:
        """Return the two variables."""
        given = asdict(self)
        return {PRECISION: given.pop("precision"), RUN: json.dumps(given)}


def started_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process, and of those that it starts, in which Python begins with `boot`."""
    paths = [str(Path(__file__).resolve().parent / "site"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def check_script(script: Sequence[str], example: str) -> None:
    """Raise InvalidInput if there is no script, or if -m has no module; `example` has one."""
    if list(script) == ["-m"]:
        raise InvalidInput(f"-m needs the name of a module: {example}")
    if script[0] != "-m" and not os.path.exists(script[0]):
        raise InvalidInput(f"there is no script {script[0]!r} here ({os.getcwd()})")


# -- the report --------------------------------------------------------------------------------------------------------
VERSION = 1
_KIND = "lowp run"


@dataclass
class ProcessRecord:
    """What one process did. `notes` are sentences on the parts that did not run in the precision, in order.

    `writes` and `saturated` count tensors under shared exponents: all, and those of which a number did not fit.
    """

    precision: str
    rank: int = 0
    process: int = field(default_factory=os.getpid)
    calls: int = 0
    backward_passes: int = 0
    steps: int = 0
    skipped: int = 0
    writes: int = 0
    saturated: int = 0
    loss_scale: float | None = None
    scales: list[tuple[int, float]] = field(default_factory=list)
    stood_down: str = ""
    notes: list[str] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)  # of a monitor

    @property
    def has_content(self) -> bool:
        """Whether this process trained, ran a model, or has something to report."""
        return bool(self.calls or self.steps or self.backward_passes or self.notes or self.stood_down)

    def note(self, sentence: str) -> bool:
        """Add a sentence once. Return whether it is new."""
        if sentence in self.notes:
            return False
        self.notes.append(sentence)
        return True

    def take_back(self, sentence: str) -> None:
        """Remove a sentence that is no longer true."""
        if sentence in self.notes:
            self.notes.remove(sentence)

    def save(self, directory: str) -> None:
        """Write the record for the leader of the run."""
        os.makedirs(directory, mode=0o700, exist_ok=True)
        path = Path(directory) / f"{self.process}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def gathered(directory: str) -> list[ProcessRecord]:
    """Return the records of other processes, low ranks first; damaged ones are ignored."""
    found = []
    for path in Path(directory).glob("*.json"):
        try:
            found.append(ProcessRecord(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda record: (record.rank, record.process))


def merged(records: list[ProcessRecord], precision: str) -> ProcessRecord:
    """Return the record of the whole run: the counts of the process with the most steps, the notes of all."""
    whole = max(records, key=lambda record: (record.steps, -record.rank), default=ProcessRecord(precision))
    for record in records:
        for sentence in record.notes:
            whole.note(sentence)
        whole.stood_down = whole.stood_down or record.stood_down
    return whole


def line(record: ProcessRecord, seconds: float) -> str:
    """Return the line with which a run ends, followed by the sentences on parts that did not run in the precision."""
    if record.stood_down:
        parts = [f"disabled, {record.stood_down} (--override replaces it)"]
    else:
        parts = [record.precision, counted(record.steps, "optimizer step"), f"{record.skipped} skipped"]
        if record.saturated:
            parts.append(f"{record.saturated} of {record.writes} tensors saturated")
        if record.loss_scale is not None:
            parts.append(f"loss scale {record.loss_scale:g}")
    if record.alarms:
        parts.append(f"{len(record.alarms)} alarm{'s' * (len(record.alarms) > 1)}")
    parts.append(f"{seconds:.1f} s")
    return "\n".join([f"lowp run: {', '.join(parts)}", *(f"lowp run: {sentence}" for sentence in record.notes)])


def document(records: list[ProcessRecord], settings: RunSettings, seconds: float) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "kind": _KIND,
        "version": VERSION,
        "precision": settings.precision,
        "seconds": seconds,
        "command": sys.argv,
        "summary": asdict(merged(records, settings.precision)),
        "processes": [asdict(record) for record in records],
    }


def tell(records: list[ProcessRecord], settings: RunSettings) -> None:
    """Print the line, and write the report if requested."""
    seconds = time.time() - settings.started
    documented = document(records, settings, seconds)
    print(line(merged(records, settings.precision), seconds), file=sys.stderr, flush=True)
    if settings.report:
        try:
            files.write(Path(settings.report), json.dumps(documented, indent=1) + "\n")
        except LowpError as error:
            print(f"lowp run: the report was not written: {error}", file=sys.stderr)


def tell_of_run(own: list[ProcessRecord], settings: RunSettings) -> None:
    """Report on this process and on those that left records for it; remove the records."""
    tell([*own, *gathered(settings.directory)], settings)
    shutil.rmtree(settings.directory, ignore_errors=True)


def check_report(path: Path) -> None:
    """Raise InvalidInput if a report cannot be written, or would replace a file that is not a report."""
    files.check_target(
        path, lambda target: "" if files.json_object(target).get("kind") == _KIND else "a report of lowp run"
    )
