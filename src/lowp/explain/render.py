"""Explanations as text, plain, without colour, one fact per line, and as plain data for machines."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from fractions import Fraction
from functools import singledispatch

from lowp.casts import Cast
from lowp.errors import counted
from lowp.explain.arithmetic import OPERATORS, Alignment, Arithmetic
from lowp.explain.conversion import Conversion
from lowp.explain.exact import Rounded
from lowp.explain.flexpoint import FlexArithmetic, FlexNumber, Rescaled, render_flex, render_rescaled
from lowp.explain.multiply_add import MultiplyAdd, render_multiply_add
from lowp.explain.numbers import (
    BITS_SHOWN,
    Number,
    binary,
    bits_text,
    brief,
    code_of_value,
    decimal_text,
    floor_log2,
    fraction_bits,
    line,
    point,
    power_text,
    text_of,
)
from lowp.explain.phrases import code_words, cut_lines, error_words, format_words, rule_words
from lowp.explain.render_update import render_update
from lowp.explain.update import WeightUpdate
from lowp.formats import FloatFormat, IntFormat, ScaledFormat


@singledispatch
def render(explanation: object) -> str:
    """The explanation as text of several lines, without a newline at the end."""
    raise TypeError(f"{type(explanation).__name__} is not an explanation of lowp.explain")


render.register(WeightUpdate, render_update)
render.register(MultiplyAdd, render_multiply_add)
render.register(FlexArithmetic, render_flex)
render.register(Rescaled, render_rescaled)


# -- conversions -------------------------------------------------------------------------------------------------------
@render.register(Conversion)
@text_of
def _(conversion: Conversion) -> Iterator[str]:
    rounded, given = conversion.rounded, conversion.given
    yield f"{given} to {conversion.cast}"
    yield line("format", format_words(rounded))
    yield from _given_lines(conversion)
    if conversion.via is not None:
        first = conversion.via
        yield line("first", f"to {first.cast}: {rule_words(first)}")
        yield line("", f"{code_words(first)} = {first.result}")
    if conversion.scale is not None:
        scale = conversion.scale
        size = f"2^{scale.exponent}" if scale.exponent is not None else decimal_text(scale.value)
        yield line("scale", f"{size} ({scale.chosen_by}); the element is {rounded.given}")
    yield from cut_lines(rounded)
    yield line("result", code_words(rounded))
    if conversion.scale is not None:
        yield line("", f"element {rounded.result} times the scale")
    yield from _value_lines(conversion)
    if conversion.held is not None:
        yield line("in fp32", f"{conversion.held}, which a tensor holds")
    for outcome in conversion.outcomes if len(conversion.outcomes) > 1 else ():
        bits = code_words(outcome.rounded)
        yield line("chance", f"{brief(outcome.probability, 6)}: {outcome.rounded.result}   {bits}")
    if len(conversion.outcomes) > 1:
        yield line("", "the result above is the likelier; --random 0.25 decides with that random number")
        yield from _mean_lines(conversion)
    yield from _twice_lines(conversion)


def _mean_lines(conversion: Conversion) -> Iterator[str]:
    """Yield the bias of the mean of the results, if the random bits cannot represent the probability."""
    bits, rounded = conversion.cast.random_bits, conversion.rounded
    finite = all(outcome.rounded.result.is_finite for outcome in conversion.outcomes)
    if bits is None or not finite or any(outcome.rounded.overflowed for outcome in conversion.outcomes):
        return
    mean = sum(outcome.probability * outcome.rounded.result.value for outcome in conversion.outcomes)
    bias, exponent = mean - rounded.given.value, rounded.ulp_exponent
    if bias and exponent is not None:
        share = brief(bias / Fraction(2) ** exponent)
        yield line("mean", f"{share} ulp off the number: the cut part is no number of {bits} bit{'s' * (bits != 1)}")


def _value_lines(found: Conversion | Rounded) -> Iterator[str]:
    number, power = found.result, ""
    if number.is_finite and number.magnitude and not -10 < floor_log2(number.magnitude) < 16:
        text = power_text(number.value)
        power = f" = {text}" if len(text) < 40 else ""
    yield line("value", f"{number}{power}")
    yield line("error", error_words(found.error, found.error_ulp, found.relative_error))


def _given_lines(conversion: Conversion) -> Iterator[str]:
    given, source = conversion.given, conversion.source
    if given.is_finite and given.magnitude:
        power_exponent = floor_log2(given.magnitude)
        rest = given.magnitude / Fraction(2) ** power_exponent - 1
        places = fraction_bits(rest, BITS_SHOWN)
        sign = "-" if given.negative else ""
        yield line("exact", f"{sign}1.{places or '0'} x 2^{power_exponent}")
    if source is None or not given.is_finite:
        return
    try:
        code = code_of_value(given, source)
    except (ValueError, OverflowError):
        yield line("from", f"{given} is no number of {source}: it is taken as it is")
        return
    yield line("from", f"{source}: {bits_text(code, source)}")
    target = conversion.rounded.format
    if isinstance(target, FloatFormat) and conversion.rounded.is_exact and given.magnitude:
        added = target.mantissa_bits - source.mantissa_bits
        moved = target.bias - source.bias
        if added >= 0 and given.magnitude >= Fraction(source.smallest_normal):
            yield line("widen", f"exponent field {moved:+d}, and {added} zero bits are appended to the mantissa: exact")


def _twice_lines(conversion: Conversion) -> Iterator[str]:
    direct, twice = conversion.direct, conversion.through_fp32
    if direct is not None and conversion.rounded_twice_differs:
        bits = bits_text(direct.code, direct.format)
        yield line("twice", f"without the rounding in between: {bits} = {direct.result}")
        yield line("", "two roundings are not one: the first moved the number onto, or over, a tie of the second")
    elif direct is not None:
        yield line("twice", "the rounding in between changes nothing here")
    if twice is not None:
        yield line("note", f"number to fp32 to {twice.format} gives {twice.result} instead:")
        yield line("", "double rounding (--via fp32)")


# -- sums and products ------------------------------------------------------------------------------------------------
@render.register(Arithmetic)
@text_of
def _(arithmetic: Arithmetic) -> Iterator[str]:
    rounded, operator = arithmetic.rounded, arithmetic.operator
    left, right = arithmetic.left, arithmetic.right
    yield f"{left.given} {operator} {right.given} in {arithmetic.operands.format}"
    yield line("format", format_words(rounded))
    for name, operand in (("left", left), ("right", right)):
        yield from _operand_lines(name, operand)
    if arithmetic.alignment is not None:
        yield from _alignment_lines(arithmetic, arithmetic.alignment)
    yield line("exact", f"the {OPERATORS[operator]} is {arithmetic.exact}")
    if operator in "*/":
        yield from _product_lines(arithmetic)
    yield from cut_lines(rounded)
    yield line("result", code_words(rounded))
    yield from _value_lines(rounded)
    if arithmetic.wider is not None:
        wider = arithmetic.wider
        exact = "exact" if wider.is_exact else "rounded, too"
        yield line(f"in {wider.format}", f"{wider.result} ({exact})")
        yield line("", bits_text(wider.code, wider.format))


def _operand_lines(name: str, operand: Rounded) -> Iterator[str]:
    if not operand.is_exact:
        yield line(name, f"{operand.given} is no number of {operand.format}: {operand.result} is taken")
        yield line("", f"({rule_words(operand)})")
    else:
        yield line(name, str(operand.result))
    yield line("", f"{bits_text(operand.code, operand.format)}{_significand_words(operand)}")


def _significand_words(operand: Rounded) -> str:
    format = operand.format
    if isinstance(format, IntFormat) or not operand.result.is_finite or not operand.result.magnitude:
        return ""
    assert operand.code is not None
    _, field, mantissa = format.fields(operand.code)
    normal = bool(field) or not format.has_zero
    exponent = field - format.bias if normal else format.min_exponent
    return f"   {point(mantissa + (normal << format.mantissa_bits), format.mantissa_bits)} x 2^{exponent}"


def _alignment_lines(arithmetic: Arithmetic, alignment: Alignment) -> Iterator[str]:
    format = alignment.larger.format
    assert isinstance(format, FloatFormat)
    places, bits = format.mantissa_bits, format.exponent_bits
    least = int(format.has_zero)  # field 0 holds the subnormals, with the power of two of field 1
    larger, smaller = max(alignment.larger_field, least), max(alignment.smaller_field, least)
    fields = f"{binary(larger, bits)} - {binary(smaller, bits)}"
    if (larger, smaller) != (alignment.larger_field, alignment.smaller_field):
        fields += " (a subnormal counts as 1)"
    dots = "..." if len(alignment.cut) > BITS_SHOWN else ""
    cut = alignment.cut[:BITS_SHOWN] + dots
    moved = point(alignment.kept, places) + (f"|{cut}" if cut else "")
    if alignment.shift:
        before = point(alignment.smaller_significand, places)
        yield line("align", f"exponents {fields} = {alignment.shift}:")
        yield line("", f"{before} moves right by {counted(alignment.shift, 'place')} to {moved}")
        sticky = int("1" in alignment.cut[1:])
        yield line("", f"guard {alignment.guard}, the rest ({cut[1:] or 'none'}) sticky {sticky}")
    else:
        yield line("align", f"exponents {fields} = {alignment.shift}: nothing moves")
    subtracts = (arithmetic.left.result.negative != arithmetic.right.result.negative) != (arithmetic.operator == "-")
    kept, large = alignment.kept, alignment.larger_significand
    small = (kept << alignment.shift) + int(alignment.cut or "0", 2)
    total = (large << alignment.shift) + (-small if subtracts else small)
    remaining = binary(total & ((1 << alignment.shift) - 1), alignment.shift)[:BITS_SHOWN]
    tail = f"|{remaining}{dots}" if alignment.shift else ""
    name = "subtract" if subtracts else "add"
    yield line(name, f"  {point(large, places)}")
    yield line("", f"{'-' if subtracts else '+'} {moved}")
    yield line("", f"= {point(total >> alignment.shift, places)}{tail}")
    hidden = 1 << places
    whole = total >> alignment.shift
    if not subtracts and places and large >= hidden and whole < 2 * hidden:
        yield from _mantissa_lines(arithmetic.rounded, large - hidden, kept, whole - hidden, places)


def _mantissa_lines(rounded: Rounded, large: int, kept: int, total: int, places: int) -> Iterator[str]:
    summed = binary(total, places)
    words = f"{binary(large, places)} + {binary(kept, places)} = {summed}"
    target = rounded.format
    if isinstance(target, FloatFormat) and target.mantissa_bits == places and rounded.rest and not rounded.overflowed:
        assert rounded.code is not None
        after = binary(target.fields(rounded.code)[2], places)
        words += f", rounded up to {after}" if rounded.away else f", rounded down: {after} stays"
    yield line("mantissas", words)


def _product_lines(arithmetic: Arithmetic) -> Iterator[str]:
    left, right = arithmetic.left, arithmetic.right
    formats = left.format
    finite = all(x.result.is_finite and x.result.magnitude for x in (left, right))
    if arithmetic.operator != "*" or not isinstance(formats, FloatFormat) or not finite:
        return
    one, two = (_significand_words(x).strip() for x in (left, right))
    first, second = (floor_log2(x.result.magnitude) for x in (left, right))
    carried = floor_log2(arithmetic.exact.magnitude) - first - second
    yield line("multiply", f"{one} times {two}")
    note = "; the significands' product is 2 or more: one place to the right" if carried else ""
    yield line("", f"exponents are added: {first} + {second} = {first + second}{note}")


# -- as plain data -----------------------------------------------------------------------------------------------------
def as_json(value: object) -> object:
    """Return data for the json module: exact numbers as `_number` gives them, infinities and NaNs as text."""
    if isinstance(value, Fraction):
        return _number(value)
    if isinstance(value, Number) and value.is_finite:
        return -0.0 if value.negative and not value.magnitude else _number(value.value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (Number, Cast, FloatFormat, IntFormat, ScaledFormat)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    if not is_dataclass(value):
        return value
    data = {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Rounded):
        data["bits"] = None if value.code is None else bits_text(value.code, value.format)
    return {**data, **{name: as_json(getattr(value, name)) for name in _DERIVED.get(type(value), ())}}


# the properties that plain data has beside the fields
_ERRORS = ("error", "error_ulp", "relative_error")
_DERIVED: dict[type, tuple[str, ...]] = {
    Rounded: ("guard", "round_bit", "sticky", *_ERRORS, "is_exact"),
    Conversion: ("result", "held", *_ERRORS),
    FlexNumber: ("value",),
    FlexArithmetic: ("result",),
}


def _number(value: Fraction) -> int | float | str:
    """Return a number that fp64 or its decimal notation has exactly (0.4); otherwise text, such as 1/3 or 2^-1100."""
    if value.denominator == 1 and abs(value) < 1 << 53:
        return int(value)
    is_binary = value.denominator & (value.denominator - 1) == 0
    try:
        nearest = float(value)
    except OverflowError:
        return power_text(value)
    if value in (Fraction(nearest), Fraction(repr(nearest))):
        return nearest
    return power_text(value) if is_binary else decimal_text(value)
