"""Show a number, a sum, a product or a weight update bit by bit, exactly.

  lowp explain 1.12156456132 --to fp16
  lowp explain "1.125 + 0.12457275390625" --in fp16
  lowp explain 0b0 01011 1111111001 --from fp16 --to fp32
  lowp explain --weight 1.125 --gradient 0.00041999 --steps 101 --in fp16
  lowp explain --fma --accumulate fp16
  lowp explain N101

A number such as N101 is that of a finding of `lowp profile`.

Numbers: decimal (1.125, -3e-5), fraction (1/3), power of two (2^-25), hex float (0x1.8p3), inf, nan, -0, or a bit
pattern, most significant bit first: 0b0 01111 0001111100 or bits:0x3c7c (0x3c7c alone is the number 15484,
and with --from fp16 the bits).

Operators: + - * / between two numbers (1 / 3 with blanks is a division, 1/3 is the number one third).

Formats: a format of `lowp formats` or a spelled one (e5m7), with rounding and overflow: e4m3fn:toward-zero:saturate.

A weight update is weight + gradient; with --minus weight - gradient, with --learning-rate R weight - R x gradient.
"""

import argparse
import re
import shlex
from fractions import Fraction

from lowp import explain
from lowp.casts import parse as parse_cast
from lowp.cli import Parser
from lowp.cli.options import OUTPUT, Option, add_options
from lowp.cli.output import print_json, show
from lowp.errors import InvalidInput
from lowp.explain.multiply_add import ORDERS

_UPDATE, _FMA = "a weight update", "the tensor core's D = A B + C"


OPTIONS = (
    Option("number", "a number, or two with an operator between them", more={"nargs": "*"}),
    Option("--to", "the format to convert to: fp16, e4m3fn:toward-zero:saturate", "CAST"),
    Option(
        "--in",
        "the format of an operation or a weight update; of a number before --to",
        "CAST",
        more={"dest": "within"},
    ),
    Option("--from", "the format of a bit pattern", "FORMAT", more={"dest": "source"}),
    Option("--bits", "read numbers as bit patterns, such as 0x3c7c", kind=bool),
    Option("--via", "a cast before --to, to show double rounding", "CAST"),
    Option("--exponent", "the shared scale 2^E of flex16+5, dfp16, mxfp8 ...", "E", int),
    Option("--rescale", "move a flex16+5 number to the shared scale 2^E", "E", int),
    Option("--scale", "the shared scale of int8, nvfp4 ...", "NUMBER"),
    Option("--random", "the random number in [0, 1) of a stochastic cast", "U"),
    Option("--weight", None, "NUMBER", group=_UPDATE),
    Option("--gradient", None, "NUMBER", group=_UPDATE),
    Option("--steps", "number of updates (default: 1)", "N", int, 1, group=_UPDATE),
    Option("--learning-rate", "the update is - R x gradient", "R", group=_UPDATE),
    Option("--minus", "the update is - gradient", kind=bool, group=_UPDATE),
    Option("--fma", "explain D = A B + C on matrices of up to 4 x 4", kind=bool, group=_FMA),
    *(
        Option(f"--{name}", "rows of the matrix, such as '1 2; 3 4' (default: an example)", "ROWS", group=_FMA)
        for name in "abc"
    ),
    Option("--accumulate", "the accumulator: fp32 (default) or fp16", "FORMAT", default="fp32", group=_FMA),
    Option("--order", f"{' or '.join(ORDERS)} (default: tensor-core)", "ORDER", default="tensor-core", group=_FMA),
    Option("--element", "the element of D to show in full, counted from 1,1", "I,J", group=_FMA),
    Option("--worked", "print all worked cases", kind=bool),
    *OUTPUT,
)


def run(arguments: argparse.Namespace) -> int:
    """Print the requested explanation."""
    if len(arguments.number) == 1 and re.fullmatch(r"[Nn]\d+", arguments.number[0]):
        from lowp.numerics.findings import explained

        _check_options("a finding", "", arguments)
        print(explained(arguments.number[0]))
        return 0
    if arguments.worked:
        _check_options("--worked", "", arguments)
        show(_worked())
        return 0
    result = _explanation(arguments)
    if arguments.json:
        print_json(explain.as_json(result))
    elif arguments.fma:
        show(explain.render_multiply_add(result, _element(arguments.element)))  # type: ignore[arg-type]
    else:
        show(explain.render(result))
    return 0


def _explanation(arguments: argparse.Namespace) -> object:
    text = " ".join(arguments.number)
    is_update = arguments.weight is not None or arguments.gradient is not None
    requests = [
        name for name, given in (("a number", text), ("--weight", is_update), ("--fma", arguments.fma)) if given
    ]
    if len(requests) > 1:
        raise InvalidInput(f"{' and '.join(requests)} cannot be combined: give one of them")
    if not requests:
        raise InvalidInput(
            "nothing to explain: give a number and --to (lowp explain 0.1 --to fp16), an operation and --in "
            "(lowp explain '1.5 * 2.25' --in bf16), --weight and --gradient, --fma, or --worked"
        )
    _check_options(requests[0], text, arguments)
    if arguments.fma:
        return explain.fused_multiply_add(
            arguments.a,
            arguments.b,
            arguments.c,
            operands=arguments.within or "fp16",
            accumulate=arguments.accumulate,
            order=arguments.order,
        )
    return _update(arguments) if is_update else _number(text, arguments)


_TAKES = {
    "a finding": (),
    "--worked": ("worked", "plain"),
    "a number": ("to", "within", "source", "bits", "via", "exponent", "scale", "random", "json", "plain"),
    "--rescale": ("rescale", "to", "within", "source", "bits", "exponent", "json", "plain"),
    "an operation": ("to", "within", "source", "bits", "random", "json", "plain"),
    "an operation in a flex format": ("within", "to", "source", "bits", "exponent", "json", "plain"),
    "--weight": ("weight", "gradient", "steps", "learning_rate", "minus", "within", "to", "bits", "json", "plain"),
    "--fma": ("fma", "a", "b", "c", "accumulate", "order", "element", "within", "json", "plain"),
}


def _check_options(request: str, text: str, arguments: argparse.Namespace) -> None:
    """Raise InvalidInput for an option that this explanation would not heed."""
    if request == "a number" and explain.split_expression(text, arguments.bits):
        format = arguments.within or arguments.to
        request = "an operation in a flex format" if format and explain.is_flex(parse_cast(format)) else "an operation"
    elif request == "a number" and arguments.rescale is not None:
        request = "--rescale"
    takes = set(_TAKES[request])
    if arguments.within and request in ("--weight", "--rescale", "an operation in a flex format"):
        takes.discard("to")  # these have one format
    spelled = {one.dest: one.name for one in OPTIONS}
    for one in OPTIONS[1:]:
        if one.dest not in takes and getattr(arguments, one.dest) not in (None, False, one.default):
            allowed = ", ".join(spelled[name] for name in _TAKES[request] if name in takes) or "no options"
            raise InvalidInput(f"{one.name} says nothing about {request}: omit it; allowed: {allowed}")


def _update(arguments: argparse.Namespace) -> object:
    for name in ("weight", "gradient"):
        if getattr(arguments, name) is None:
            raise InvalidInput(f"a weight update needs --weight and --gradient: --{name} is missing")
    cast = arguments.within or arguments.to
    if cast is None:
        raise InvalidInput("the format of the weight is missing: give it, for example --in fp16")
    rate = arguments.learning_rate
    if rate is not None and arguments.minus:
        raise InvalidInput("--learning-rate already makes the update - R x gradient: omit --minus")
    format = str(parse_cast(cast).format)  # of bit patterns
    weight, gradient = (
        explain.parse_number(one, format, arguments.bits) for one in (arguments.weight, arguments.gradient)
    )
    return explain.weight_update(
        weight,
        gradient,
        cast,
        steps=arguments.steps,
        learning_rate=None if rate is None else _fraction(rate, "--learning-rate"),
        minus=arguments.minus,
    )


def _number(text: str, arguments: argparse.Namespace) -> object:
    parts = explain.split_expression(text, arguments.bits)
    target = arguments.to or arguments.within
    if target is None:
        option = "--in, for example --in fp16" if parts else "--to, for example --to fp16"
        raise InvalidInput(f"{text}: the format is missing: give {option}; `lowp formats` lists the formats")
    random = _random(target, arguments)
    source = arguments.source or str(parse_cast(arguments.within or target).format)
    if parts:
        return _expression(parts, source, random, arguments)
    # with --from, 0x3c7c means a bit pattern, not the number 15484
    bits = arguments.bits or (arguments.source is not None and re.fullmatch("0x[0-9a-f]+", text.lower()) is not None)
    if arguments.rescale is not None:
        number = explain.flex_number(explain.parse_number(text, source, bits), parse_cast(target), arguments.exponent)
        return explain.rescale(number, arguments.rescale)
    if arguments.to and arguments.within and arguments.via:
        raise InvalidInput("--in and --via are both the format before --to: give one of them")
    return explain.convert(
        explain.parse_number(text, source, bits),
        target,
        via=arguments.via or (arguments.within if arguments.to else None),
        source=arguments.source,
        exponent=arguments.exponent,
        scale=None if arguments.scale is None else _fraction(arguments.scale, "--scale"),
        random=random,
    )


def _random(target: str, arguments: argparse.Namespace) -> Fraction | None:
    """Return the number that --random gives, for a cast that draws one."""
    if arguments.random is None:
        return None
    random = _fraction(arguments.random, "--random")
    if not any(parse_cast(one).is_stochastic for one in (target, arguments.within) if one):
        raise InvalidInput(f"--random is for a stochastic cast, and {target} is none: give {target}:stochastic")
    return random


def _expression(
    parts: tuple[str, str, str], source: str, random: Fraction | None, arguments: argparse.Namespace
) -> object:
    left, operator, right = parts
    first, second = (explain.parse_number(part, source, arguments.bits) for part in (left, right))
    within = arguments.within or arguments.to
    if explain.is_flex(parse_cast(within)):
        return explain.flex_arithmetic(operator, first, second, parse_cast(within), arguments.exponent)
    return explain.evaluate(operator, first, second, within, arguments.to if arguments.within else None, random)


def _fraction(text: str, option: str) -> Fraction:
    number = explain.parse_number(text)
    if not number.is_finite:
        raise InvalidInput(f"{option} {text}: give a finite number")
    return number.value


def _element(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"\s*([1-4])\s*,\s*([1-4])\s*", text)
    if match is None:
        raise InvalidInput(f"--element {text}: give row and column, from 1,1 to 4,4")
    return int(match[1]) - 1, int(match[2]) - 1


def _worked() -> str:
    parser = Parser(prog="lowp explain")
    add_options(parser, OPTIONS)
    parts = []
    for index, case in enumerate(explain.WORKED_CASES, 1):
        arguments = parser.parse_args(case.arguments)
        command = shlex.join(["lowp", "explain", *case.arguments])
        parts.append(f"{index}. {case.title}\n$ {command}\n{explain.render(_explanation(arguments))}")
    return "\n\n".join(parts)
