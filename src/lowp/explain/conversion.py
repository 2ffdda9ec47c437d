"""Conversion of one number to a format: the bits kept, the bits cut, and the rule that decided."""

from dataclasses import dataclass
from fractions import Fraction

from lowp.casts import Cast, doubles
from lowp.casts import parse as parse_cast
from lowp.errors import InvalidInput
from lowp.explain.exact import AnyCast, Outcome, Rounded, difference, outcomes, round_exact
from lowp.explain.numbers import Given, Number, floor_log2
from lowp.formats import FloatFormat, PowerOfTwo, ScaledFormat
from lowp.formats import parse as parse_format


@dataclass(frozen=True)
class SharedScale:
    """The scale of a format with a shared scale: a positive number, and who chose it."""

    value: Fraction
    chosen_by: str

    @property
    def exponent(self) -> int | None:
        """log2 of the scale; None if the scale is not a power of two."""
        exponent = floor_log2(self.value)
        return exponent if self.value == Fraction(2) ** exponent else None


@dataclass(frozen=True)
class Conversion:
    """A number in a format.

    `outcomes` has one entry, or two for a stochastic cast without a random number; `rounded` is the likelier one. With
    a shared scale they round number / scale. `via` is the preceding rounding, if one was requested, and `direct` the
    result without it. `through_fp32` is the result of number -> fp32 -> format if it differs.
    """

    given: Number
    cast: Cast
    outcomes: tuple[Outcome, ...]
    source: FloatFormat | None = None
    scale: SharedScale | None = None
    via: Rounded | None = None
    direct: Rounded | None = None
    through_fp32: Rounded | None = None

    @property
    def rounded(self) -> Rounded:
        """The rounding that gave the result (the likelier of two)."""
        return self.outcomes[0].rounded

    @property
    def code(self) -> int | None:
        """The bits of the result; with a shared scale, those of the element."""
        return self.rounded.code

    @property
    def result(self) -> Number:
        """The value of the result, including a shared scale."""
        element = self.rounded.result
        if self.scale is None or not element.is_finite:
            return element
        return Number(element.magnitude * self.scale.value, element.negative)

    @property
    def held(self) -> Number | None:
        """What a tensor of fp32 holds for an element times its scale that is no number of fp32; None for others."""
        held = round_exact(self.result, "fp32:saturate")
        return None if self.scale is None or held.is_exact else held.result

    @property
    def error(self) -> Fraction | None:
        """result - given, over all roundings; None if one of them is not finite."""
        return difference(self.result, self.given)

    @property
    def error_ulp(self) -> Fraction | None:
        """The error in units of the last place of the format at the given number."""
        error, exponent = self.error, self.rounded.ulp_exponent
        if error is None or exponent is None:
            return None
        return error / (Fraction(2) ** exponent * (self.scale.value if self.scale else 1))

    @property
    def relative_error(self) -> Fraction | None:
        """|error| / |given|; None for a given zero."""
        return None if self.error is None or not self.given.magnitude else abs(self.error) / self.given.magnitude

    @property
    def rounded_twice_differs(self) -> bool:
        """Whether the rounding in between changed the result."""
        return self.direct is not None and self.direct.code != self.code


def convert(
    value: Given,
    to: AnyCast,
    *,
    via: AnyCast | None = None,
    source: FloatFormat | str | None = None,
    exponent: int | None = None,
    scale: Fraction | None = None,
    random: Fraction | None = None,
) -> Conversion:
    """Explain a number in a format.

    `via`: a cast that is done first, such as fp32. `source`: the format whose number or bit pattern `value` is. A
    format with a shared scale takes it as `exponent` (2**exponent) or `scale`, and otherwise that of a tensor with this
    number as its largest. `random` in [0, 1) decides a stochastic cast. Raises ValueError for what contradicts itself.
    """
    source_format = None if source is None else parse_format(source)
    number = Number.of(value, source_format)
    cast = parse_cast(to)
    before = number
    first = None
    if via is not None:
        middle = parse_cast(via)
        if isinstance(middle.format, ScaledFormat) or middle.is_stochastic:
            raise InvalidInput(
                f"--via {middle}: give a format without a shared scale and a rounding that is not stochastic"
            )
        first = round_exact(number, middle)
        before = first.result
    shared = _scale(before, cast, exponent, scale)
    scaled, direct = (_divide(x, shared) for x in (before, number))
    results = outcomes(scaled, cast.element_cast, random)
    certain = len(results) == 1
    return Conversion(
        number,
        cast,
        results,
        source_format if isinstance(source_format, FloatFormat) else None,
        shared,
        first,
        outcomes(direct, cast.element_cast, random)[0].rounded if first is not None and certain else None,
        _through_fp32(number, results[0].rounded) if first is None and shared is None and certain else None,
    )


def _divide(number: Number, scale: SharedScale | None) -> Number:
    if scale is None or not number.is_finite:
        return number
    return Number(number.magnitude / scale.value, number.negative)


def _through_fp32(number: Number, result: Rounded) -> Rounded | None:
    if not isinstance(result.format, FloatFormat) or result.format.mantissa_bits >= 23 or result.cast.is_stochastic:
        return None
    twice = round_exact(round_exact(number, "fp32").result, result.cast)
    return twice if twice.code != result.code else None


def _scale(number: Number, cast: Cast, exponent: int | None, scale: Fraction | None) -> SharedScale | None:
    if not isinstance(cast.format, ScaledFormat):
        if exponent is not None or scale is not None:
            raise InvalidInput(f"{cast.format} has no shared scale: omit --exponent and --scale")
        return None
    if cast.format.affine:
        raise InvalidInput(
            f"{cast.format} needs the smallest and the largest value of a tensor: it cannot be shown for one number"
        )
    if cast.is_corrected and scale is None:
        raise InvalidInput(
            f"{cast} corrects the scale of a block at random by all its numbers: give --scale, or show {cast.format}"
        )
    if exponent is not None and scale is not None:
        raise InvalidInput("--exponent and --scale both set the shared scale: give one of them")
    low, high = _exponents(cast.format)
    if exponent is not None:
        if not low <= exponent <= high:
            raise InvalidInput(f"{cast.format} has shared exponents from {low} to {high}, not {exponent}")
        return SharedScale(Fraction(2) ** exponent, "given")
    if scale is not None:
        if scale <= 0:
            raise InvalidInput(f"a scale of {scale} is not possible: give a positive number")
        return SharedScale(scale, "given")
    if cast.scaling is not None and cast.scaling.exponent is not None:
        return SharedScale(Fraction(2) ** cast.scaling.exponent, "given by the cast")
    return SharedScale(_current_scale(number, cast, low, high), "for a tensor with this number as its largest")


def _exponents(format: ScaledFormat) -> tuple[int, int]:
    """Return the smallest and largest log2 of a scale that is a power of two."""
    if isinstance(format.scale, PowerOfTwo):
        return format.scale.min_exponent, format.scale.max_exponent
    lowest = format.scale.min_exponent - (format.scale.mantissa_bits if format.scale.subnormals else 0)
    return lowest, format.scale.max_exponent


def _current_scale(number: Number, cast: Cast, low: int, high: int) -> Fraction:
    """Return the scale chosen for this number alone; a power of two is computed from exponents, never by log2.

    OCP MX 1.0 section 6.3 for E8M0 and Das et al. 2018 for integers under one exponent: floor(log2 |x|) - floor(log2
    maximum), and one more by the rule of the cast. Other scales are |x| / maximum, rounded to the scale's format.
    """
    format = cast.format
    assert isinstance(format, ScaledFormat)
    largest = Fraction(format.element.maximum)
    headroom = cast.scaling.headroom if cast.scaling else 0
    if not number.magnitude:
        return Fraction(2) ** (max(low, 0) if high >= 0 and format.scope.kind == "tensor" else low)
    if isinstance(format.scale, PowerOfTwo) or format.scale.mantissa_bits == 0:
        own = floor_log2(number.magnitude)
        exponent = own - floor_log2(largest) + headroom + doubles(number.magnitude / Fraction(2) ** own, cast)
        return Fraction(2) ** min(max(exponent, low), high)
    if cast.scaling is not None and cast.scaling.rule == "4/6":
        return _four_or_six(number.magnitude, headroom, format)
    wanted = number.magnitude * 2**headroom / largest
    if format.outer is None:
        return _in_scales(wanted, format.scale)
    # nvfp4: the outer scale brings the tensor's largest block scale to the largest e4m3, so only fp32 rounds here
    outer = _in_scales(wanted / Fraction(format.scale.maximum), format.outer)
    return round_exact(wanted / outer, f"{format.scale}:saturate").result.value * outer or Fraction(1)


def _in_scales(wanted: Fraction, format: FloatFormat) -> Fraction:
    """Return a scale in its format: at least the smallest normal number, as subnormal ones have few bits."""
    return max(round_exact(wanted, f"{format}:saturate").result.value, Fraction(format.smallest_normal))


def _four_or_six(magnitude: Fraction, headroom: int, format: ScaledFormat) -> Fraction:
    """Return the scale under the rule 4/6, by the error of this number alone."""
    assert isinstance(format.scale, FloatFormat)
    room = Fraction(2) ** floor_log2(Fraction(format.scale.maximum) * 4 / 6)
    outer = None if format.outer is None else _in_scales(magnitude / room / 6, format.outer)
    errors = [(magnitude, Fraction(1))]  # of what is too small for any scale
    for target in (6, 4):
        wanted = magnitude * 2**headroom / target
        scale = _in_scales(wanted, format.scale)
        if outer is not None:
            scale = round_exact(wanted / outer, f"{format.scale}:saturate").result.value * outer
        element = round_exact(magnitude / scale, format.element).result.value if scale else Fraction(0)
        errors.append((abs(element * scale - magnitude), scale))
    return min(errors, key=lambda one: one[0])[1]
