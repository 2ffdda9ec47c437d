"""Casts of single numbers in rational arithmetic: an oracle for the kernels that shares no code with them.

Also the inputs on which kernels are compared: every code of a format, every midpoint, their neighbours, and specials.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding, possible_overflows
from lowp.formats import FORMATS, FloatFormat, IntFormat, ScaledFormat, Specials, parse

ROWS = [row for row in FORMATS.values() if not isinstance(row, ScaledFormat)]
SPELLED = ["e5m7", "e4m3b11fnuz", "e3m0finite", "e3m0fn", "ue5m3", "ue4m3finite", "ue4m0finite", "ue8m0b130fn"]
SPELLED += [
    "e4m3nuz",
    "ue5m3nuz",
    "ue5m3fnuz",
    "e7m0nuz",
    "ue8m0nuz",
    "e1m6nuz",
    "ue1m7fnuz",
    "e1m4finite",
    "ue4m0fnuz",
]
SPELLED += ["e8m3b130", "e8m10ftz", "e2m5fn", "e8m2b140finite", "i8", "i8s", "i4s", "i2s", "i1", "i16", "i25", "i32"]
FORMATS_TRIED: list[FloatFormat | IntFormat] = [*ROWS, *(parse(name) for name in SPELLED)]  # type: ignore[list-item]

# with their random bits: few, as many as fp32's significand, and all
ROUNDINGS: list[tuple[Rounding, int | None]] = [
    *((rounding, None) for rounding in Rounding if rounding not in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C)),
    *((rounding, bits) for rounding in Rounding if rounding.is_stochastic for bits in (1, 8, 24, 32)),
]

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
INTEGERS[torch.bfloat16] = torch.int16


def bits(x: Tensor) -> Tensor:
    """Return the bits of floating-point numbers, so that -0, NaNs and their signs are told apart."""
    return x.contiguous().view(INTEGERS[x.dtype])


def casts(format: FloatFormat | IntFormat) -> Iterator[Cast]:
    """Yield every cast to a format: all roundings, also with few random bits, and all overflows."""
    for overflow in possible_overflows(format):
        for rounding, random_bits in ROUNDINGS:
            yield Cast(format, rounding, overflow, None, random_bits)


def inputs(
    format: FloatFormat | IntFormat, dtype: torch.dtype, random: int = 300, at_most: int | None = None
) -> Tensor:
    """Return every code (a sample above 11 bits), midpoint and neighbour of a format, random bits and specials.

    If there are more codes and midpoints, about `at_most` are taken, which include the limits of the format.
    """
    generator = torch.Generator().manual_seed(1)
    if isinstance(format, IntFormat):
        step = max(1, format.maximum // 100)
        points = [float(v) for v in range(format.minimum, format.maximum + 1, step)] + [float(format.maximum)]
        points = _thinned([*points, *(p + 0.5 for p in points)], at_most)
        points += [format.minimum - 0.5, format.maximum + 0.5, 0.25, -0.75, 1e-9, -1e-9, 1e-30, -1e-30, 2.0**40]
    else:
        count = 1 << format.bits
        codes = range(count) if format.bits <= 11 else [i * 0x9E3779B97F4A7C15 % count for i in range(700)]
        values = [format.decode(code) for code in codes]
        top = [format.maximum, format.smallest_normal, format.smallest, format.smallest / 2]
        finite = sorted({v for v in [*values, *top] if math.isfinite(v)})
        halves = [low / 2 + high / 2 for low, high in itertools.pairwise(finite)]
        beyond = format.maximum + format.ulp(format.maximum) * 0.5
        points = [*_thinned(finite + halves, at_most), beyond, beyond + format.ulp(format.maximum) * 0.5]
        points += [] if at_most is None else top
        points += [-p for p in points]
    carrier = INTEGERS[dtype]
    near = torch.tensor(points, dtype=torch.float64).to(dtype).view(carrier)
    limits = torch.iinfo(carrier)
    noise = torch.randint(limits.min, limits.max, (random,), generator=generator, dtype=torch.int64).to(carrier)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan], dtype=dtype).view(carrier)
    odd_nans = torch.tensor([limits.max, -1], dtype=carrier)
    return torch.cat([near - 1, near, near + 1, noise, special - 1, special, special + 1, odd_nans]).view(dtype)


def _thinned(points: list[float], at_most: int | None) -> list[float]:
    """Return about `at_most` of them, evenly spaced with an odd step, so that odd and even ones are included."""
    return points if at_most is None else points[:: max(1, len(points) // at_most) | 1]


def exact_cast(value: float, cast: Cast, uniform: Fraction | None = None) -> float:
    """Return one number after a cast; `uniform` in [0, 1) is the random number of stochastic rounding."""
    format = cast.element
    negative = math.copysign(1.0, value) < 0
    if math.isnan(value):
        return value
    if isinstance(format, IntFormat):
        return _exact_integer(value, cast, format, uniform)
    if not format.signed and negative and value != 0:
        return -math.nan if format.has_nan else format.minimum
    if value == 0:
        if not format.has_zero:
            return math.copysign(math.nan, value) if format.has_nan else format.minimum
        return math.copysign(0.0, value) if format.has_minus_zero else 0.0
    if math.isinf(value):
        return _beyond(cast, format, negative, finite=False)
    rounded = _exact_magnitude(abs(Fraction(value)), cast, format, negative, uniform)
    if rounded > Fraction(format.maximum):
        return _beyond(cast, format, negative, finite=True)
    if rounded == 0 and not format.has_minus_zero:
        return 0.0
    return -float(rounded) if negative else float(rounded)


def _exact_magnitude(
    size: Fraction, cast: Cast, format: FloatFormat, negative: bool, uniform: Fraction | None
) -> Fraction:
    smallest_normal = Fraction(2) ** format.min_exponent
    if size < smallest_normal and not format.subnormals:
        return Fraction(0) if format.has_zero else smallest_normal
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, format.min_exponent) - format.mantissa_bits)
    lower = size // unit
    # Without a mantissa the last bit of the code is that of the exponent; e8m0 does as torch and ml_dtypes do.
    by_code = format.mantissa_bits == 0 and format.has_zero and lower > 0
    is_odd = bool((exponent + format.bias if by_code else lower) % 2)
    return (lower + _goes_away(size / unit - lower, is_odd, negative, cast, uniform)) * unit


def _goes_away(fraction: Fraction, is_odd: bool, negative: bool, cast: Cast, uniform: Fraction | None) -> bool:
    half = Fraction(1, 2)
    if cast.is_stochastic:
        assert uniform is not None
        return uniform < _share(fraction, cast)
    return {
        Rounding.NEAREST_EVEN: fraction > half or (fraction == half and is_odd),
        Rounding.NEAREST_AWAY: fraction >= half,
        Rounding.TOWARD_ZERO: False,
        Rounding.UP: fraction > 0 and not negative,
        Rounding.DOWN: fraction > 0 and negative,
        Rounding.TO_ODD: fraction > 0 and not is_odd,
    }[cast.rounding]


def _share(fraction: Fraction, cast: Cast) -> Fraction:
    """Return the probability that N random bits give a fraction (IEEE P3109 StochasticA, B and C)."""
    places = 1 << (cast.random_bits or 160)
    units, rest = divmod(fraction * places, 1)
    if cast.rounding is Rounding.STOCHASTIC_B:
        units += rest >= Fraction(1, 2)
    elif cast.rounding is Rounding.STOCHASTIC_C:
        units += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and units % 2 == 1)
    return Fraction(units, places)


def _beyond(cast: Cast, format: FloatFormat, negative: bool, finite: bool) -> float:
    sign = -1.0 if negative else 1.0
    towards = (Rounding.TOWARD_ZERO, Rounding.TO_ODD, Rounding.UP if negative else Rounding.DOWN)
    if cast.overflow is Overflow.SATURATE or (finite and cast.rounding in towards):
        return sign * format.maximum
    return math.copysign(math.inf if cast.overflow is Overflow.INFINITY else math.nan, sign)


def _exact_integer(value: float, cast: Cast, format: IntFormat, uniform: Fraction | None) -> float:
    if format.bits == 1:
        if not cast.is_stochastic or abs(value) >= 1:
            return -1.0 if value < 0 else 1.0
        assert uniform is not None
        return 1.0 if uniform < _share((1 + Fraction(value)) / 2, cast) else -1.0
    if math.isinf(value):
        return float(format.maximum if value > 0 else format.minimum)
    size, negative = abs(Fraction(value)), value < 0
    lower = size // 1
    rounded = lower + _goes_away(size - lower, bool(lower % 2), negative, cast, uniform)
    return float(min(max(-rounded if negative else rounded, format.minimum), format.maximum))


def philox(seed: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Return one Philox-4x32-10 block, written from Salmon et al. 2011, section 4.2."""
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    words = list(counter)
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ key[0], second, first >> 32 ^ words[3] ^ key[1], first]
        words = [word & 0xFFFFFFFF for word in words]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


@functools.lru_cache(maxsize=10_000)
def uniform(seed: int, index: int, random_bits: int | None) -> Fraction:
    """Return the random number of element `index`: 160 bits, or the first `random_bits`."""
    first = philox(seed, (index // 4 & 0xFFFFFFFF, index // 4 >> 32, 0, 0))[index % 4]
    if random_bits is not None:
        return Fraction(first >> (32 - random_bits), 1 << random_bits)
    number = first
    for word in philox(seed, (index & 0xFFFFFFFF, index >> 32, 1, 0)):
        number = number << 32 | word
    return Fraction(number, 1 << 160)


def has_nan_sign(format: FloatFormat) -> bool:
    """Whether the codes of a format distinguish NaNs of both signs."""
    return format.signed and format.specials in (Specials.IEEE, Specials.FN)
