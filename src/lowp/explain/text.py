"""Numbers as text: with all decimal digits, with a few of them, or as bits by field."""

from __future__ import annotations

import textwrap
from decimal import Context, Decimal
from fractions import Fraction

from lowp.formats import FloatFormat, IntFormat

DIGITS_LIMIT = 1500  # fp64's smallest subnormal has 1074 decimal places
BITS_SHOWN = 32
LINE_WIDTH = 80


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
    denominator, places = value.denominator, 0
    twos = (denominator & -denominator).bit_length() - 1
    odd, fives = denominator >> twos, 0
    while odd % 5 == 0:
        odd, fives = odd // 5, fives + 1
    places = max(twos, fives)
    if odd != 1:
        return f"{value.numerator}/{denominator}" if denominator < 10**12 else brief(value, 17)
    if max(places, abs(value.numerator).bit_length() // 3) > DIGITS_LIMIT:
        return brief(value, 17)
    digits = str(abs(value.numerator) * 10**places // denominator).rjust(places + 1, "0")
    whole, part = digits[: len(digits) - places], digits[len(digits) - places :]
    return ("-" if value < 0 else "") + whole + (f".{part}" if part else "")


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


def maximum_text(format: FloatFormat | IntFormat) -> str:
    """The largest value with its power of two: ``(2 - 2^-10) x 2^15``, ``2^15 - 1``."""
    if isinstance(format, IntFormat):
        return f"2^{format.bits - 1} - 1" if format.bits > 1 else "1"
    significand = Fraction(format.maximum) / Fraction(2) ** format.max_exponent
    below = 2 - significand
    return f"2^{format.max_exponent}" if below == 1 else f"(2 - {power_text(below)}) x 2^{format.max_exponent}"


def binary(value: int, width: int) -> str:
    """Return an integer as `width` bits; '' for width 0."""
    return f"{value:0{width}b}" if width else ""


def bits_text(code: int | None, format: FloatFormat | IntFormat) -> str:
    """The fields of a code with blanks between them: sign, exponent, mantissa."""
    if code is None:
        return "no code"
    if isinstance(format, IntFormat):
        return " ".join(part for part in (binary(code, format.bits)[:1], binary(code, format.bits)[1:]) if part)
    sign, exponent, mantissa = format.fields(code)
    parts = (
        str(sign) if format.signed else "",
        binary(exponent, format.exponent_bits),
        binary(mantissa, format.mantissa_bits),
    )
    return " ".join(part for part in parts if part)


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


def line(label: str, text: str) -> str:
    """Return one fact of an explanation: a label of 11 letters and a text, wrapped at LINE_WIDTH."""
    if len(text) <= LINE_WIDTH - 14:
        return f"  {label:<11} {text}".rstrip()
    parts = textwrap.wrap(text, LINE_WIDTH - 14, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"  {label if index == 0 else '':<11} {part}".rstrip() for index, part in enumerate(parts))
