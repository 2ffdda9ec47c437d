"""The terminal: consoles, their colours and width, the one style of tables, and progress bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

WIDTH = 110  # of what is no terminal
_LEAST_WIDTH = 40
_LEAST_WORDS = 24  # characters to which a column of words may be wrapped before it moves below
_WORDS = ("verdict", "what", "size", "data", "training", "last line", "difference")


class _Console(Console):
    """A console of rich that leaves a broken pipe to `lowp`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: TextIO | None = None) -> Console:
    """Return a console on a stream, by default stdout; its width is COLUMNS, else the terminal's, else 110.

    It has colours on a terminal that has them, without --plain and NO_COLOR (no-color.org).
    """
    stream = sys.stdout if stream is None else stream
    has_colours = stream.isatty() and not os.environ.get("NO_COLOR")  # on a dumb terminal rich has none
    result = _Console(file=stream, highlight=False, color_system="auto" if has_colours else None)
    if not result.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        result.width = WIDTH
    result.width = max(result.width, _LEAST_WIDTH)
    return result


def show(console: Console, table: Table) -> None:
    """Print a table; one wider than the console is split into several, each with the first column.

    An empty line follows each part. Lines begin with the first column, so that `grep ^name` finds a row.
    """
    for part in _parts(console, table):
        with console.capture() as capture:
            console.print(part)
        lines = (line.rstrip() for line in capture.get().splitlines())
        console.file.write("\n".join([*lines, "", ""]))


def _parts(console: Console, table: Table) -> Iterator[Table]:
    options = console.options.update(width=10**6)  # otherwise the measured width would be cut to the console's
    columns = [0]
    for index in range(1, len(table.columns)):
        width = console.measure(_of_columns(table, [*columns, index], _LEAST_WORDS), options=options).maximum
        if width > console.width and len(columns) > 1:
            yield _of_columns(table, columns)
            columns = [0]
        columns.append(index)
    yield _of_columns(table, columns)


def _of_columns(table: Table, indices: Sequence[int], words: int | None = None) -> Table:
    """Return a table of some columns of another, the first with the title; `words`: the most of a column of words."""
    is_first = 1 in indices or len(table.columns) == 1
    part = plain_table(table.title if is_first else None, ())  # type: ignore[arg-type]
    for index in indices:
        column = table.columns[index]
        most = None if column.no_wrap else words
        part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, max_width=most)
    cells = [list(table.columns[index].cells) for index in indices]
    for row, style in zip(zip(*cells, strict=True), [row.style for row in table.rows], strict=True):
        part.add_row(*row, style=style)
    return part


def plain_table(title: str | None, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Return a table without frames; the first column, those in `left` and columns of words are aligned left."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for index, name in enumerate(columns):
        is_left = index == 0 or name in (*left, *_WORDS)
        table.add_column(name, justify="left" if is_left else "right", no_wrap=name not in _WORDS)
    return table


# -- progress ----------------------------------------------------------------------------------------------------------
class Bar:
    """``with Bar("comparing", total=60, unit="epochs") as bar``: `advance` moves the bar, `line` prints a line."""

    def __init__(self, title: str, total: int, unit: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_live = self._stream.isatty()  # elsewhere there is no bar
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        where = console(self._stream)
        self._progress = Progress(*columns, *times, console=where, transient=True, disable=not self.is_live)
        self._task = self._progress.add_task(title, total=total)
        self._parts: dict[str, float] = {}

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_live:
            self._progress.stop()

    def advance(self, steps: int = 1, title: str | None = None) -> None:
        """Advance the bar, and optionally change its title."""
        self._progress.update(self._task, advance=steps, description=title)

    def move(self, done: float, title: str | None = None, *, total: float | None = None) -> None:
        """Move the bar to `done`, a fraction of a unit too, and optionally change its title or the total."""
        self._progress.update(self._task, completed=done, total=total, description=title)

    def move_part(self, name: str, done: float) -> None:
        """Say how much of one of several parts is done: the bar shows their sum, and this name."""
        self._parts[name] = done
        self.move(sum(self._parts.values()), name)

    def line(self, text: str) -> None:
        """Print a line, above the bar on a terminal."""
        if self.is_live:
            self._progress.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)
