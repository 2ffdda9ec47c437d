"""List the number formats, show one in full, or draw the bits of several side by side.

  lowp formats
  lowp formats bf16
  lowp formats e5m7
  lowp formats --layout fp32 fp16 bf16 flex16+5

NAME is a format of the list or a spelled format: e5m7, e4m3b11fnuz, binary8p3se, i6s, e4m3fn@e8m0/32.
Energy and area are estimates from Horowitz, ISSCC 2014 (45 nm); ~ marks values that are not in its table.
"""

import argparse
import textwrap
from collections import namedtuple
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from lowp.casts import NAMED, parse
from lowp.cli import format_facts
from lowp.cli.format_facts import scope_words
from lowp.cli.options import OUTPUT, Option
from lowp.cli.output import print_json, print_table, show
from lowp.errors import InvalidInput
from lowp.explain import as_json
from lowp.explain.numbers import floor_log2
from lowp.formats import FORMATS, Format, IntFormat, PowerOfTwo, ScaledFormat
from lowp.report import can_show

HEADS = ("format", "bits", "layout", "smallest", "normal", "maximum", "ulp at 1", "max error", "digits")
COST_HEADS = ("bytes", "multiplier", "energy")
NOTES = (
    "smallest: the smallest positive number (subnormal, if the format has such numbers); normal: the smallest with the",
    "full significand; max error: of rounding to nearest, relative for normal numbers. bytes: packed, including the",
    "element's part of a block scale. multiplier: area by the square of the significand, fp32 = 1. energy: of one",
    "multiplication, estimated from Horowitz, ISSCC 2014 (45 nm); ~ marks values interpolated or extrapolated by that",
    "square. Smallest and maximum include shared scales.",
)


OPTIONS = (
    Option("name", "formats to show in full, or to draw with --layout", more={"nargs": "*"}),
    Option("--layout", "draw the bits of the formats side by side", kind=bool),
    Option("--markdown", "print the list as a table in Markdown", kind=bool),
    *OUTPUT,
)


def run(arguments: argparse.Namespace) -> int:
    """List the formats, show some in full, or draw them."""
    casts = [parse(name) for name in arguments.name]
    given = [cast.format for cast in casts]
    if arguments.json and arguments.markdown:
        raise InvalidInput("--json cannot be combined with --markdown: give one of them")
    if arguments.layout:
        if arguments.json or arguments.markdown:
            raise InvalidInput("--layout cannot be combined with --json or --markdown: give one of them")
        show(draw(given or [FORMATS[name] for name in DEFAULT], _width()))
    elif arguments.json:
        print_json(as_json([format_facts.facts(format) for format in given or FORMATS.values()]))
    elif arguments.markdown:
        print(markdown(given or list(FORMATS.values())))
    elif casts:
        parts = ["\n".join([*format_facts.in_full(cast), "", draw([cast.format], _width())]) for cast in casts]
        show("\n\n".join(parts))
    else:
        _list()
    return 0


def _cells(format: Format) -> list[str]:
    row, brief = format_facts.facts(format), format_facts.brief
    limits = row["limits"]
    return [
        row["name"],
        str(row["bits"]),
        row["layout"],
        brief(limits.smallest),
        brief(limits.smallest_normal),
        brief(limits.maximum),
        "by scale" if limits.ulp_at_1 is None else brief(limits.ulp_at_1),
        row["maximum_error"],
        f"{row['decimal_digits']:.1f}",
        f"{row['bytes']:g}",
        f"{row['cost'].relative_multiplier_area:.3g}",
        str(row["cost"].multiply_energy),
    ]


def _list() -> None:
    for is_scaled, title in ((False, "numbers with an exponent of their own"), (True, "numbers under a shared scale")):
        rows = (_cells(one) for one in FORMATS.values() if isinstance(one, ScaledFormat) == is_scaled)
        print_table(title, (*HEADS, *COST_HEADS), rows, left=("layout",))
    named = ", ".join(f"{name} = {cast}" for name, cast in NAMED.items())
    for text in (" ".join(NOTES), f"casts with a name: {named}"):
        print(textwrap.fill(text, min(_width(), 120)))


def _width() -> int:
    from lowp.report.terminal import console

    return console().width


def markdown(formats: list[Format]) -> str:
    """Return the list as Markdown: that of docs/formats.md on the site."""
    heads = [*HEADS, *COST_HEADS, "source"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join([*_cells(format), format_facts.source(format)]) + " |" for format in formats]
    named = ", ".join(f"`{name}` is `{cast}`" for name, cast in NAMED.items())
    return "\n".join([*lines, "", *(note.replace("~", "`~`") for note in NOTES), "", f"Casts with a name: {named}."])


DEFAULT = ("fp32", "tf32", "fp16", "bf16", "e5m2", "e4m3fn", "flex16+5")
_BOX = "┌─┬┐│└┴┘░█▒"


# the characters of a drawing: box corners and lines, and the shades of a range
Pens = namedtuple(
    "Pens", "top_left horizontal top top_right vertical bottom_left bottom bottom_right subnormal normal shared"
)


# -- drawings ----------------------------------------------------------------------------------------------------------
def draw(formats: Sequence[Format], width: int) -> str:
    """Draw boxes with one column per bit, aligned where exponents end and mantissas begin; then the ranges."""
    pens = Pens(*(_BOX if can_show(_BOX) else "+-++|+++.#:"))
    names = max(len(str(format)) for format in formats) + 2
    left = max(sum(1 + size for _, size in _fields(format)[0]) for format in formats)
    lines = ["bits: s sign, e exponent, m mantissa, i integer; one column per bit"]
    for format in formats:
        lines += _boxes(format, names, left, pens)
    lines += ["", *_ranges(formats, names, width, pens)]
    return "\n".join(line.rstrip() for line in lines)


def _fields(format: Format) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the fields left of the common edge, sign and exponent, and right of it, mantissa or the integer."""
    element = format.element if isinstance(format, ScaledFormat) else format
    if isinstance(element, IntFormat):
        return [("s", 1)], [(f"i{element.bits - 1}", element.bits - 1)] if element.bits > 1 else []
    left = [("s", 1)] * element.signed + [(f"e{element.exponent_bits}", element.exponent_bits)]
    return left, [(f"m{element.mantissa_bits}", element.mantissa_bits)] if element.mantissa_bits else []


def _boxes(format: Format, names: int, left: int, pens: Pens) -> list[str]:
    left_fields, right_fields = _fields(format)
    indent = names + left - sum(1 + size for _, size in left_fields)
    top, middle, bottom = _box(left_fields + right_fields, pens)
    middle = f"{format!s:<{names}}{' ' * (indent - names)}{middle}"
    top, bottom = " " * indent + top, " " * indent + bottom
    if not isinstance(format, ScaledFormat):
        return [top, f"{middle} = {format.bits}", bottom]
    scale, kind = format.scale, "2^e"
    if isinstance(scale, PowerOfTwo):
        scale_box = _box([(f"e{scale.bits}", scale.bits)], pens)
    else:
        scale_box, kind = _box([*chain(*_fields(scale))], pens), str(scale) if scale.mantissa_bits else kind
    words = f"{kind}, shared by {scope_words(format.scope)}"
    words += f", and {format.outer} for the tensor" if format.outer else ""
    return [
        f"{top}   {scale_box[0]}",
        f"{middle} x {scale_box[1]}",
        f"{bottom}   {scale_box[2]}",
        f"{' ' * names}{'':4}x {words}",
    ]


def _box(fields: list[tuple[str, int]], pens: Pens) -> tuple[str, str, str]:
    """Return the top, middle and bottom line; a label that does not fit loses its letter."""
    labels = [label if len(label) <= size else label[1:][:size] for label, size in fields]
    middle = pens.vertical + pens.vertical.join(
        label.center(size) for label, (_, size) in zip(labels, fields, strict=True)
    )
    lines = [pens.horizontal * size for _, size in fields]
    top = pens.top_left + pens.top.join(lines) + pens.top_right
    bottom = pens.bottom_left + pens.bottom.join(lines) + pens.bottom_right
    return top, middle + pens.vertical, bottom


class Reach(NamedTuple):
    """log2 of the smallest positive number, of the smallest normal number, and of the first power above the largest."""

    smallest: int
    normal: int
    end: int


def reach(format: Format) -> Reach:
    """Return the binades of a format, over all values of a shared scale."""
    found = format_facts.limits(format)
    smallest, maximum = floor_log2(found.smallest), floor_log2(found.maximum)
    return Reach(smallest, floor_log2(found.smallest_normal) if found.smallest_normal else smallest, maximum + 1)


def _ranges(formats: Sequence[Format], names: int, width: int, pens: Pens) -> list[str]:
    ranges = [reach(format) for format in formats]
    low, high = min(r.smallest for r in ranges), max(r.end for r in ranges)
    room = max(width - names - 24, 20)

    def column(exponent: int) -> int:
        return round((exponent - low) * room / max(high - low, 1))

    shades = f"{pens.subnormal} subnormal, {pens.normal} normal"
    if any(isinstance(format, ScaledFormat) for format in formats):
        shades += f", {pens.shared} wherever the shared scale puts the window"
    lines = [f"range, log2 from {low} to {high}", shades]
    for format, r in zip(formats, ranges, strict=True):
        start, normal, end = column(r.smallest), column(r.normal), max(column(r.end), column(r.normal) + 1)
        shade = pens.shared if isinstance(format, ScaledFormat) else pens.normal
        bar = " " * start + (pens.subnormal * (normal - start) if shade == pens.normal else shade * (normal - start))
        bar += shade * (end - max(normal, start))
        lines.append(f"{format!s:<{names}}{bar:<{room}}  2^{r.smallest} .. 2^{r.end}")
    return lines
