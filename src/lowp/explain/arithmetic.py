"""Sums, differences, products and quotients of two numbers of a format, with the alignment shown."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from lowp.casts import Cast, Rounding
from lowp.casts import parse as parse_cast
from lowp.errors import InvalidInput, UnknownName, check_name, unknown
from lowp.explain.exact import AnyCast, Rounded, round_exact
from lowp.explain.numbers import LENGTH_LIMIT, NAN, NUMBER, ZERO, Given, Number, binary
from lowp.formats import FloatFormat, IntFormat, ScaledFormat

OPERATORS = {"+": "sum", "-": "difference", "*": "product", "/": "quotient"}
_SPELLED = {"x": "*", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"}
_SIGNS = r"[-+*/x\u00d7\u00b7\u00f7\u2212]"


@dataclass(frozen=True)
class Alignment:
    """How the smaller operand of a sum was shifted under the larger.

    Significands are integers in units of the last place of their own operand. `kept` is the part of the smaller
    significand that remains after the shift, and `cut` holds the `shift` bits that were shifted out on the right.
    """

    larger: Rounded
    smaller: Rounded
    larger_is_left: bool
    larger_field: int
    smaller_field: int
    shift: int
    larger_significand: int
    smaller_significand: int
    kept: int
    cut: str

    @property
    def guard(self) -> int:
        """The first bit shifted out."""
        return int(self.cut[:1] == "1")

    @property
    def round_bit(self) -> int:
        """The second bit shifted out."""
        return int(self.cut[1:2] == "1")

    @property
    def sticky(self) -> int:
        """Whether any later bit is 1."""
        return int("1" in self.cut[2:])


@dataclass(frozen=True)
class Arithmetic:
    """One operation: the operands as the format holds them, the exact result, and its one rounding.

    `wider` is the result rounded to fp32 (to fp64 if the format is fp32); None if the format is fp64 or an integer.
    """

    operator: str
    operands: Cast
    left: Rounded
    right: Rounded
    exact: Number
    rounded: Rounded
    wider: Rounded | None
    alignment: Alignment | None = None

    @property
    def result(self) -> Number:
        """The rounded result."""
        return self.rounded.result

    @property
    def code(self) -> int | None:
        """The bits of the result."""
        return self.rounded.code


def evaluate(
    operator: str,
    left: Given,
    right: Given,
    cast: AnyCast,
    result: AnyCast | None = None,
    random: Fraction | None = None,
) -> Arithmetic:
    """One of + - * / on two numbers rounded to `cast`; specials as in IEEE 754-2019 section 6 and 7.

    Operands are rounded to nearest even whatever the cast says (its rounding is that of the operation); the exact
    result is rounded once by `result`, or by `cast`.
    """
    operator = _SPELLED.get(operator, operator)
    check_name("operator", operator, OPERATORS)
    cast = parse_cast(cast)
    target = cast if result is None else parse_cast(result)
    for each in (cast, target):
        if isinstance(each.format, ScaledFormat):
            raise InvalidInput(
                f"{each.format} numbers share a scale, so a {OPERATORS[operator]} is defined for tensors only: "
                f"give a format without a shared scale, such as {each.element}, or use flex_arithmetic for "
                "the mantissas of flex16+5 and dfp16; "
                f"--to {each.format} shows one number"
            )
    first, second = (
        round_exact(Number.of(x, cast.format), Cast(cast.format, overflow=cast.overflow)) for x in (left, right)
    )
    exact = exact_result(operator, first.result, second.result, target.rounding is Rounding.DOWN)
    rounded = round_exact(exact, target, random)
    aligned = _align(first, second) if operator in "+-" else None
    return Arithmetic(operator, cast, first, second, exact, rounded, _wider(exact, target), aligned)


# of two numbers and a cast; the result is in another one, where it is given
add, subtract, multiply, divide = (partial(evaluate, operator) for operator in OPERATORS)


def _wider(exact: Number, cast: Cast) -> Rounded | None:
    format = cast.format
    if isinstance(format, IntFormat) or not isinstance(format, FloatFormat) or format.mantissa_bits > 23:
        return None
    return round_exact(exact, "fp64" if format.mantissa_bits == 23 else "fp32")


def exact_result(operator: str, left: Number, right: Number, down: bool = False) -> Number:
    """The exact result of one operation; `down` gives an exact zero sum its minus sign (IEEE 754 section 6.3)."""
    if operator == "-":
        operator, right = "+", -right
    if "nan" in (left.special, right.special):
        return left if left.special == "nan" else right
    return _OPERATIONS[operator](left, right, down)


def _sum(left: Number, right: Number, down: bool) -> Number:
    if left.special or right.special:
        if left.special and right.special and left.negative != right.negative:
            return NAN
        return left if left.special else right
    total = left.value + right.value
    if total == 0:
        return Number(total, left.negative if left.negative == right.negative else down)
    return Number.of(total)


def _product(left: Number, right: Number, down: bool) -> Number:
    negative = left.negative != right.negative
    if left.special or right.special:
        zero = any(x.is_finite and not x.magnitude for x in (left, right))
        return NAN if zero else Number(Fraction(0), negative, "inf")
    return Number(left.magnitude * right.magnitude, negative)


def _quotient(left: Number, right: Number, down: bool) -> Number:
    negative = left.negative != right.negative
    zero_by_zero = not (left.magnitude or left.special or right.magnitude or right.special)
    if zero_by_zero or (left.special and right.special):
        return NAN
    if right.special:
        return Number(ZERO.magnitude, negative)
    if left.special or not right.magnitude:
        return Number(ZERO.magnitude, negative, "inf")
    return Number(left.magnitude / right.magnitude, negative)


_OPERATIONS: dict[str, Callable[[Number, Number, bool], Number]] = {"+": _sum, "*": _product, "/": _quotient}


def _align(first: Rounded, second: Rounded) -> Alignment | None:
    """Return the shift of the smaller operand under the larger; None if an operand is zero, special or an integer."""
    format = first.format
    if not isinstance(format, FloatFormat) or not all(
        x.is_finite and x.magnitude for x in (first.result, second.result)
    ):
        return None
    left_is_larger = first.result.magnitude >= second.result.magnitude
    larger, smaller = (first, second) if left_is_larger else (second, first)
    assert larger.code is not None and smaller.code is not None
    (_, larger_field, large), (_, smaller_field, small) = format.fields(larger.code), format.fields(smaller.code)
    hidden = 1 << format.mantissa_bits
    # field 0 of subnormal numbers means the same power of two as field 1
    if format.has_zero:
        large, small = large + hidden * (larger_field > 0), small + hidden * (smaller_field > 0)
        shift = max(larger_field, 1) - max(smaller_field, 1)
    else:
        large, small, shift = large + hidden, small + hidden, larger_field - smaller_field
    cut = binary(small & ((1 << shift) - 1), shift)
    return Alignment(
        larger, smaller, left_is_larger, larger_field, smaller_field, shift, large, small, small >> shift, cut
    )


_EXPRESSION = re.compile(rf"({NUMBER})\s*({_SIGNS})\s*({NUMBER})")
_UNKNOWN_OPERATOR = re.compile(rf"({NUMBER})\s*([^\s\w.+-]+|[a-z]+)\s*({NUMBER})")


def split_expression(text: str, bits: bool = False) -> tuple[str, str, str] | None:
    """Left number, operator and right number of a text; None where it is one number.

    1/3 without blanks is the number one third; 1 / 3 divides. With `bits` numbers are bit patterns, and the operator
    needs a blank on both sides. Raises ValueError for another operator.
    """
    given = " ".join(text.strip().lower().split())
    if len(given) > 2 * LENGTH_LIMIT:
        raise InvalidInput(f"an expression of {len(given)} characters is too long: give at most {2 * LENGTH_LIMIT}")
    if bits:
        parts = re.split(rf"\s({_SIGNS})\s", given)
        if len(parts) == 3:
            return parts[0], _SPELLED.get(parts[1], parts[1]), parts[2]
        return None
    if re.fullmatch(NUMBER, given):
        return None
    if match := _EXPRESSION.fullmatch(given):
        return match[1], _SPELLED.get(match[2], match[2]), match[3]
    if re.fullmatch(r"[-+]?0[bx]\S+", given):
        return None  # one number with an invalid digit
    if match := _UNKNOWN_OPERATOR.fullmatch(given):
        raise UnknownName(unknown("operator", match[2], OPERATORS) + f", between two numbers, not as in {text!r}")
    if len(re.findall(rf"(?<=\S)\s+{_SIGNS}\s+", given)) > 1:
        raise InvalidInput(f"{text!r} has more than one operator: one step at a time, such as '1.125 + 0.5'")
    return None
