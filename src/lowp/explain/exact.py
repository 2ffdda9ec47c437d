"""The definition of rounding in rational numbers. Every kernel must agree with it."""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

from lowp.casts import Cast, Overflow, Rounding
from lowp.casts import parse as parse_cast
from lowp.errors import InvalidInput
from lowp.explain.numbers import Given, Number, code_of_value, floor_log2, times_power
from lowp.formats import FloatFormat, Format, IntFormat, ScaledFormat
from lowp.formats.text_enum import TextEnum

# Number of random bits that a stochastic cast without `random_bits` compares: unbiased to 2**-160.
RANDOM_BITS = 160
_HALF = Fraction(1, 2)
_ZERO = Fraction(0)


class RoundingRule(TextEnum):
    """What decided a result, before overflow is looked at.

    ``exact``: the number is one of the format's. ``below-half``, ``above-half``: the part cut off is less or more
    than half a unit, so the nearer value is below or above. ``tie-to-even``, ``tie-away``: it is exactly half.
    ``directed``: the direction decides (toward zero, up, down). ``to-odd``: the neighbour whose last bit is 1.
    ``stochastic``: a random number decides. ``flushed``: below the smallest normal number of a format without
    subnormals. ``to-smallest``: below the smallest number of a format that has no zero. ``special``: an infinity or
    NaN was given. ``negative``: a negative number (or any zero) in a format that has none. ``sign``: binary, where
    the sign alone counts.
    """

    EXACT = "exact"
    BELOW_HALF = "below-half"
    ABOVE_HALF = "above-half"
    TIE_TO_EVEN = "tie-to-even"
    TIE_AWAY = "tie-away"
    DIRECTED = "directed"
    TO_ODD = "to-odd"
    STOCHASTIC = "stochastic"
    FLUSHED = "flushed"
    TO_SMALLEST = "to-smallest"
    SPECIAL = "special"
    NEGATIVE = "negative"
    SIGN = "sign"


AnyCast = Cast | Format | str


def are_equal(one: Number, other: Number) -> bool:
    """Whether two numbers are equal; -0 equals +0."""
    same = (one.special, one.magnitude) == (other.special, other.magnitude)
    return same and (one.negative == other.negative or not one.magnitude)


def difference(one: Number, other: Number) -> Fraction | None:
    """Return one - other; None if one of them is not finite."""
    return one.value - other.value if one.is_finite and other.is_finite else None


@dataclass(frozen=True)
class Rounded:
    """One rounding, with everything that decided it.

    The magnitude was split into `kept` units of 2**`quantum_exponent` and a `rest` in [0, 1) of a unit; `away` tells
    whether one unit was added. If nothing was cut (a special, a flushed number), both exponents are None. `code` is
    None if the format has no bits for the result (NaN in a format without NaN).
    """

    given: Number
    cast: Cast
    result: Number
    code: int | None
    rule: RoundingRule
    exponent: int | None = None
    quantum_exponent: int | None = None
    kept: int = 0
    rest: Fraction = Fraction(0)
    away: bool = False
    overflowed: bool = False

    @property
    def format(self) -> FloatFormat | IntFormat:
        """The format rounded to."""
        return self.cast.element

    @property
    def guard(self) -> int:
        """The first bit that was cut off."""
        return int(self.rest >= _HALF)

    @property
    def round_bit(self) -> int:
        """The second bit that was cut off."""
        return int(self.rest * 4) & 1

    @property
    def sticky(self) -> int:
        """1 if any bit after guard and round bit is 1."""
        return int((self.rest * 4).denominator != 1)

    @property
    def is_exact(self) -> bool:
        """Whether nothing was lost: same value, or same special."""
        return are_equal(self.given, self.result)

    @property
    def error(self) -> Fraction | None:
        """result - given; None if one of them is not finite."""
        return difference(self.result, self.given)

    @property
    def error_ulp(self) -> Fraction | None:
        """The error in units of the last place at the given number; None without an error or a unit."""
        error, exponent = self.error, self.ulp_exponent
        return None if error is None or exponent is None else error / Fraction(2) ** exponent

    @property
    def ulp_exponent(self) -> int | None:
        """log2 of the spacing of the format at the given number; None for an infinity or a NaN."""
        if not self.given.is_finite:
            return None
        if isinstance(self.format, IntFormat):
            return 0
        exponent = self.format.min_exponent if self.exponent is None else max(self.exponent, self.format.min_exponent)
        return exponent - self.format.mantissa_bits

    @property
    def relative_error(self) -> Fraction | None:
        """|error| / |given|; None for a given zero or without an error."""
        if self.error is None or not self.given.magnitude:
            return None
        return abs(self.error) / self.given.magnitude


def round_exact(value: Given, cast: AnyCast, random: Fraction | None = None) -> Rounded:
    """Round one exact number: the definition.

    `random` in [0, 1) is the random number of a stochastic cast: away from zero where its first N bits, as a number,
    are below the part cut off, in N bits (N the cast's random_bits, else 160; see `share_away`). A stochastic cast that
    has to choose without it raises ValueError, as does a format with a shared scale (`convert` takes one).
    """
    number, cast = Number.of(value), parse_cast(cast)
    if isinstance(cast.format, ScaledFormat):
        raise InvalidInput(f"{cast}: the value of one number depends on the shared scale: use convert")
    if random is not None and not 0 <= random < 1:
        raise InvalidInput(f"the random number {random} is outside [0, 1)")
    if isinstance(cast.format, IntFormat):
        return _round_integer(number, cast, cast.format, random)
    return _round_float(number, cast, cast.format, random)


def share_away(rest: Fraction, cast: Cast) -> Fraction:
    """Return the probability with which a stochastic cast rounds away from zero: `rest`, reduced to the random bits.

    `rest` is truncated (stochastic), rounded half up (stochastic-b) or rounded half to even (stochastic-c). Source:
    IEEE P3109, StochasticA, StochasticB and StochasticC.
    """
    steps = 1 << (cast.random_bits or RANDOM_BITS)
    if cast.rounding is Rounding.STOCHASTIC_B:
        return Fraction(floor(rest * steps + _HALF), steps)
    return Fraction(round(rest * steps) if cast.rounding is Rounding.STOCHASTIC_C else floor(rest * steps), steps)


def _finish(start: Rounded, result: Number, rule: RoundingRule, overflowed: bool = False) -> Rounded:
    """Return `start` with its result, the bits of the result and the rule."""
    format = start.format
    if result.is_finite and not result.magnitude and (isinstance(format, IntFormat) or not format.has_minus_zero):
        result = Number(result.magnitude)
    code = code_of_value(result, format)
    return replace(start, result=result, code=code, rule=rule, overflowed=overflowed)


def _without_digits(number: Number, cast: Cast, format: FloatFormat) -> Rounded | None:
    """Round what no digits decide: NaN, infinities, zeros, negative and flushed numbers; None for others."""
    magnitude = number.magnitude
    start = Rounded(number, cast, number, None, RoundingRule.EXACT)
    if number.special == "nan":
        return _finish(start, number, RoundingRule.SPECIAL)
    below = number.negative and bool(magnitude or number.special)
    if not format.signed and (below or not (magnitude or number.special or format.has_zero)):
        nan = Number(Fraction(0), number.negative, "nan")
        return _finish(start, nan if format.has_nan else Number(Fraction(format.minimum)), RoundingRule.NEGATIVE)
    if number.special == "inf":
        return _finish(start, _beyond(number.negative, cast, format, finite_allowed=False), RoundingRule.SPECIAL)
    if magnitude == 0:
        return _finish(start, number, RoundingRule.EXACT)
    exponent = floor_log2(magnitude)
    if exponent < format.min_exponent and not (format.has_zero and format.subnormals):
        start = replace(start, exponent=exponent)
        if format.has_zero:
            return _finish(start, Number(Fraction(0), number.negative), RoundingRule.FLUSHED)
        return _finish(start, Number(Fraction(format.smallest_normal)), RoundingRule.TO_SMALLEST)
    return None


def _round_float(number: Number, cast: Cast, format: FloatFormat, random: Fraction | None) -> Rounded:
    if (found := _without_digits(number, cast, format)) is not None:
        return found
    magnitude = number.magnitude
    exponent = floor_log2(magnitude)
    quantum_exponent = max(exponent, format.min_exponent) - format.mantissa_bits
    # integers are several times faster than fractions, and the tests call this a million times
    divisor = magnitude.denominator << max(quantum_exponent, 0)
    kept, remainder = divmod(magnitude.numerator << max(-quantum_exponent, 0), divisor)
    rest = Fraction(remainder, divisor) if remainder else _ZERO
    # without mantissa bits the last bit of a code is that of the exponent field, and that of zero is even; but in a
    # format without zero (e8m0) a tie becomes the larger number, as in torch and ml_dtypes: its significand 1 is odd
    by_code = kept > 0 and format.mantissa_bits == 0 and format.has_zero
    last_bit = (exponent + format.bias if by_code else kept) & 1
    away, rule = _choose(rest, last_bit, number.negative, cast, random)
    start = Rounded(number, cast, number, None, rule, exponent, quantum_exponent, kept, rest, away)
    rounded = times_power(kept + away, quantum_exponent)
    if exponent >= format.max_exponent and rounded > Fraction(format.maximum):
        return _finish(start, _beyond(number.negative, cast, format), rule, overflowed=True)
    return _finish(start, Number(rounded, number.negative), rule)


def _beyond(negative: bool, cast: Cast, format: FloatFormat, finite_allowed: bool = True) -> Number:
    """Return the result for a number beyond the maximum (IEEE 754-2019 section 7.4).

    `finite_allowed=False`, for a given infinity, excludes a finite result unless the cast saturates. Rounding to odd
    gives the maximum, without which a second rounding would be wrong (as in Berkeley SoftFloat and on ARM; drafts of
    P3109 give infinity).
    """
    largest = Number(Fraction(format.maximum), negative)
    if cast.overflow is Overflow.SATURATE:
        return largest
    inward = (
        cast.rounding in (Rounding.TOWARD_ZERO, Rounding.TO_ODD)
        or (cast.rounding is Rounding.UP and negative)
        or (cast.rounding is Rounding.DOWN and not negative)
    )
    if inward and finite_allowed:
        return largest
    return Number(Fraction(0), negative, "inf" if cast.overflow is Overflow.INFINITY else "nan")


def _choose(
    rest: Fraction, last_bit: int, negative: bool, cast: Cast, random: Fraction | None
) -> tuple[bool, RoundingRule]:
    """Return whether one unit is added to the magnitude, and by which rule."""
    if rest == 0:
        return False, RoundingRule.EXACT
    mode = cast.rounding
    if mode.is_stochastic:
        if random is None:
            raise InvalidInput(f"{cast} depends on a random number: give random, in [0, 1)")
        return random < share_away(rest, cast), RoundingRule.STOCHASTIC
    if mode is Rounding.TO_ODD:
        return not last_bit, RoundingRule.TO_ODD
    if mode in (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY):
        if rest != _HALF:
            return rest > _HALF, RoundingRule.ABOVE_HALF if rest > _HALF else RoundingRule.BELOW_HALF
        return (
            (bool(last_bit), RoundingRule.TIE_TO_EVEN)
            if mode is Rounding.NEAREST_EVEN
            else (True, RoundingRule.TIE_AWAY)
        )
    outward = (mode is Rounding.UP and not negative) or (mode is Rounding.DOWN and negative)
    return outward, RoundingRule.DIRECTED


def _round_integer(number: Number, cast: Cast, format: IntFormat, random: Fraction | None) -> Rounded:
    start = Rounded(number, cast, number, None, RoundingRule.EXACT)
    if number.special == "nan":
        return _finish(start, number, RoundingRule.SPECIAL)
    if format.bits == 1:
        return _finish(start, *_round_binary(number, cast, random))
    bound = Number.of(format.minimum if number.negative else format.maximum)
    if number.special == "inf":
        return _finish(start, bound, RoundingRule.SPECIAL, overflowed=True)
    kept = int(number.magnitude)
    rest = number.magnitude - kept
    away, rule = _choose(rest, kept & 1, number.negative, cast, random)
    exponent = floor_log2(number.magnitude) if number.magnitude else None
    start = replace(start, exponent=exponent, quantum_exponent=0, kept=kept, rest=rest, away=away)
    if kept + away > bound.magnitude:
        return _finish(start, bound, rule, overflowed=True)
    return _finish(start, Number(Fraction(kept + away), number.negative), rule)


def _round_binary(number: Number, cast: Cast, random: Fraction | None) -> tuple[Number, RoundingRule]:
    """Return +1 or -1: by the sign (-0 counts as +), or, if stochastic, +1 with probability (x + 1) / 2."""
    positive = not number.negative or not (number.magnitude or number.special)
    within = number.is_finite and number.magnitude < 1
    if cast.is_stochastic and within:
        if random is None:
            raise InvalidInput(f"{cast} depends on a random number: give random, in [0, 1)")
        return Number.of(1 if random < share_away((number.value + 1) / 2, cast) else -1), RoundingRule.STOCHASTIC
    return Number.of(1 if positive else -1), RoundingRule.SIGN


@dataclass(frozen=True)
class Outcome:
    """A possible result of a rounding and its probability."""

    probability: Fraction
    rounded: Rounded


def outcomes(value: Given, cast: AnyCast, random: Fraction | None = None) -> tuple[Outcome, ...]:
    """Return every possible result, the likelier first: two for a stochastic cast without `random`, else one."""
    number, cast = Number.of(value), parse_cast(cast)
    if not cast.is_stochastic or random is not None:
        return (Outcome(Fraction(1), round_exact(number, cast, random)),)
    lowest, highest = Fraction(0), 1 - Fraction(1, 1 << (cast.random_bits or RANDOM_BITS))
    first, second = round_exact(number, cast, lowest), round_exact(number, cast, highest)
    if first == second:
        return (Outcome(Fraction(1), first),)
    share = share_away(first.rest if first.quantum_exponent is not None else (number.value + 1) / 2, cast)
    both = (Outcome(share, first), Outcome(1 - share, second))
    return tuple(sorted(both, key=lambda outcome: -outcome.probability))
