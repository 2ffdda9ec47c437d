"""Exact numbers as a user may type them, a rational number or a special, and as text: digits, a few, or bits."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from functools import wraps
from math import copysign, inf, isinf, isnan, nan
from typing import ParamSpec

from lowp.errors import InvalidInput, counted
from lowp.formats import FloatFormat, Format, IntFormat
from lowp.formats import parse as parse_format

DIGITS_LIMIT = 1500  # fp64's smallest subnormal has 1074 decimal places
_EXACT = Context(prec=2 * DIGITS_LIMIT, Emax=999999, Emin=-999999, traps=[Inexact])
BITS_SHOWN = 32
LINE_WIDTH = 80
P = ParamSpec("P")


def floor_log2(magnitude: Fraction) -> int:
    """Return floor(log2(magnitude)) of a positive number, from its bits."""
    numerator, denominator = magnitude.numerator, magnitude.denominator
    estimate = numerator.bit_length() - denominator.bit_length()
    return estimate - (numerator << max(-estimate, 0) < denominator << max(estimate, 0))


def times_power(units: int, exponent: int) -> Fraction:
    """units * 2**exponent."""
    return Fraction(units << exponent) if exponent >= 0 else Fraction(units, 1 << -exponent)


def decimal_text(value: Fraction) -> str:
    """Return all decimal digits if the expansion ends, as for every binary fraction; otherwise a fraction, ``1/3``."""
    numerator, denominator = value.numerator, value.denominator
    if numerator.bit_length() // 3 > DIGITS_LIMIT and pow(10, denominator.bit_length(), denominator) == 0:
        return brief(value, 17)
    try:
        text = f"{_EXACT.divide(Decimal(numerator), Decimal(denominator)):f}"
    except Inexact:  # it does not end, or is too long
        return f"{numerator}/{denominator}" if denominator < 10**12 else brief(value, 17)
    return text if len(text.partition(".")[2]) <= DIGITS_LIMIT else brief(value, 17)


def brief(value: Fraction, digits: int = 4) -> str:
    """Return a number with `digits` significant digits."""
    context = Context(prec=digits, Emax=999999, Emin=-999999)
    quotient = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    if quotient == quotient.to_integral_value() and abs(quotient) < 10**digits:
        return str(int(quotient))
    return f"{quotient:.{digits}g}".replace("e+", "e")


def power_text(value: Fraction) -> str:
    """A number as a multiple of a power of two: ``2^-24``, ``1.75 x 2^15``; 0 as 0."""
    if value == 0:
        return "0"
    exponent = floor_log2(abs(value))
    significand = value / Fraction(2) ** exponent
    if abs(significand) == 1:
        return ("-" if value < 0 else "") + f"2^{exponent}"
    return f"{decimal_text(significand)} x 2^{exponent}"


def binary(value: int, width: int) -> str:
    """Return an integer as `width` bits; '' for width 0."""
    return f"{value:0{width}b}" if width else ""


def bits_text(code: int | None, format: FloatFormat | IntFormat) -> str:
    """The fields of a code with blanks between them: sign, exponent, mantissa."""
    if code is None:
        return "no code"
    bits = binary(code, format.bits)
    if isinstance(format, IntFormat):
        parts = [bits[:1], bits[1:]]
    else:
        mantissa = format.bits - format.mantissa_bits
        parts = [bits[: format.signed], bits[format.signed : mantissa], bits[mantissa:]]
    return " ".join(filter(None, parts))


def point(units: int, places: int) -> str:
    """An integer of units 2**-places as a binary number: point(5, 2) is ``1.01``."""
    whole = binary(units >> places, 1)
    return whole + (f".{binary(units & ((1 << places) - 1), places)}" if places else "")


def fraction_bits(rest: Fraction, limit: int = BITS_SHOWN) -> str:
    """Return the bits after the point of a number in [0, 1), followed by ``...`` if there are more than `limit`."""
    bits = ""
    while rest and len(bits) < limit:
        rest *= 2
        bits += "1" if rest >= 1 else "0"
        rest -= rest >= 1
    return bits + ("..." if rest else "")


def text_of(lines: Callable[P, Iterator[str]]) -> Callable[P, str]:
    """Make a function that yields lines return one text of them, without a newline at the end."""

    @wraps(lines)
    def joined(*args: P.args, **named: P.kwargs) -> str:
        return "\n".join(lines(*args, **named))

    return joined


def line(label: str, text: str) -> str:
    """Return one fact of an explanation: a label of 11 letters and a text, wrapped at LINE_WIDTH."""
    parts = textwrap.wrap(text, LINE_WIDTH - 14, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(f"  {label if index == 0 else '':<11} {part}".rstrip() for index, part in enumerate(parts))


# -- numbers -----------------------------------------------------------------------------------------------------------
# 10**EXPONENT_LIMIT is far outside every format; beyond it a typed exponent would only fill the memory
EXPONENT_LIMIT = 2000
LENGTH_LIMIT = 2000

FORMS = (
    "a decimal (1.125, -3e-5), a fraction (1/3), a power of two (2^-25), a hex float (0x1.8p3), a bit pattern "
    "(0b0 01111 0001111100 or bits:0x3c7c), inf, nan or -0"
)


@dataclass(frozen=True)
class Number:
    """A real number, an infinity or a NaN. Zero and NaN have a sign too.

    `magnitude` is exact and not negative; if `special` is "inf" or "nan", it is 0 and has no meaning.
    """

    magnitude: Fraction
    negative: bool = False
    special: str = ""

    @classmethod
    def of(cls, value: Given, source: Format | str | None = None) -> Number:
        """Return a Python number or a text as a Number; a float counts with its exact value, bits are of `source`."""
        if isinstance(value, Number):
            return value
        if isinstance(value, str):
            return parse_number(value, source)
        if isinstance(value, float):
            negative = copysign(1.0, value) < 0
            if isnan(value) or isinf(value):
                return cls(Fraction(0), negative, "nan" if isnan(value) else "inf")
            return cls(abs(Fraction(value)), negative)
        if isinstance(value, (int, Fraction)):
            return cls(abs(Fraction(value)), value < 0)
        raise TypeError(f"a number must be text, float, int or Fraction, not {type(value).__name__}")

    @property
    def is_finite(self) -> bool:
        """Neither infinity nor NaN."""
        return not self.special

    @property
    def value(self) -> Fraction:
        """The signed number. Raises ValueError for an infinity or a NaN."""
        if self.special:
            raise InvalidInput(f"{self} has no rational value")
        return -self.magnitude if self.negative else self.magnitude

    def brief(self, digits: int) -> str:
        """Return it with so many significant digits."""
        return str(self) if self.special else brief(self.value, digits)

    def __float__(self) -> float:
        magnitude = {"inf": inf, "nan": nan}.get(self.special)
        return copysign(float(self.magnitude) if magnitude is None else magnitude, -1.0 if self.negative else 1.0)

    def __neg__(self) -> Number:
        return Number(self.magnitude, not self.negative, self.special)

    def __str__(self) -> str:
        return ("-" if self.negative else "") + (self.special or decimal_text(self.magnitude))


Given = Number | Fraction | float | int | str  # what a user may give for a number
NAN = Number(Fraction(0), special="nan")
ZERO = Number(Fraction(0))

_SIGN = r"[-+]?"
_DECIMAL = _SIGN + r"(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_FRACTION = _SIGN + r"\d+/\d+"
_POWER = _SIGN + r"2(?:\^|\*\*)-?\d+"
_HEX = _SIGN + r"0x(?:[0-9a-f]+(?:\.[0-9a-f]*)?|\.[0-9a-f]+)(?:p[-+]?\d+)?"
_SPECIAL = _SIGN + r"(?:inf(?:inity)?|nan)"
_BITS = r"(?:bits:\s*)?0b[01](?:[ _]*[01])*|bits:\s*(?:0x[0-9a-f]+|[01](?:[ _]*[01])*)"
NUMBER = f"(?:{_BITS}|{_FRACTION}|{_POWER}|{_HEX}|{_DECIMAL}|{_SPECIAL})"


def parse_number(text: str, source: Format | str | None = None, bits: bool = False) -> Number:
    """Return the exact number that a text means.

    Forms: decimal, fraction ``1/3``, ``2^-25``, hexadecimal ``0x1.8p3`` (without a p an integer: 0x10 is 16), inf, nan.
    ``0b...`` and ``bits:0x...`` are bit patterns of the format `source`, all of its bits, most significant first;
    `bits=True` reads any 0x or 0b, or plain zeros and ones, as a bit pattern. Raises ValueError, whose text lists the
    forms.
    """
    given = " ".join(text.strip().lower().split())
    if len(given) > LENGTH_LIMIT:
        raise InvalidInput(f"a number of {len(given)} characters is too long: give at most {LENGTH_LIMIT}")
    if bits and not given.startswith(("bits:", "0b")):
        given = "bits:" + given
    if re.fullmatch(_BITS, given):
        return _from_bits(given, source)
    if bits:
        raise InvalidInput(
            f"{text!r} is not a bit pattern: give zeros and ones (0 01111 0001111100) or hexadecimal (0x3c7c)"
        )
    negative = given.startswith("-")
    body = given.lstrip("+-") if re.fullmatch(NUMBER, given) else ""
    if not body:
        raise InvalidInput(f"{text!r} is not a number: give {FORMS}")
    if body[0] in "in":
        return Number(Fraction(0), negative, body[:3])
    return Number(_magnitude(body, text), negative)


def _magnitude(body: str, text: str) -> Fraction:
    if body.startswith("0x"):
        digits, _, power = body[2:].partition("p")
        whole, _, part = digits.partition(".")
        return int(whole + part, 16) * _power(2, power or "0", text) / (1 << 4 * len(part))
    if match := re.fullmatch(r"2(?:\^|\*\*)(-?\d+)", body):
        return _power(2, match[1], text)
    if "/" in body:
        numerator, denominator = map(int, body.split("/"))
        if denominator == 0:
            raise InvalidInput(f"{text!r} divides by zero: give inf or nan instead")
        return Fraction(numerator, denominator)
    digits, _, power = body.replace("_", "").partition("e")
    return Fraction(digits) * _power(10, power or "0", text)


def _power(base: int, exponent: str, text: str) -> Fraction:
    if abs(int(exponent)) > EXPONENT_LIMIT:
        raise InvalidInput(f"{text!r}: an exponent beyond {EXPONENT_LIMIT} is outside every format")
    power: Fraction = Fraction(base) ** int(exponent)
    return power


def _from_bits(given: str, source: Format | str | None) -> Number:
    if source is None:
        raise InvalidInput(f"{given!r} is a bit pattern: give its format, for example --from fp16")
    format = parse_format(source)
    if not isinstance(format, (FloatFormat, IntFormat)):
        raise InvalidInput(
            f"{given!r} as {format}: a code has a value only with its shared scale; give the format of one element, "
            f"{format.element}"
        )
    body = given.removeprefix("bits:").strip()
    if body.startswith("0x"):
        code = int(body, 16)
        if code >> format.bits:
            raise InvalidInput(f"{body} has more than the {counted(format.bits, 'bit')} of {format}")
        return value_of_code(code, format)
    digits = re.sub("[ _]", "", body.removeprefix("0b"))
    if len(digits) != format.bits:
        raise InvalidInput(
            f"{body!r} has {counted(len(digits), 'bit')}, and {format} has {format.bits}: give all of them"
        )
    return value_of_code(int(digits, 2), format)


def value_of_code(code: int, format: FloatFormat | IntFormat) -> Number:
    """Return the number of a bit pattern. For a 1-bit integer, 0 is +1 and 1 is -1; others are two's complement."""
    if isinstance(format, FloatFormat):
        return Number.of(format.decode(code))
    if format.bits == 1:
        return Number.of(-1 if code else 1)
    return Number.of(code - ((code >> (format.bits - 1)) << format.bits))


def code_of_value(value: Number, format: FloatFormat | IntFormat) -> int | None:
    """Return the bit pattern of a value of the format; None if it has none (NaN in a format without NaN).

    NaN gives the quiet NaN with the sign of `value`.
    """
    if isinstance(format, IntFormat):
        if not value.is_finite:
            return None
        return int(value.value < 0) if format.bits == 1 else int(value.value) & ((1 << format.bits) - 1)
    if value.special == "nan":
        if not format.has_nan:
            return None
        sign = int(value.negative and format.has_minus_zero) << (format.bits - 1)
        return format.encode(nan) | sign
    return format.encode(float(value))
