"""One rounding in words: the bits kept and cut, the rule that decided, and the size of the error."""

from collections.abc import Iterator
from fractions import Fraction

from lowp.errors import counted
from lowp.explain.exact import Rounded, RoundingRule
from lowp.explain.numbers import Number, binary, bits_text, brief, decimal_text, fraction_bits, line, point
from lowp.formats import FloatFormat


def rule_words(rounded: Rounded) -> str:
    """Return the rule that decided the result, in words."""
    mode, number = rounded.cast.rounding, rounded.given
    has_zero = getattr(rounded.format, "has_zero", True)
    even = "neighbour whose last bit is 0" if has_zero else "larger number, as there is no mantissa bit to be even"
    part = f"the cut part is {_share(rounded.rest)} of a unit"
    step = "up by one unit" if rounded.away else "down: the kept bits stay"
    if rounded.away and number.negative:
        step = "away from zero by one unit"
    words = {
        RoundingRule.EXACT: "nothing is cut off: exact",
        RoundingRule.BELOW_HALF: f"{part}, less than half: {step}",
        RoundingRule.ABOVE_HALF: f"{part}, more than half: {step}",
        RoundingRule.TIE_TO_EVEN: f"exactly half a unit, a tie: to the {even}: {step}",
        RoundingRule.TIE_AWAY: f"exactly half a unit, a tie: away from zero: {step}",
        RoundingRule.DIRECTED: f"{part}; {mode} decides: {step}",
        RoundingRule.TO_ODD: f"{part}; to the neighbour whose last bit is 1: {step}",
        RoundingRule.STOCHASTIC: f"{part}; the random number decides: {step}",
        RoundingRule.FLUSHED: f"{rounded.format} has no subnormals: 0 below its smallest normal, before rounding",
        RoundingRule.TO_SMALLEST: f"{rounded.format} has no zero: below its smallest number it is that number",
        RoundingRule.SPECIAL: _special_words(rounded),
        RoundingRule.NEGATIVE: f"{rounded.format} has no negative number" + " and no zero" * (not has_zero),
        RoundingRule.SIGN: f"{rounded.format} keeps the sign alone (zero counts as +)",
    }[rounded.rule]
    if rounded.overflowed:
        largest = decimal_text(Fraction(rounded.format.maximum))
        words = "no bit of the significand is cut off" if rounded.rule is RoundingRule.EXACT else words
        words += f"; beyond the largest number, {largest}: {rounded.cast.overflow}"
    elif rounded.given.is_finite and rounded.given.magnitude and rounded.result == Number(Fraction(0), number.negative):
        words += "; underflow to zero"
    return words


def _special_words(rounded: Rounded) -> str:
    given, result = rounded.given.special, rounded.result.special
    if given == result:
        return {"nan": "NaN stays NaN", "inf": "infinity stays infinity", "": ""}[given]
    if result == "nan":
        return f"infinity becomes NaN (overflow: {rounded.cast.overflow})"
    return f"infinity becomes the largest number (overflow: {rounded.cast.overflow})"


def _share(rest: Fraction) -> str:
    """Return four digits of a number in [0, 1), marked "just above" or "just below" next to a tie or a whole unit."""
    text = brief(rest)
    for mark in (Fraction(1, 2), Fraction(1)):
        if Fraction(text) == mark != rest:
            return f"just {'above' if rest > mark else 'below'} {text}"
    return text


def error_words(error: Fraction | None, ulps: Fraction | None, relative: Fraction | None) -> str:
    """The error in decimal, in ulp and relative."""
    if error is None:
        return "none that is a number"
    if error == 0:
        return "none: exact"
    in_ulps = f" = {brief(ulps)} ulp" if ulps is not None else ""
    share = f", relative {brief(relative)}" if relative is not None else ""
    return f"{brief(error, 6)}{in_ulps}{share}"


def cut_lines(rounded: Rounded) -> Iterator[str]:
    """Yield the bits of the exact number that are kept and cut, and the rule that decided."""
    exponent, quantum, format = rounded.exponent, rounded.quantum_exponent, rounded.format
    if exponent is not None and quantum is not None:
        if isinstance(format, FloatFormat):
            subnormal = exponent < format.min_exponent
            field = 0 if subnormal else exponent + format.bias
            why = f"field {exponent} + {format.bias} ="
            why = f"below 2^{format.min_exponent}: subnormal, field" if subnormal else why
            fits = field < 1 << format.exponent_bits
            known = f" = {binary(field, format.exponent_bits)}" if fits else ", beyond the field"
            yield line("exponent", f"floor(log2 |x|) = {exponent}; {why} {field}{known}")
        yield line("spacing", f"one unit (ulp) here is 2^{quantum} = {decimal_text(Fraction(2) ** quantum)}")
        places = format.mantissa_bits if isinstance(format, FloatFormat) else 0
        scale = f" x 2^{quantum + places}" if places or quantum else ""
        yield line("significand", f"{point(rounded.kept, places)}|{fraction_bits(rounded.rest) or '0'}{scale}")
        if rounded.rest:
            bits = f"guard {rounded.guard}, round {rounded.round_bit}, sticky {rounded.sticky}"
            yield line("cut off", f"{fraction_bits(rounded.rest)}: {bits}")
    for index, words in enumerate(rule_words(rounded).split("; ")):
        yield line("" if index else "rule", words)


def format_words(rounded: Rounded) -> str:
    format = rounded.format
    shape = (
        f"{format.spelling}, bias {format.bias}"
        if isinstance(format, FloatFormat)
        else f"{counted(format.bits, 'bit')}, {format.minimum} to {format.maximum}"
    )
    return f"{format} ({shape}), {rounded.cast.rounding}, overflow: {rounded.cast.overflow}"


def code_words(rounded: Rounded) -> str:
    """Return the bits of a result by field, with the code in hexadecimal."""
    format = rounded.format
    if rounded.code is None:
        return f"no bits: {format} has no {rounded.result.special}"
    fields = ""
    if isinstance(format, FloatFormat):
        fields = "   sign exponent mantissa" if format.signed and format.mantissa_bits else "   the exponent alone"
        fields = "   exponent mantissa" if not format.signed and format.mantissa_bits else fields
    return f"{bits_text(rounded.code, format)}   {rounded.code:#0{(format.bits + 3) // 4 + 2}x}{fields}"
