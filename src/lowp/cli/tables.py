"""Text for the terminal: columns that fit its width, and colours on a terminal. rich is loaded for colours only."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

FALLBACK_WIDTH = 80

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


def width() -> int:
    """Return the number of columns: COLUMNS, else the terminal's, else 80 (a pipe, a file)."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns
    return FALLBACK_WIDTH


def can_show(characters: str) -> bool:
    """Return whether the encoding of standard output has these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def is_coloured(plain: bool = False) -> bool:
    """Return whether to use colours: on a terminal that has them, without --plain and NO_COLOR (no-color.org)."""
    return not plain and sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"


def show(text: str, plain: bool = False) -> None:
    """Print text, with coloured headings, labels and bit fields on a terminal, and without escape codes otherwise."""
    if not can_show(text):
        text = text.encode("ascii", "replace").decode()
    if not is_coloured(plain):
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    for pattern in _HIGHLIGHTS:
        for match in re.finditer(pattern, text):
            for name, value in match.groupdict().items():
                if value is not None:
                    styled.stylize(STYLES[name], *match.span(name))
    Console(highlight=False).print(styled, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 seed, 2 seeds."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], limit: int, left: Sequence[int] = (0,)) -> str:
    """Return a table as text: columns aligned right, those in `left` aligned left, separated by two blanks.

    A table wider than `limit` becomes several tables below each other, each starting with the first column.
    """
    widths = [max(len(row[index]) for row in (heads, *rows)) for index in range(len(heads))]
    groups: list[list[int]] = [[0]]
    for index in range(1, len(heads)):
        used = sum(widths[i] + 2 for i in groups[-1])
        if used + widths[index] > limit and len(groups[-1]) > 1:
            groups.append([0])
        groups[-1].append(index)
    return "\n\n".join(_group(heads, rows, group, widths, left) for group in groups)


def _group(
    heads: Sequence[str], rows: Sequence[Sequence[str]], group: list[int], widths: list[int], left: Sequence[int]
) -> str:
    def text(row: Sequence[str]) -> str:
        cells = (row[i].ljust(widths[i]) if i in left else row[i].rjust(widths[i]) for i in group)
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * widths[i] for i in group)
    # rows are not indented: grep ^name finds a name in the first column
    return "\n".join([text(heads), rule, *(text(row) for row in rows)])
