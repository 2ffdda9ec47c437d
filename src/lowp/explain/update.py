"""A weight and its update: whether it is lost, distorted or kept, and the smallest size that would count."""

from dataclasses import dataclass
from fractions import Fraction

from lowp.casts import Cast, Rounding
from lowp.casts import parse as parse_cast
from lowp.errors import InvalidInput
from lowp.explain.exact import AnyCast, Outcome, Rounded, are_equal, outcomes, round_exact, share_away
from lowp.explain.numbers import Given, Number, floor_log2
from lowp.formats import FloatFormat
from lowp.formats.text_enum import TextEnum

STEPS_LIMIT = 100_000


class Verdict(TextEnum):
    """What becomes of an update.

    ``lost``: the weight stays as it was. ``distorted``: it moves, but the update is below one ulp and it moves by a
    whole one instead. ``kept``: the update is one ulp or more, and arrives with at most half an ulp of error.
    ``overflow``: the sum is beyond the largest number. ``underflow``: the gradient is not zero, and becomes zero in the
    format. ``none``: the update is zero. Of stochastic rounding, ``chance``: below one ulp, right on average;
    ``biased``: not right on average, as N random bits do not hold the share of the ulp.
    """

    LOST = "lost"
    DISTORTED = "distorted"
    KEPT = "kept"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    NONE = "none"
    CHANCE = "chance"
    BIASED = "biased"


@dataclass(frozen=True)
class Threshold:
    """The smallest size of an update that moves a weight; `inclusive` tells whether that size itself does.

    `tie` is the size at which the sum lies halfway to the neighbour, where nearest rounding decides.
    """

    size: Fraction
    inclusive: bool
    spacing: Fraction
    tie: Fraction


@dataclass(frozen=True)
class Trajectory:
    """A weight over the steps: its value after the steps in `shown`, and the last value.

    `stuck_after` is the number of steps that moved the weight before it stopped changing; None if it did not stop.
    """

    cast: Cast
    shown: tuple[tuple[int, Number], ...]
    last: Number
    stuck_after: int | None


@dataclass(frozen=True)
class WeightUpdate:
    """One update `weight + step`, rounded, its verdict, and `steps` such updates.

    `step` is the exact signed update: +gradient, or -gradient, or -learning_rate * gradient. `spacing_ratio` is |step|
    in units of the spacing in the direction of the step. `threshold` is None if no size in this direction moves the
    weight. `outcomes` are the possible results of a stochastic cast. `expected` is the mean after all steps under
    stochastic rounding with unlimited random bits; None if it is beyond the largest number.
    """

    cast: Cast
    weight: Rounded
    gradient: Rounded
    learning_rate: Fraction | None
    step: Fraction
    upward: bool
    steps: int
    first: Rounded | None
    verdict: Verdict
    threshold: Threshold | None
    trajectory: Trajectory | None
    fp32: Trajectory
    expected: Fraction | None
    outcomes: tuple[Outcome, ...] = ()

    @property
    def spacing_ratio(self) -> Fraction | None:
        """|step| / spacing of the numbers in the direction of the step."""
        return None if self.threshold is None else abs(self.step) / self.threshold.spacing

    @property
    def relative_step(self) -> Fraction | None:
        """|step| / |weight|; None for a weight of zero."""
        return abs(self.step) / self.weight.result.magnitude if self.weight.result.magnitude else None

    @property
    def chance(self) -> Fraction | None:
        """The probability with which stochastic rounding moves the weight to the larger of its two neighbours."""
        total = Number.of(self.weight.result.value + self.step)
        away = round_exact(total, self.cast.with_rounding(Rounding.TOWARD_ZERO))
        if away.quantum_exponent is None:
            return None
        return share_away(
            away.rest, self.cast if self.cast.is_stochastic else self.cast.with_rounding(Rounding.STOCHASTIC)
        )

    @property
    def bias(self) -> Fraction | None:
        """Mean of a stochastic cast's results minus the exact sum; None if one is not finite or without results."""
        return _bias(self.outcomes, self.weight.result.value + self.step) if self.outcomes else None


def _bias(results: tuple[Outcome, ...], total: Fraction) -> Fraction | None:
    if not all(outcome.rounded.result.is_finite for outcome in results):
        return None
    bias = sum((outcome.probability * outcome.rounded.result.value for outcome in results), -total)
    limited = any(outcome.rounded.cast.random_bits for outcome in results) or len(results) == 1
    return bias if limited else Fraction(0)  # otherwise only the error of 160 random bits


def weight_update(
    weight: Given,
    gradient: Given,
    cast: AnyCast,
    *,
    steps: int = 1,
    learning_rate: Fraction | None = None,
    minus: bool = False,
) -> WeightUpdate:
    """Explain `weight + gradient` (the source's sign), `weight - gradient` (`minus`), or `weight - learning_rate *
    gradient`, in a format and `steps` times.

    Weight and gradient are rounded to the format (nearest even) first; learning rate times gradient is exact, and the
    sum is rounded once, as an optimizer does that computes in fp32 and writes 16 bits. The fp32 master weight starts at
    the format's weight and receives the same update. Raises ValueError for an infinite weight or gradient.
    """
    cast = parse_cast(cast)
    if not isinstance(cast.format, FloatFormat) or not cast.format.signed:
        raise InvalidInput(
            f"a weight update is explained in signed float formats (fp16, bf16, e4m3fn, e5m7), not in {cast.format}"
        )
    if not 1 <= steps <= STEPS_LIMIT:
        raise InvalidInput(f"{steps} steps are not possible here: give 1 to {STEPS_LIMIT}")
    start, slope = (_operand(x, cast) for x in (weight, gradient))
    factor = Fraction(1) if learning_rate is None else learning_rate
    sign = -1 if minus or learning_rate is not None else 1
    step = sign * factor * slope.result.value
    current = start.result
    # the intended direction, even if the gradient has become zero
    upward = slope.given.negative == (sign * factor < 0)
    fp32 = _walk(round_exact(current, "fp32").result, step, parse_cast("fp32"), steps)
    expected: Fraction | None = current.value + steps * step
    if abs(current.value + steps * step) > Fraction(cast.format.maximum):
        expected = None
    threshold = _threshold(current, upward, cast.with_rounding(Rounding.NEAREST_EVEN) if cast.is_stochastic else cast)
    given = (cast, start, slope, learning_rate, step, upward, steps)
    of_zero = Verdict.UNDERFLOW if slope.given.magnitude and not slope.result.magnitude else Verdict.NONE
    if cast.is_stochastic:
        both = outcomes(_sum(current, step), cast)
        verdict = _verdict_of_chance(both, current, step, threshold) if step else of_zero
        return WeightUpdate(*given, None, verdict, threshold, None, fp32, expected, both)
    first = round_exact(_sum(current, step), cast)
    verdict = _verdict(first, current, step, threshold) if step else of_zero
    return WeightUpdate(*given, first, verdict, threshold, _walk(current, step, cast, steps), fp32, expected)


def _operand(value: Given, cast: Cast) -> Rounded:
    number = Number.of(value, cast.format)
    rounded = round_exact(number, Cast(cast.format, overflow=cast.overflow))
    if not rounded.result.is_finite:
        raise InvalidInput(f"{number} is {rounded.result} in {cast.format}: an update needs finite numbers")
    return rounded


def _sum(current: Number, step: Fraction) -> Number:
    return current if step == 0 else Number.of(current.value + step)


def _verdict_of_chance(
    results: tuple[Outcome, ...], current: Number, step: Fraction, threshold: Threshold | None
) -> Verdict:
    if any(outcome.rounded.overflowed for outcome in results):
        return Verdict.OVERFLOW
    if all(are_equal(outcome.rounded.result, current) for outcome in results):
        return Verdict.LOST
    if _bias(results, current.value + step):
        return Verdict.BIASED
    return Verdict.CHANCE if threshold is not None and abs(step) < threshold.spacing else Verdict.KEPT


def _verdict(first: Rounded, current: Number, step: Fraction, threshold: Threshold | None) -> Verdict:
    below_one_ulp = threshold is not None and abs(step) < threshold.spacing
    if are_equal(first.result, current):
        return Verdict.LOST
    if not first.result.is_finite:
        return Verdict.OVERFLOW
    return Verdict.DISTORTED if below_one_ulp and not first.is_exact else Verdict.KEPT


def _threshold(current: Number, upward: bool, cast: Cast) -> Threshold | None:
    """Return where rounding starts to move the weight: just above 0, at the tie, or at the neighbour."""
    assert isinstance(cast.format, FloatFormat)
    spacing = _spacing(current, upward, cast.format)
    direction = 1 if upward else -1

    def moves(size: Fraction) -> bool:
        return not are_equal(round_exact(_sum(current, direction * size), cast).result, current)

    tie, little = spacing / 2, spacing / 1024
    if moves(little):
        return Threshold(Fraction(0), False, spacing, tie)
    if moves(tie):
        return Threshold(tie, True, spacing, tie)
    if moves(tie + little):
        return Threshold(tie, False, spacing, tie)
    return Threshold(spacing, True, spacing, tie) if moves(spacing) else None


def _spacing(current: Number, upward: bool, format: FloatFormat) -> Fraction:
    """Return the distance to the neighbour in one direction; below a power of two it is half the distance above."""
    if not current.magnitude:
        return Fraction(format.smallest)
    exponent = floor_log2(current.magnitude)
    toward_zero = upward == current.negative
    if toward_zero and current.magnitude == Fraction(2) ** exponent:
        if exponent == format.min_exponent and not format.subnormals:
            return current.magnitude
        exponent -= 1
    return Fraction(2) ** (max(exponent, format.min_exponent) - format.mantissa_bits)


def _walk(current: Number, step: Fraction, cast: Cast, steps: int) -> Trajectory:
    """Repeat the rounded update until it changes nothing."""
    wanted = {0, 1, 2, 3, steps} | {10**n for n in range(1, 6) if 10**n < steps}
    shown: list[tuple[int, Number]] = [(0, current)]
    for index in range(1, steps + 1):
        following = round_exact(_sum(current, step), cast).result
        if are_equal(following, current) or not following.is_finite:
            shown += [(index, following)] if index == 1 or not following.is_finite else []
            shown += [(steps, following)] if shown[-1][0] != steps else []
            return Trajectory(cast, tuple(shown), following, index - (0 if not following.is_finite else 1))
        current = following
        if index in wanted:
            shown.append((index, current))
    return Trajectory(cast, tuple(shown), current, None)
