"""Output: text with colours on a terminal, JSON, lines about the work, and where pictures and numbers are written.

rich is loaded on a terminal only.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lowp.report import can_show, plots

# Coloured parts, the first match wins: patterns with named groups, which STYLES maps to rich styles.
_HIGHLIGHTS = (
    r"(?m)^(?P<heading>\S.*)$",
    r"(?P<sign>(?<![\d.+|-])[01]) (?P<exponent>[01]{2,11}) (?P<mantissa>[01]+)(?![\d.])",
    r"(?m)^ {2}(?P<label>[A-Za-z].{0,10}?) +(?=\S)",
    r"(?P<bad>\bLOST|DISTORTED|OVERFLOW\b)",
    r"(?P<good>\bKEPT(?: ON AVERAGE)?\b)",
)
STYLES = {
    "heading": "bold",
    "sign": "red",
    "exponent": "green",
    "mantissa": "cyan",
    "label": "dim",
    "bad": "bold red",
    "good": "bold green",
}


@contextmanager
def colours(plain: bool) -> Iterator[None]:
    """Print without colours inside, in child processes too, if `plain` is true."""
    before = os.environ.get("NO_COLOR")
    if plain:
        os.environ["NO_COLOR"] = "1"
    try:
        yield
    finally:
        if plain and before is None:
            del os.environ["NO_COLOR"]
        elif plain and before is not None:
            os.environ["NO_COLOR"] = before


def print_json(document: object) -> None:
    """Print data as strict JSON; infinities and NaNs are null."""
    from lowp.files import json_text

    print(json_text(document), end="")


def print_table(
    title: str | None,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Print a table, or its rows as JSON by the names of the columns; `left`: further columns that are aligned left."""
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from rich.markup import escape

    from lowp.report.terminal import console, plain_table, show

    table = plain_table(title, columns, left)
    for row in rows:
        table.add_row(*map(escape, row))
    show(console(), table)


def say(text: str) -> None:
    """Print a line about the work itself to stderr."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print text, with coloured headings, labels and bit fields on a terminal, and without escape codes otherwise."""
    if not can_show(text):
        text = text.encode("ascii", "replace").decode()
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.text import Text
    from rich.theme import Theme

    from lowp.report.terminal import console

    styled, screen = Text(text), console()
    for pattern in _HIGHLIGHTS:
        styled.highlight_regex(pattern)
    with screen.use_theme(Theme(STYLES)):
        screen.print(styled, soft_wrap=True)


def picture_path(plot: Path | None, out: Path) -> Path:
    """Return the picture's path, after a check that it and the JSON file can be written.

    Prints to stderr if there will be no picture. Raises InvalidInput for other suffixes.
    """
    from lowp.recipes import results

    plot = plot or out.with_suffix(".png")
    plots.check_suffix(plot)
    results.check_writable(out)
    results.check_writable(plot)
    if not plots.can_plot():
        say(f"there will be no picture: {plots.NO_MATPLOTLIB}")
    return plot


def written_line(out: Path, plot: Path) -> str:
    """Return the last line of a command: the files written."""
    return f"written: {out}, {plot}" if plots.can_plot() else f"written: {out}; no picture: {plots.NO_MATPLOTLIB}"
