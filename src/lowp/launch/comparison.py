"""One script in several precisions, each in a folder of its own: last lines, times and differences side by side."""

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowp.errors import InvalidInput
from lowp.launch.record import RUN
from lowp.monitoring.alarms import alarm_of

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\bnan\b|[-+]?\binf\b")

_SHOWN = 160  # characters of a last line
_LOOK = 0.1  # seconds between two checks of `stop`
_GRACE = 0.5  # seconds to exit after Ctrl-C, and again after SIGTERM


@dataclass(frozen=True)
class RunOutcome:
    """How one run of the script ended.

    `notes` are lowp's sentences on the parts that did not run in the precision, and the alarms of a monitor.
    """

    precision: str
    code: int
    seconds: float
    last_line: str
    steps: int
    skipped: int
    writes: int
    saturated: int
    notes: tuple[str, ...]


class Runs:
    """Runs of one script, one after the other, each in a folder of its own.

    Relative paths that a run writes remain in its folder, in `folder`, which is named lowp-compare.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.folder = new_folder(Path.cwd(), NAME)
        self.outcomes: list[RunOutcome] = []
        self._command = [command[0], *(from_above(argument, Path.cwd()) for argument in command[1:])]

    def add(self, precision: str, environment: Mapping[str, str], stop: Callable[[], bool]) -> RunOutcome:
        """Run the script in an environment; end it when `stop()` becomes true."""
        self.outcomes.append(_once(precision, self._command, environment, self.folder, stop))
        return self.outcomes[-1]

    @property
    def base(self) -> RunOutcome:
        """The run that the others are compared with: that in fp32, or else the first."""
        return next((one for one in self.outcomes if one.precision == "fp32"), self.outcomes[0])

    def apart(self, one: RunOutcome) -> str:
        """Return how the last line of a run differs from that of `base`; "" for that run itself."""
        return "" if one is self.base else "failed" if one.code else difference(one.last_line, self.base.last_line)

    def document(self) -> dict[str, Any]:
        """Return plain data."""
        runs = [{**asdict(one), "difference": self.apart(one) or None} for one in self.outcomes]
        return {"base": self.base.precision, "runs": runs, "folder": str(self.folder)}


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
            command, cwd=workplace.folder, env=given, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            code = waited(process, stop)
        finally:
            workplace.leave()
    seconds = time.monotonic() - started
    summary = _summary(directory, precision)
    printed = out.read_text(errors="replace").splitlines()
    lines = [line for line in printed if line.strip() and not line.startswith("lowp monitor")]
    alarms = (f"alarm: {alarm_of(one)}" for one in summary.get("alarms", ()))
    last = lines[-1].strip()[:_SHOWN] if lines else ""
    steps, skipped, writes, saturated = (summary.get(name, 0) for name in ("steps", "skipped", "writes", "saturated"))
    notes = tuple(filter(None, [*summary.get("notes", ()), summary.get("stood_down", ""), *alarms]))
    return RunOutcome(precision, code, seconds, last, steps, skipped, writes, saturated, notes)


def waited(process: subprocess.Popen[bytes], stop: Callable[[], bool], grace: float = _GRACE) -> int:
    """Return a process's exit code; end the process when `stop()` becomes true, and whatever is raised here.

    Ctrl-C in a terminal reaches the process too, so the process gets `grace` seconds to exit by itself, and again after
    SIGTERM.
    """
    try:
        while not stop():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK)
        for end in (process.terminate, process.kill):
            try:
                return process.wait(grace)
            except subprocess.TimeoutExpired:
                end()
        return process.wait()
    finally:
        process.kill()
        process.wait()


def _summary(directory: str, precision: str) -> dict[str, Any]:
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


NAME = "lowp-compare"  # the folder with those of all runs
_COPIED = 256 << 20  # bytes of files that a run may overwrite in its folder; larger ones are links
_COPIED_FILES = 10_000


def new_folder(base: Path, name: str) -> Path:
    """Make a folder of a name in `base`, or the first free one of name-2, name-3 …"""
    number = 1
    while True:
        folder = base / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InvalidInput(f"the runs work in a folder in {base}, which cannot be made: {error.strerror}") from None


def from_above(argument: str, base: Path) -> str:
    """Return an argument of a script with a path above its folder, as ``--data=../data``, made absolute."""
    name, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    is_above = value.startswith("..") and (base / value).exists()
    return f"{name}{equals}{(base / value).resolve()}" if is_above else argument


# -- a folder of its own for each run ----------------------------------------------------------------------------------
class Workplace:
    """The folder in which one run works, made from the folder in which the command was given.

    Files are copies, so that a script may overwrite them: the smallest first, to 256 MiB and 10,000 files in all.
    Larger files, hidden folders and what is more are links to the originals. Earlier comparisons are not in it.
    """

    def __init__(self, folder: Path, origin: Path) -> None:
        self.folder = folder
        self._given: dict[Path, tuple[int, int] | None] = {}  # size and time of each copy; None for a link
        files = list[tuple[int, Path, Path]]()
        todo = deque([(origin, folder)])
        while todo:
            here, there = todo.popleft()
            for entry in os.scandir(here):
                path, to = Path(entry.path), there / entry.name
                if here == origin and entry.name.startswith(NAME):
                    continue
                is_folder = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                if is_folder and len(files) < _COPIED_FILES:
                    to.mkdir()
                    todo.append((path, to))
                elif entry.is_file(follow_symlinks=False):
                    files.append((entry.stat().st_size, path, to))
                else:
                    self._link(path, to)
        self._take(sorted(files))

    def _take(self, files: list[tuple[int, Path, Path]]) -> None:
        copied = 0
        for number, (size, path, to) in enumerate(files):
            copied += size
            if copied <= _COPIED and number < _COPIED_FILES:
                with suppress(OSError):  # unreadable here, as it is there
                    shutil.copy2(path, to)
                    self._given[to] = _state(to)
                    continue
            self._link(path, to)

    def _link(self, path: Path, to: Path) -> None:
        to.symlink_to(path)
        self._given[to] = None

    def leave(self) -> None:
        """Remove what the run was given and has not changed: what it has written remains, if anything."""
        for path, state in self._given.items():
            if path.is_symlink() if state is None else path.is_file() and _state(path) == state:
                path.unlink()
        for here, _, _ in os.walk(self.folder, topdown=False):
            if not os.listdir(here):
                os.rmdir(here)


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
