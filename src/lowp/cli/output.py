"""Standard output: text with colours on a terminal, JSON, and the options that every command has for them.

rich is loaded on a terminal only.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --plain, which every command has that prints a table."""
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON, and nothing else")
    parser.add_argument("--plain", action="store_true", help="print without colours, as with NO_COLOR=1")


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


def say(text: str) -> None:
    """Print a line about the work itself to stderr."""
    print(text, file=sys.stderr, flush=True)


def can_show(characters: str) -> bool:
    """Return whether the encoding of standard output has these characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def show(text: str) -> None:
    """Print text, with coloured headings, labels and bit fields on a terminal, and without escape codes otherwise."""
    if not can_show(text):
        text = text.encode("ascii", "replace").decode()
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.text import Text

    from lowp.report.terminal import console

    styled = Text(text)
    for pattern in _HIGHLIGHTS:
        for match in re.finditer(pattern, text):
            for name, value in match.groupdict().items():
                if value is not None:
                    styled.stylize(STYLES[name], *match.span(name))
    console().print(styled, soft_wrap=True)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 seed, 2 seeds."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
