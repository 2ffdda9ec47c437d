"""List the number formats, show one in full, or draw the bits of several side by side.

  lowp formats
  lowp formats bf16
  lowp formats e5m7
  lowp formats --layout fp32 fp16 bf16 flex16+5

NAME is a format of the list or a spelled format: e5m7, e4m3b11fnuz, binary8p3se, i6s, e4m3fn@e8m0/32.
Energy and area are estimates from Horowitz, ISSCC 2014 (45 nm); ~ marks values that are not in its table.
"""

from __future__ import annotations

import argparse
import textwrap

from lowp.casts import NAMED, Cast, parse
from lowp.cli import format_facts, layouts
from lowp.cli.output import add_output_arguments, print_json, show
from lowp.errors import InvalidInput
from lowp.explain import as_json
from lowp.formats import FORMATS, Format, ScaledFormat

HEADS = ("format", "bits", "layout", "smallest", "normal", "maximum", "ulp at 1", "max error", "digits")
COST_HEADS = ("bytes", "multiplier", "energy")
NOTES = (
    "smallest: the smallest positive number (subnormal, if the format has such numbers); normal: the smallest with the",
    "full significand; max error: of rounding to nearest, relative for normal numbers. bytes: packed, including the",
    "element's part of a block scale. multiplier: area by the square of the significand, fp32 = 1. energy: of one",
    "multiplication, estimated from Horowitz, ISSCC 2014 (45 nm); ~ marks values interpolated or extrapolated by that",
    "square. Smallest and maximum include shared scales.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", nargs="*", help="formats to show in full, or to draw with --layout")
    parser.add_argument("--layout", action="store_true", help="draw the bits of the formats side by side")
    parser.add_argument("--markdown", action="store_true", help="print the list as a table in Markdown")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the formats, show some in full, or draw them."""
    casts = [parse(name) for name in arguments.name]
    given = [cast.format for cast in casts]
    if arguments.json and arguments.markdown:
        raise InvalidInput("--json cannot be combined with --markdown: give one of them")
    if arguments.layout:
        if arguments.json or arguments.markdown:
            raise InvalidInput("--layout cannot be combined with --json or --markdown: give one of them")
        show(layouts.draw(given or [FORMATS[name] for name in layouts.DEFAULT], _width()))
    elif arguments.json:
        print_json(as_json([format_facts.facts(format) for format in given or FORMATS.values()]))
    elif arguments.markdown:
        print(markdown(given or list(FORMATS.values())))
    elif casts:
        show("\n\n".join(_in_full(cast) for cast in casts))
    else:
        _list()
    return 0


def _cells(format: Format) -> list[str]:
    row, brief = format_facts.facts(format), format_facts.brief
    limits = row.limits
    return [
        row.name,
        str(row.bits),
        row.layout,
        brief(limits.smallest),
        brief(limits.smallest_normal),
        brief(limits.maximum),
        "by scale" if limits.ulp_at_1 is None else brief(limits.ulp_at_1),
        row.maximum_error,
        f"{row.decimal_digits:.1f}",
        f"{row.bytes:g}",
        f"{row.cost.relative_multiplier_area:.3g}",
        str(row.cost.multiply_energy),
    ]


def _list() -> None:
    from lowp.report import terminal

    screen = terminal.console()
    for is_scaled, title in ((False, "numbers with an exponent of their own"), (True, "numbers under a shared scale")):
        table = terminal.plain_table(title, [*HEADS, *COST_HEADS], left=("layout",))
        for format in FORMATS.values():
            if isinstance(format, ScaledFormat) == is_scaled:
                table.add_row(*_cells(format))
        terminal.show(screen, table)
    named = ", ".join(f"{name} = {cast}" for name, cast in NAMED.items())
    for text in (" ".join(NOTES), f"casts with a name: {named}"):
        print(textwrap.fill(text, min(screen.width, 120)))


def _width() -> int:
    from lowp.report.terminal import console

    return console().width


def markdown(formats: list[Format]) -> str:
    """Return the list as Markdown: that of docs/formats.md on the site."""
    heads = [*HEADS, *COST_HEADS, "source"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for format in formats:
        lines.append("| " + " | ".join([*_cells(format), format_facts.source(format)]) + " |")
    named = ", ".join(f"`{name}` is `{cast}`" for name, cast in NAMED.items())
    return "\n".join([*lines, "", *(note.replace("~", "`~`") for note in NOTES), "", f"Casts with a name: {named}."])


def _in_full(cast: Cast) -> str:
    format = cast.format
    heading = f"{format}" if str(cast) == str(format) else f"{format}, cast as {cast}"
    return "\n".join([heading, *format_facts.in_full(cast), "", layouts.draw([format], _width())])
