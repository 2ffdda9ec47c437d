"""Flexpoint arithmetic on single mantissas: products, sums with their alignment, and moves to another exponent.

A number is mantissa * 2**exponent, with an int16 mantissa and one exponent for all elements of its tensor. Products add
the exponents and keep every bit; sums shift the mantissa with the smaller exponent to the right by the difference and
take the larger exponent; a sum that does not fit takes the next one.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.explain.conversion import convert
from lowp.explain.numbers import Given, binary, decimal_text, line, text_of
from lowp.formats import IntFormat, PowerOfTwo, ScaledFormat


@dataclass(frozen=True)
class FlexNumber:
    """mantissa * 2**exponent."""

    mantissa: int
    exponent: int

    @property
    def value(self) -> Fraction:
        """The exact value."""
        return self.mantissa * Fraction(2) ** self.exponent

    def __str__(self) -> str:
        return f"{self.mantissa} x 2^{self.exponent} = {decimal_text(self.value)}"


@dataclass(frozen=True)
class Rescaled:
    """A mantissa moved to another exponent: shifted, rounded to nearest even, saturated where it does not fit."""

    given: FlexNumber
    result: FlexNumber
    shift: int  # places to the right; to the left where negative
    cut: str  # the bits that were shifted out on the right
    saturated: bool


@dataclass(frozen=True)
class FlexArithmetic:
    """One product or sum of two numbers, and how it is written back into the mantissa's bits.

    `exact` is the result before writing: for a product every bit, at the sum of the exponents; for a sum the value at
    the larger exponent, after the alignment has cut `cut` off the operand with the smaller exponent. `carried`: a sum
    took the next exponent.
    """

    operator: str
    format: ScaledFormat
    left: FlexNumber
    right: FlexNumber
    exact: FlexNumber
    written: Rescaled
    shift: int = 0
    aligned: FlexNumber | None = None
    cut: str = ""
    carried: bool = False

    @property
    def result(self) -> FlexNumber:
        """The written number."""
        return self.written.result


def is_flex(cast: Cast) -> bool:
    """Whether the format of a cast is integers under one power of two per tensor."""
    return isinstance(cast.format, ScaledFormat) and cast.format.is_flex


def rescale(number: FlexNumber, exponent: int, bits: int = 16, symmetric: bool = False) -> Rescaled:
    """Move a number to another exponent: its mantissa is shifted, rounded to nearest even, and saturated.

    rescale(FlexNumber(5, 0), 1) is 2 at exponent 1: 2.5, a tie, goes to the even mantissa.
    """
    shift = exponent - number.exponent
    highest = (1 << (bits - 1)) - 1
    lowest = -highest if symmetric else -highest - 1
    if shift <= 0:
        moved, cut = number.mantissa << -shift, ""
    else:
        rest = number.mantissa & ((1 << shift) - 1)
        moved, half = number.mantissa >> shift, 1 << (shift - 1)
        cut = binary(rest, shift)
        moved += rest > half or (rest == half and moved & 1)
    bounded = min(max(moved, lowest), highest)
    return Rescaled(number, FlexNumber(bounded, exponent), shift, cut, bounded != moved)


def flex_product(left: FlexNumber, right: FlexNumber, cast: Cast, exponent: int | None = None) -> FlexArithmetic:
    """left * right: the mantissas are multiplied, exactly, and the exponents added; written at `exponent`.

    Without one it is the smallest of the format's exponents that holds the product. Raises InvalidInput for a cast
    whose format is not integers under one power of two.
    """
    format, element = _parts(cast)
    exact = FlexNumber(left.mantissa * right.mantissa, left.exponent + right.exponent)
    wanted = _exponent_for(exact, format, element) if exponent is None else exponent
    return FlexArithmetic("*", format, left, right, exact, rescale(exact, wanted, element.bits, element.symmetric))


def flex_sum(left: FlexNumber, right: FlexNumber, cast: Cast, minus: bool = False) -> FlexArithmetic:
    """left + right (or left - right), aligned by a shift to the right under the larger exponent.

    The bits that the shift cuts off are lost (an arithmetic shift: toward minus infinity). A sum that carries out of
    the mantissa takes the next exponent, rounded to nearest even. Raises as `flex_product`.
    """
    format, element = _parts(cast)
    signed = FlexNumber(-right.mantissa, right.exponent) if minus else right
    smaller, larger = sorted((left, signed), key=lambda one: one.exponent)
    shift = larger.exponent - smaller.exponent
    aligned = FlexNumber(smaller.mantissa >> shift, larger.exponent)
    cut = binary(smaller.mantissa & ((1 << shift) - 1), shift) if shift else ""
    exact = FlexNumber(larger.mantissa + aligned.mantissa, larger.exponent)
    fits = element.minimum <= exact.mantissa <= element.maximum
    assert isinstance(format.scale, PowerOfTwo)
    top = format.scale.max_exponent
    wanted = exact.exponent if fits or exact.exponent >= top else exact.exponent + 1
    written = rescale(exact, wanted, element.bits, element.symmetric)
    operator = "-" if minus else "+"
    return FlexArithmetic(operator, format, left, right, exact, written, shift, aligned, cut, wanted != exact.exponent)


def flex_arithmetic(
    operator: str, left: Given, right: Given, cast: Cast, exponent: int | None = None
) -> FlexArithmetic:
    """left + right, left - right or left * right of two numbers, each under `exponent` or under its own.

    Raises InvalidInput for a quotient, which the format's arithmetic does not have.
    """
    if operator not in "+-*":
        raise InvalidInput(f"{cast.format} supports +, - and * of mantissas, not {operator}")
    first, second = (flex_number(one, cast, exponent) for one in (left, right))
    if operator == "*":
        return flex_product(first, second, cast)
    return flex_sum(first, second, cast, minus=operator == "-")


def flex_number(value: Given, cast: Cast, exponent: int | None = None) -> FlexNumber:
    """A number as the format holds it, under `exponent` or under the one that it would have alone."""
    if not is_flex(cast):
        raise InvalidInput(f"{cast.format} has no mantissas under a shared exponent: give flex16+5 or dfp16")
    conversion = convert(value, cast, exponent=exponent)
    scale, element = conversion.scale, conversion.rounded.result
    if scale is None or scale.exponent is None or not conversion.given.is_finite:
        raise InvalidInput(f"{conversion.given} is not a number of {cast.format}, which has no infinity and no NaN")
    return FlexNumber(int(element.value), scale.exponent)


def _parts(cast: Cast) -> tuple[ScaledFormat, IntFormat]:
    if not is_flex(cast):
        raise InvalidInput(
            f"{cast.format} is not a format of integers with one power of two; allowed: flex16+5 and dfp16"
        )
    format = cast.format
    assert isinstance(format, ScaledFormat) and isinstance(format.element, IntFormat)
    return format, format.element


def _exponent_for(number: FlexNumber, format: ScaledFormat, element: IntFormat) -> int:
    """Return the smallest exponent of the format under which a number fits, rounded to the element."""
    assert isinstance(format.scale, PowerOfTwo)
    exponent = format.scale.min_exponent
    while exponent < format.scale.max_exponent and rescale(number, exponent, element.bits, element.symmetric).saturated:
        exponent += 1
    return exponent


# -- as text -----------------------------------------------------------------------------------------------------------
@text_of
def render_flex(found: FlexArithmetic) -> Iterator[str]:
    """The explanation as text of several lines."""
    left, right, exact, written = found.left, found.right, found.exact, found.written
    yield f"{decimal_text(left.value)} {found.operator} {decimal_text(right.value)} in {found.format}"
    width = found.format.element.bits
    yield line("left", f"{_bits(left, width)}   {left}")
    yield line("right", f"{_bits(right, width)}   {right}")
    if found.operator == "*":
        yield line("product", f"{left.mantissa} x {right.mantissa} = {exact.mantissa}, every bit kept")
        yield line("exponent", f"{left.exponent} + {right.exponent} = {exact.exponent}")
    else:
        assert found.aligned is not None
        if found.shift:
            lost = f"; {found.cut} is cut off" if "1" in found.cut else "; only zeros are cut off"
            yield line("align", f"the smaller exponent's mantissa moves right by {found.shift}{lost}")
        yield line("sum", f"{exact.mantissa} at the larger exponent, {exact.exponent}")
        if found.carried:
            yield line("carry", f"it needs more than {width} bits: the next exponent, {written.result.exponent}")
    yield from _rescaled_lines(written, width)
    ideal = {"*": left.value * right.value, "+": left.value + right.value, "-": left.value - right.value}
    yield line("error", decimal_text(written.result.value - ideal[found.operator]))


@text_of
def render_rescaled(moved: Rescaled) -> Iterator[str]:
    """A move to another exponent as text of several lines."""
    given = moved.given
    yield f"{given} at exponent {moved.result.exponent}"
    yield line("given", f"{_bits(given, 16)}   {given}")
    yield from _rescaled_lines(moved, 16)
    yield line("error", decimal_text(moved.result.value - given.value))


def _rescaled_lines(moved: Rescaled, width: int) -> Iterator[str]:
    if moved.shift:
        way = "right" if moved.shift > 0 else "left"
        rounds = f", cut off: {moved.cut}, to nearest even" if "1" in moved.cut else ""
        yield line("write", f"at exponent {moved.result.exponent}: {abs(moved.shift)} to the {way}{rounds}")
    if moved.saturated:
        yield line("saturates", f"the mantissa does not fit into {width} bits there")
    yield line("result", f"{_bits(moved.result, width)}   {moved.result}")


def _bits(number: FlexNumber, width: int) -> str:
    return binary(number.mantissa & ((1 << width) - 1), width)
