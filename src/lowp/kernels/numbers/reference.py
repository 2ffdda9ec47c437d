"""The definition of every cast in float64, one rule after the other.

The other implementations equal this one bit for bit. It is written for clarity, not speed; kernels/README.md has the
rules.
"""

import functools

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers import philox
from lowp.kernels.numbers.floats import from_integer_parts, integer_parts, narrow, sign_and_magnitude, two_to_the, widen
from lowp.kernels.numbers.packing import wrapped
from lowp.kernels.numbers.philox import Seed

# roundings that overflow beyond the maximum for both signs
BEYOND = {mode for mode in Rounding if mode.is_stochastic} | {Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY}
INWARD = (Rounding.TOWARD_ZERO, Rounding.TO_ODD)


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the values that `cast` makes of `x` into `out`, which may be `x`; see `lowp.quantize`."""
    out.copy_(narrow(values(widen(x), cast, seed), x.dtype))


def encode(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> int:
    """Write the codes of the values into `out`; return the number of NaNs without a code, which become zero."""
    element = cast.element
    rounded = values(widen(x), cast, seed)
    codes = [0 if v != v and not _has_nan(element) else _code(element, v) for v in rounded.flatten().tolist()]
    found = torch.tensor(codes, dtype=torch.int64, device=x.device).reshape(x.shape)
    if isinstance(element, FloatFormat) and element.signed and element.has_nan and element.has_minus_zero:
        negative_nan = rounded.isnan() & sign_and_magnitude(rounded)[0]
        found = torch.where(negative_nan, found | philox.signed(1 << (element.bits - 1)), found)
    out.copy_(wrapped(found, out.dtype))
    return int(rounded.isnan().sum()) if not _has_nan(element) else 0


def decode(codes: Tensor, format: FloatFormat | IntFormat, out: Tensor) -> None:
    """Write the value of every code into `out`, exactly."""
    found = [_value(format, code) for code in codes.flatten().tolist()]
    wide = torch.tensor(found, dtype=torch.float64, device=out.device).reshape(codes.shape)
    out.copy_(narrow(wide, out.dtype))


def statistics(x: Tensor) -> tuple[Tensor, float, float, int, int, int]:
    """Return the exponent histogram, maximum, sum of squares, zeros, NaNs and infinities; see `lowp.statistics`."""
    wide = widen(x).flatten()
    infinite, nan = int(wide.isinf().sum()), int(wide.isnan().sum())
    finite = wide[wide.isfinite()].abs()
    _, significand, exponent = integer_parts(finite)
    leading = torch.frexp(significand.to(torch.float64))[1] - 1 + exponent
    bins = (leading + 127).clamp(0, 254).to(torch.int64)  # that of zero is the lowest, too
    histogram = torch.bincount(bins, minlength=256)
    histogram[255] = infinite + nan
    maximum = float(finite.max()) if len(finite) else 0.0
    return histogram, maximum, float((finite * finite).sum()), int((significand == 0).sum()), nan, infinite


def values(x: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return the fp64 numbers `x` rounded by `cast`, in fp64."""
    element = cast.element
    rounded = _float_values(x, cast, element, seed) if isinstance(element, FloatFormat) else _integers(x, cast, seed)
    return narrow(torch.where(x.isnan(), x, rounded), torch.float64)


def _float_values(x: Tensor, cast: Cast, format: FloatFormat, seed: Seed) -> Tensor:
    negative, significand, exponent = integer_parts(x)
    zero = significand == 0
    leading = torch.frexp(significand.to(torch.float64))[1].to(torch.int64) - 1 + exponent  # floor(log2 |x|)
    below_normal = leading < format.min_exponent
    flushed = below_normal if not format.subnormals else torch.zeros_like(zero)

    # |x| in units of the distance between its neighbours; the exponent has no upper limit
    quantum = leading.clamp(min=format.min_exponent) - format.mantissa_bits
    parity = leading.clamp(min=format.min_exponent - 1) + format.bias if ties_by_code(format) else None
    units = _round(significand, exponent - quantum, negative, cast, seed, parity)
    magnitude = from_integer_parts(torch.where(zero | flushed, 0, units), quantum)
    if not format.has_zero:
        magnitude = torch.where(below_normal, format.smallest_normal, magnitude)

    nan = torch.full_like(x, torch.nan)
    magnitude = torch.where(magnitude > format.maximum, _overflowed(x, negative, cast), magnitude)
    magnitude = torch.where(x.isinf(), _infinite(x, cast), magnitude)
    if not format.signed:
        refused = torch.where(negative & ~zero, True, zero if not format.has_zero else False)
        magnitude = torch.where(refused, nan if format.has_nan else torch.full_like(x, format.minimum), magnitude)
        negative = negative & magnitude.isnan()
    if not format.has_minus_zero:
        negative = negative & (magnitude != 0)
    return torch.where(negative, -magnitude, magnitude)


def ties_by_code(format: FloatFormat) -> bool:
    """Whether "even" refers to the last bit of the exponent field, as the format has no mantissa (as in gfloat, P3109).

    Not so e8m0: as in torch and ml_dtypes, its significand is 1, which is odd, and a tie becomes the larger number.
    """
    return format.mantissa_bits == 0 and format.has_zero


def _overflowed(x: Tensor, negative: Tensor, cast: Cast) -> Tensor:
    """Return the magnitude that replaces overflow (IEEE 754-2019 section 7.4; OCP OFP8 1.0 section 5.2)."""
    element = cast.element
    largest = torch.full_like(x, element.maximum)
    if cast.overflow is Overflow.SATURATE or cast.rounding in INWARD:
        return largest
    beyond = torch.full_like(x, torch.inf if cast.overflow is Overflow.INFINITY else torch.nan)
    if cast.rounding in BEYOND:
        return beyond
    return torch.where(negative == (cast.rounding is Rounding.DOWN), beyond, largest)


def _infinite(x: Tensor, cast: Cast) -> Tensor:
    """Return the magnitude that replaces an infinity."""
    replaced = {Overflow.INFINITY: torch.inf, Overflow.NAN: torch.nan, Overflow.SATURATE: float(cast.element.maximum)}
    return torch.full_like(x, replaced[cast.overflow or Overflow.SATURATE])


def _integers(x: Tensor, cast: Cast, seed: Seed) -> Tensor:
    element = cast.element
    negative, significand, exponent = integer_parts(x)
    if element.bits == 1:
        minus = negative & (significand != 0)
        if cast.is_stochastic:
            # as in _round: of a number below 2**-900 only the sign matters, and zero is as those above it
            minus = ~_is_plus_one(x.abs().clamp(2.0**-900, 1.0) / 2, minus, cast, seed)
        return torch.where(minus, -1.0, 1.0).to(torch.float64)
    # Numbers from 2**53 on are integers, and beyond every integer format; here their significands, which are, too.
    units = _round(significand, exponent.clamp(max=0), negative, cast, seed, None).to(torch.float64)
    rounded = torch.where(negative, -units, units).clamp(element.minimum, element.maximum)
    return torch.where(rounded == 0, 0.0, rounded)


def _round(
    significand: Tensor, shift: Tensor, negative: Tensor, cast: Cast, seed: Seed, parity: Tensor | None
) -> Tensor:
    """Return significand * 2**shift rounded to whole units, int64; `parity` is that of the code, if not the unit's."""
    # Of a number below 2**-900 units it matters only that it is not zero: no mode reads more than 160 bits.
    scaled = significand.to(torch.float64) * two_to_the(shift.clamp(min=-950))
    lower = scaled.floor()
    fraction = scaled - lower  # exact
    odd = (lower if parity is None else parity) % 2 == 1
    mode = cast.rounding
    if mode is Rounding.NEAREST_EVEN:
        away = (fraction > 0.5) | ((fraction == 0.5) & odd)
    elif mode is Rounding.NEAREST_AWAY:
        away = fraction >= 0.5
    elif mode is Rounding.TOWARD_ZERO:
        away = torch.zeros_like(odd)
    elif mode is Rounding.TO_ODD:
        away = (fraction > 0) & ~odd
    elif mode.is_stochastic:
        away = _is_below(fraction, significand, cast, seed)
    else:
        away = (fraction > 0) & (negative == (mode is Rounding.DOWN))
    return lower.to(torch.int64) + away.to(torch.int64)


def _is_below(probability: Tensor, like: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return whether the uniform number of each element is below `probability`, compared over 160 (or N) bits.

    With N bits the probability is truncated to N bits, or rounded half up or half to even (P3109's StochasticA, B, C).
    """
    return _below_digits(_digits(probability)[0], like, cast, seed)


def _digits(fraction: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the first five 32-bit digits after the binary point, and whether nonzero bits follow them."""
    digits = []
    for _ in range(5):
        fraction = fraction * 2.0**32
        digits.append(fraction.floor())
        fraction = fraction - digits[-1]  # exact
    return digits, fraction > 0


def _below_digits(digits: list[Tensor], like: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return whether the uniform number is below these digits."""
    first = philox.words(like, seed)
    if cast.random_bits is not None:
        cut, half = 32 - cast.random_bits, 2.0**31  # half a unit is bit 33 at most, 53 bits from it on end in digit 2
        share = (digits[0] + (digits[1] >= half) / 2.0) / 2.0**cut
        return first >> cut < _in_units(share, digits[1] % half + digits[2] > 0, cast.rounding)
    below = torch.zeros_like(first, dtype=torch.bool)
    undecided = torch.ones_like(below)
    for word, digit in zip((first, *philox.tail_words(like, seed)), digits, strict=True):
        below = below | (undecided & (word < digit))
        undecided = undecided & (word == digit)
    return below


def _in_units(share: Tensor, more: Tensor, rounding: Rounding) -> Tensor:
    """Return a number of at most 33 bits before and after the point, followed by `more`, rounded to units."""
    lower = share.floor()
    rest = share - lower
    if rounding is Rounding.STOCHASTIC_B:
        return lower + (rest >= 0.5)
    if rounding is Rounding.STOCHASTIC_C:
        return lower + ((rest > 0.5) | ((rest == 0.5) & (more | (lower % 2 == 1))))
    return lower


def _is_plus_one(half: Tensor, minus: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return whether the uniform number is below (1 + x) / 2, in 160 bits; `half` is |x| / 2."""
    digits, more = _digits(half)
    borrow = more.to(torch.float64)
    for place in (4, 3, 2, 1, 0):
        one_half = 2.0**31 if place == 0 else 0.0
        difference = one_half - digits[place] - borrow
        borrow = (difference < 0).to(torch.float64)
        digits[place] = torch.where(minus, difference + borrow * 2.0**32, one_half + digits[place])
    return _below_digits(digits, half, cast, seed)


def _has_nan(element: FloatFormat | IntFormat) -> bool:
    return isinstance(element, FloatFormat) and element.has_nan


def _code(element: FloatFormat | IntFormat, value: float) -> int:
    return philox.signed(element.encode(value)) if isinstance(element, FloatFormat) else int(value)


@functools.lru_cache(maxsize=1 << 16)
def _value(element: FloatFormat | IntFormat, code: int) -> float:
    if isinstance(element, IntFormat):
        return float(code)
    return element.decode(code)
