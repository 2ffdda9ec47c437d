"""Lists of items, done one after the other by a child process, each item with a limit of its own.

A device that has met an illegal access answers nothing more in the process that made it, a kernel may not end, and a
compiler may crash: each of them ends a child. What it had found is kept, the item that it was at is told with the
child's last words, and another child does the items that are left. Nothing but the standard library is needed here.

A child is a command that is given ``--report FILE --left SECONDS --done JSON`` and calls `work`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPENT = 3  # exit code of a child whose device does not answer any more
NO_TIME = "no time was left"
START_SECONDS = 120.0  # until a child has loaded torch and says what it is at; of the first, from a disk that is cold
GRACE_SECONDS = 10.0  # for a child whose time is up, to end by itself
_POLL = 0.05
_TAIL = 4000  # characters of what a child printed that are kept
_FRUITLESS = 2  # children one after the other that ended without an item

Result = dict[str, Any]
Found = Callable[[str, Result], None]


# -- in the child -----------------------------------------------------------------------------------------------------
@dataclass
class Task:
    """What a child is to do: `measure(item, places)` for each of the `items`, in this order, with so many to do.

    `limit(item, places)` returns the seconds after which the parent ends the child; the items in `first` are those
    without which none of the others can be done.
    """

    items: list[str]
    measure: Callable[[str, int], Result]
    limit: Callable[[str, int], float]
    is_healthy: Callable[[], bool] = lambda: True
    first: Collection[str] = ()


def work(task: Task, report: Path, done: Collection[str], left: Callable[[], float]) -> int:
    """Do the items that are not done, tell each in the report, and return the exit code of the child."""
    with report.open("a", encoding="utf-8") as file:

        def tell(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        todo = [name for name in task.items if name not in done]
        tell(items=task.items, first=list(task.first))
        for place, name in enumerate(todo):
            if left() <= 0:
                tell(item=name, result={"failure": NO_TIME})
                continue
            tell(begin=name, limit=task.limit(name, len(todo) - place))
            result = _guarded(task.measure, name, len(todo) - place)
            tell(item=name, result=result)
            if result.get("failure") is not None and (name in task.first or not task.is_healthy()):
                return SPENT
    return 0


def _guarded(measure: Callable[[str, int], Result], name: str, places: int) -> Result:
    """Measure; whatever ends an item, a compiler's error or a slip of the pen, leaves the others."""
    try:
        return {"failure": None, **measure(name, places)}
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


# -- in the parent ----------------------------------------------------------------------------------------------------
def supervise(command: Sequence[str], folder: Path, ends: float, found: Found) -> str | None:
    """Run children until every item is done or it is `ends` by time.monotonic(); return why they were given up, if so.

    `found` is called with each item and its result as soon as it is known.
    """
    told, fruitless, number, ending = _Told(found), 0, 0, NO_TIME
    while fruitless < _FRUITLESS and time.monotonic() < ends:
        before = len(told.done)
        ending = _child(command, folder, number, ends, told)
        number += 1
        if told.missing is not None:
            return f"without {told.missing!r} nothing else can be done"
        if told.items is not None and not told.left():
            return None
        fruitless = fruitless + 1 if len(told.done) == before else 0
    reason = NO_TIME if time.monotonic() >= ends else ending
    for name in told.left():
        told.result(name, {"failure": reason})
    return reason if told.items is None else None


class _Told:
    """What the children have told so far: what there is to do, what is done, and what one of them is at."""

    def __init__(self, found: Found) -> None:
        self.items: list[str] | None = None
        self.done: list[str] = []
        self.missing: str | None = None
        self._found, self._first = found, list[str]()
        self.start()

    def start(self) -> None:
        """Begin with another child."""
        self.under_way: str | None = None
        self.limit, self.since = START_SECONDS, time.monotonic()

    def left(self) -> list[str]:
        """Return what is not done."""
        return [name for name in self.items or () if name not in self.done]

    def line(self, line: dict[str, Any]) -> None:
        """Take a line of the report."""
        if "items" in line:
            self.items, self._first = line["items"], line["first"]
        elif "begin" in line:
            self.under_way, self.limit, self.since = line["begin"], line["limit"], time.monotonic()
        else:
            self.result(line["item"], line["result"])

    def result(self, name: str, result: Result) -> None:
        """Take the result of an item."""
        self.done.append(name)
        self.under_way, self.limit, self.since = None, START_SECONDS, time.monotonic()
        if result["failure"] is not None and name in self._first:
            self.missing = name
        self._found(name, result)


def _child(command: Sequence[str], folder: Path, number: int, ends: float, told: _Told) -> str:
    """Run a child to its end, and return in words what it was; an item that it was at ends with it."""
    report, log = folder / f"report-{number}", folder / f"log-{number}"
    report.touch()
    told.start()
    options = ["--report", str(report), "--left", str(ends - time.monotonic()), "--done", json.dumps(told.done)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            ending = _watched(process, report, ends, told)
        finally:
            _kill(process)
    printed = log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
    if told.under_way is not None:
        told.result(told.under_way, {"failure": ending, "printed": printed})
    return f"{ending}; it printed: {printed.strip() or 'nothing'}"


def _watched(process: subprocess.Popen[bytes], report: Path, ends: float, told: _Told) -> str:
    """Read the report until the child ends, or has taken longer than it may."""
    text = ""
    with report.open(encoding="utf-8") as file:
        while True:
            code = process.poll()  # asked before the report is read, so that nothing is written after it
            text += file.read()
            *lines, text = text.split("\n")
            for line in lines:
                told.line(json.loads(line))
            if code is not None:
                return _in_words(code)
            if time.monotonic() > ends + GRACE_SECONDS:
                return NO_TIME
            if time.monotonic() > told.since + told.limit:
                return f"ended after the {told.limit:.0f} s that it may take"
            time.sleep(_POLL)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"the process ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process was ended by signal {-code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a child, with whatever it has started; one that the device holds is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
