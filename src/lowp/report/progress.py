"""Progress of long work on stderr: a bar on a terminal, otherwise lines of text."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowp.report.terminal import console


class Bar:
    """``with Bar("comparing", total=60, unit="epochs") as bar``: `advance` moves the bar, `line` prints a line."""

    def __init__(self, title: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._progress: Progress | None = None
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
            self._progress = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console(self._stream), transient=True
            )
            self._task = self._progress.add_task(title, total=total)

    @property
    def is_live(self) -> bool:
        """Whether there is a bar, on a terminal."""
        return self._progress is not None

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, steps: int = 1, title: str | None = None) -> None:
        """Advance the bar, and optionally change its title."""
        if self._progress is not None:
            self._progress.update(self._task, advance=steps, description=title)

    def move(self, done: float, title: str | None = None, *, total: float | None = None) -> None:
        """Move the bar to `done`, a fraction of a unit too, and optionally change its title or the total."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, description=title)

    def line(self, text: str) -> None:
        """Print a line, above the bar on a terminal."""
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)
