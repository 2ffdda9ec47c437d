"""Casts by integer arithmetic on the bits, in torch operations: any device, compiles, equal to `reference` to the bit.

A number is its magnitude bits: as an integer they count the representable numbers from zero, through the subnormals,
to infinity. Rounding clears the low bits that the format lacks and perhaps adds one at the place above; a carry out of
the mantissa raises the exponent by itself. fp32 runs in int32, fp64 in int64, fp16 and bf16 as fp32.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding
from lowp.compat import has_fp64
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers import philox
from lowp.kernels.numbers.floats import (
    CARRIERS,
    Carrier,
    from_integer_parts,
    integer_parts,
    narrow,
    sign_and_magnitude,
    widen,
    widen16,
    with_sign,
)
from lowp.kernels.numbers.packing import SIGNED, wrapped
from lowp.kernels.numbers.philox import Seed
from lowp.kernels.numbers.reference import INWARD, ties_by_code


class Parameters(NamedTuple):
    """The parameters of a cast in the bits of one carrier dtype."""

    carrier: Carrier
    min_exponent: int  # below it the distance between neighbours is constant
    dropped: int  # mantissa bits that a normal number loses
    quantum: int  # the bits of the smallest distance between neighbours
    flush_below: int  # smaller magnitudes become zero, or the smallest number if there is no zero
    parity_offset: int | None  # added to the exponent field, gives the parity of a code without mantissa
    maximum: int  # largest magnitude of a positive and of a negative number
    minimum: int
    refused: int  # result for numbers that an unsigned format cannot hold


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the result of casting `x` into `out`, which may be `x`; see `lowp.quantize`."""
    out.copy_(quantized(x, cast, seed))


def encode(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> int:
    """Write the codes of the values into `out`. Return the number of NaNs without a code; their code is zero."""
    element = cast.element
    # codes exist also where the dtype of x cannot hold the values
    rounded = quantized(widen(x) if _needs_fp64(cast) else widen16(x), cast, seed)
    is_nan = rounded.isnan()
    if isinstance(element, IntFormat):
        codes = torch.where(is_nan, 0.0, rounded).to(CARRIERS[rounded.dtype].integer)
    else:
        codes = _codes(rounded, is_nan, element)
    out.copy_(wrapped(codes, out.dtype))
    return 0 if isinstance(element, FloatFormat) and element.has_nan else int(is_nan.sum())


def decode(codes: Tensor, format: FloatFormat | IntFormat, out: Tensor) -> None:
    """Write the value of every code into `out`, exactly."""
    out.copy_(decoded(codes, format, out.dtype))


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the exponent histogram, maximum, sum of squares, zeros, NaNs and infinities; see `lowp.statistics`."""
    x = widen16(x.flatten())
    carrier = CARRIERS[x.dtype]
    _, magnitude = sign_and_magnitude(x)
    zero, finite = magnitude == 0, magnitude < carrier.infinity
    field = (magnitude >> carrier.mantissa_bits) + (127 - carrier.bias)
    bins = torch.where(finite, torch.where(zero, 0, field.clamp(0, 254)), 255).to(torch.int64)
    histogram = torch.zeros(256, dtype=torch.int64, device=x.device)
    histogram = histogram.scatter_add(0, bins, torch.ones_like(bins))
    known = torch.where(finite, magnitude, 0)
    wide = known.view(x.dtype)
    wide = widen(wide) if has_fp64(x.device.type) else wide
    largest = wide.amax() if x.numel() else wide.sum()
    infinite = magnitude == carrier.infinity
    return histogram, largest, (wide * wide).sum(), zero.sum(), (~finite & ~infinite).sum(), infinite.sum()


def quantized(x: Tensor, cast: Cast, seed: Seed = 0) -> Tensor:
    """Return the result of casting `x`, in x's dtype, without reading the data on the host."""
    return apply(x, cast, parameters(cast, x.dtype), seed)


def apply(x: Tensor, cast: Cast, prepared: Parameters, seed: Seed = 0) -> Tensor:
    """Do `quantized` with given parameters; nothing here breaks a compiled graph."""
    dtype = x.dtype
    x = widen16(x)
    if prepared.carrier.integer.itemsize > x.dtype.itemsize:
        x = widen(x)
    negative, magnitude = sign_and_magnitude(x)
    bits, negative = _cast_bits(x, negative, magnitude, cast, prepared, seed)
    result = with_sign(bits, negative, x.dtype)
    return result if result.dtype == dtype else narrow(result, dtype)


def decoded(codes: Tensor, format: FloatFormat | IntFormat, dtype: torch.dtype) -> Tensor:
    """Return the values of the codes, exactly, in `dtype`."""
    wide = torch.float64 if dtype == torch.float64 or _needs_fp64(Cast(format)) else torch.float32
    code = codes.view(SIGNED[codes.dtype.itemsize]).to(CARRIERS[wide].integer)
    if isinstance(format, IntFormat):
        return narrow(code.to(wide), dtype)
    mantissa = code & ((1 << format.mantissa_bits) - 1)
    field = (code >> format.mantissa_bits) & ((1 << format.exponent_bits) - 1)
    negative = ((code >> (format.bits - 1)) & 1 == 1) if format.signed else torch.zeros_like(code, dtype=torch.bool)
    hidden = torch.where((field > 0) | (not format.has_zero), 1 << format.mantissa_bits, torch.zeros_like(code))
    significand = torch.where((field == 0) & format.has_zero & (not format.subnormals), 0, mantissa | hidden)
    exponent = (field - format.bias).clamp(min=format.min_exponent) - format.mantissa_bits
    value = from_integer_parts(significand, exponent, wide)
    value = _specials_decoded(value, code, format)
    negative = negative & ~(value.isnan() & (not format.has_minus_zero))
    _, magnitude = sign_and_magnitude(value)
    return narrow(with_sign(magnitude, negative, wide), dtype)


def _specials_decoded(value: Tensor, code: Tensor, format: FloatFormat) -> Tensor:
    """Return the values with unsigned infinities and NaNs in place of their codes."""
    infinity, nan, all_ones = format.infinity_code, format.nan_code, (1 << (format.bits - format.signed)) - 1
    if infinity is not None:
        value = torch.where(code & all_ones == infinity, torch.inf, value)
        value = torch.where(code & all_ones > infinity, torch.nan, value)
    if nan is not None:  # all ones, or the code of minus zero; above infinity it is one already
        value = torch.where(code & (nan | all_ones) == nan, torch.nan, value)
    return value


@functools.lru_cache(maxsize=1024)
def parameters(cast: Cast, dtype: torch.dtype) -> Parameters:
    """Return the bit parameters of a cast for tensors of `dtype`: those of fp64 if fp32's bits are too narrow."""
    element = cast.element
    carrier = CARRIERS[torch.float64 if dtype == torch.float64 or _needs_fp64(cast) else torch.float32]
    bits = carrier.bits
    if isinstance(element, IntFormat):
        # The integers are the numbers of a format whose neighbours are 1 apart everywhere: all "subnormal".
        largest, lowest = bits(float(element.maximum)), bits(-float(element.minimum))
        return Parameters(carrier, carrier.mantissa_bits, 0, bits(1.0), 0, None, largest, lowest, lowest)
    return Parameters(
        carrier,
        element.min_exponent,
        carrier.mantissa_bits - element.mantissa_bits,
        bits(2.0 ** (element.min_exponent - element.mantissa_bits)),
        0 if element.subnormals else bits(element.smallest_normal),
        element.bias - carrier.bias if ties_by_code(element) else None,
        bits(element.maximum),
        bits(element.maximum),
        carrier.nan if element.has_nan or element.signed else bits(element.minimum),
    )


def _needs_fp64(cast: Cast) -> bool:
    """Whether fp32 bits are too narrow: finer or wider formats, and those with normal numbers below fp32's."""
    element, carrier = cast.element, CARRIERS[torch.float32]
    if isinstance(element, IntFormat):
        return element.bits > carrier.precision or (element.bits == 1 and cast.is_stochastic)
    return (
        element.mantissa_bits > carrier.mantissa_bits
        or element.min_exponent < carrier.min_exponent
        or element.max_exponent > carrier.max_exponent
    )


def _cast_bits(
    x: Tensor, negative: Tensor, magnitude: Tensor, cast: Cast, p: Parameters, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Return the magnitude bits of the values, and which of them are negative."""
    element, carrier = cast.element, p.carrier
    if isinstance(element, IntFormat) and element.bits == 1:
        return _binary(x, negative, magnitude, cast, p, seed)
    rounded = _round(magnitude, negative, cast, p, seed)
    if p.flush_below:
        smallest = 0 if element.has_zero else p.flush_below
        rounded = torch.where(magnitude < p.flush_below, smallest, rounded)
    rounded = _overflow(rounded, magnitude, negative, cast, p)
    if isinstance(element, FloatFormat) and not element.signed:
        refused = negative & (magnitude != 0)
        if not element.has_zero:
            refused = refused | (magnitude == 0)
        rounded = torch.where(refused, p.refused, rounded)
    rounded = torch.where(magnitude > carrier.infinity, carrier.nan, rounded)
    if isinstance(element, FloatFormat) and not element.signed:
        negative = negative & (rounded > carrier.infinity)
    elif isinstance(element, IntFormat) or not element.has_minus_zero:
        negative = negative & (rounded != 0)
    return rounded, negative


def _round(magnitude: Tensor, negative: Tensor, cast: Cast, p: Parameters, seed: Seed) -> Tensor:
    """Return the magnitudes rounded as if the exponent had no upper limit (fp32: up to infinity's bits)."""
    mantissa_bits = p.carrier.mantissa_bits
    field = magnitude >> mantissa_bits
    exponent = field.clamp(min=1) - p.carrier.bias
    hidden = 1 << mantissa_bits  # not (field > 0) << 52: torch 2.13's inductor shifts a converted bool in 32 bits
    significand = torch.where(field > 0, (magnitude & (hidden - 1)) | hidden, magnitude)

    shift = p.dropped + (p.min_exponent - exponent).clamp(min=0)
    # Beyond mantissa_bits + 2 places nothing but the smallest distance is left to choose: below half, not zero.
    places = shift.clamp(max=mantissa_bits + 2)
    one = torch.ones_like(magnitude)
    lower = significand >> places
    rest = significand & ((one << places) - 1)
    away = _away(lower, rest, shift, places, field, negative, cast, p, seed)

    inside = shift.clamp(max=mantissa_bits)
    step = one << inside
    large = (magnitude & ~(step - 1)) + step * away
    return torch.where(shift > mantissa_bits, away.to(large.dtype) * p.quantum, large)


def _away(
    lower: Tensor,
    rest: Tensor,
    shift: Tensor,
    places: Tensor,
    field: Tensor,
    negative: Tensor,
    cast: Cast,
    p: Parameters,
    seed: Seed,
) -> Tensor:
    """Return whether the larger magnitude is taken, if `rest` out of 2**shift is cut off."""
    mode = cast.rounding
    inexact = rest != 0
    if mode is Rounding.TOWARD_ZERO:
        return torch.zeros_like(negative)
    if mode is Rounding.UP:
        return inexact & ~negative
    if mode is Rounding.DOWN:
        return inexact & negative
    if mode.is_stochastic:
        return _drawn(rest.to(torch.int64), shift.to(torch.int64), cast, seed)
    half = (torch.ones_like(rest) << places) >> 1
    if mode is Rounding.NEAREST_AWAY:
        return inexact & (rest >= half)
    odd = (lower if p.parity_offset is None else torch.where(lower == 0, 0, field + p.parity_offset)) & 1
    if mode is Rounding.TO_ODD:
        return inexact & (odd == 0)
    return inexact & (rest + odd > half)


def _drawn(rest: Tensor, shift: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return whether a uniform number is below rest / 2**shift, compared over 160 (or N) bits."""
    if cast.random_bits is None:
        return _is_below([_digit(rest, shift, place) for place in range(5)], rest, seed)
    return _is_below_units([_digit(rest, shift, place) for place in range(3)], cast, seed)


def _is_below_units(digits: list[Tensor], cast: Cast, seed: Seed) -> Tensor:
    """Return whether the first N bits of the uniform number are below these digits.

    The fraction is cut to N bits, or rounded to them: half up, or half to even (IEEE P3109, StochasticA, B and C).
    Half a unit is bit 33 at most, and 53 bits from it on end in the third digit.
    """
    assert cast.random_bits is not None
    cut = 32 - cast.random_bits
    units, rest = digits[0] >> cut, (digits[0] & ((1 << cut) - 1)) << 32 | digits[1]
    half = 1 << (cut + 31)
    if cast.rounding is Rounding.STOCHASTIC_B:
        units = units + (rest >= half)
    elif cast.rounding is Rounding.STOCHASTIC_C:
        units = units + ((rest > half) | ((rest == half) & ((digits[2] != 0) | (units & 1 == 1))))
    return philox.words(units, seed) >> cut < units


def _is_below(digits: list[Tensor], like: Tensor, seed: Seed) -> Tensor:
    """Return whether the uniform number of each element is below the fraction of these five 32-bit digits."""
    first = philox.words(like, seed)
    below = first < digits[0]
    undecided = first == digits[0]
    if not _may_be_undecided(undecided):
        return below
    for digit, word in zip(digits[1:], philox.tail_words(like, seed), strict=True):
        below = below | (undecided & (word < digit))
        undecided = undecided & (word == digit)
    return below


def _digit(rest: Tensor, shift: Tensor, place: int) -> Tensor:
    """Return the 32 bits at `place` (0 is the first) behind the binary point of rest / 2**shift."""
    up = 32 * (place + 1) - shift
    left = torch.where(up < 32, rest << up.clamp(0, 31), 0)
    return torch.where(up < 0, rest >> (-up).clamp(0, 63), left) & philox.MASK


def _may_be_undecided(undecided: Tensor) -> bool:
    # One number in 2**32 needs more than its first word. Looking saves the work, where looking costs nothing.
    if undecided.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return bool(undecided.any())


def _overflow(rounded: Tensor, magnitude: Tensor, negative: Tensor, cast: Cast, p: Parameters) -> Tensor:
    largest: Tensor | int = p.maximum
    if p.minimum != p.maximum:
        largest = _choose(negative, p.minimum, p.maximum, rounded)
    if cast.overflow is Overflow.SATURATE:
        return torch.where(rounded > largest, largest, rounded)  # infinity, too
    beyond = p.carrier.infinity if cast.overflow is Overflow.INFINITY else p.carrier.nan
    if cast.rounding in INWARD:
        replaced: Tensor | int = largest
    elif cast.rounding in (Rounding.UP, Rounding.DOWN):
        outward = negative if cast.rounding is Rounding.DOWN else ~negative
        replaced = _choose(outward, beyond, p.maximum, rounded)
    else:
        replaced = beyond
    rounded = torch.where(rounded > largest, replaced, rounded)
    return torch.where(magnitude == p.carrier.infinity, beyond, rounded)


def _choose(condition: Tensor, yes: int, no: int, like: Tensor) -> Tensor:
    return torch.where(condition, torch.full_like(like, yes), no)


def _binary(
    x: Tensor, negative: Tensor, magnitude: Tensor, cast: Cast, p: Parameters, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Return the bits and signs of -1 for negative numbers, else +1; stochastic: +1 with probability (x + 1) / 2."""
    minus = negative & (magnitude != 0)
    if cast.is_stochastic:
        plus = _drawn_binary(x, minus, cast, seed)
        minus = torch.where(magnitude < p.quantum, ~plus, minus)  # from 1 on nothing is drawn
    is_nan = magnitude > p.carrier.infinity
    bits = torch.where(is_nan, p.carrier.nan, torch.full_like(magnitude, p.quantum))
    return bits, torch.where(is_nan, negative, minus)


def _drawn_binary(x: Tensor, minus: Tensor, cast: Cast, seed: Seed) -> Tensor:
    """Return whether a uniform number is below (1 + x) / 2 = 1/2 +- |x| / 2, for fp64 |x| < 1."""
    _, significand, exponent = integer_parts(x)
    shift = (1 - exponent).clamp(min=1)  # |x| / 2 = significand / 2**shift
    digits = [_digit(significand, shift, place) for place in range(5)]
    beyond = (shift - 160).clamp(0, 62)
    more = (significand & ((torch.ones_like(significand) << beyond) - 1)) != 0
    borrow = more.to(torch.int64)
    for place in reversed(range(5)):
        difference = (1 << 31 if place == 0 else 0) - digits[place] - borrow
        borrow = (difference < 0).to(torch.int64)
        sum_ = digits[place] + (1 << 31 if place == 0 else 0)
        digits[place] = torch.where(minus, difference & philox.MASK, sum_ & philox.MASK)
    if cast.random_bits is None:
        return _is_below(digits, x, seed)
    return _is_below_units(digits, cast, seed)


def _codes(rounded: Tensor, is_nan: Tensor, format: FloatFormat) -> Tensor:
    """Return the codes of fp64 or fp32 values of a format, in integers of their width; zero for a NaN that has none."""
    carrier = CARRIERS[rounded.dtype]
    negative, magnitude = sign_and_magnitude(rounded)
    field = magnitude >> carrier.mantissa_bits
    hidden = 1 << carrier.mantissa_bits
    significand = torch.where(field > 0, (magnitude & (hidden - 1)) | hidden, magnitude)
    exponent = field.clamp(min=1) - (carrier.bias + carrier.mantissa_bits)
    cut = carrier.mantissa_bits - format.mantissa_bits
    normal = (magnitude >> cut) - ((carrier.bias - format.bias) << format.mantissa_bits)
    places = (format.min_exponent - format.mantissa_bits - exponent).clamp(0, 8 * rounded.dtype.itemsize - 1)
    is_normal = magnitude >= carrier.bits(format.smallest_normal)
    codes = torch.where(is_normal, normal, significand >> places)
    if format.infinity_code is not None:
        codes = torch.where(rounded.isinf(), format.infinity_code, codes)
    if format.nan_code is None:
        codes, negative = torch.where(is_nan, 0, codes), negative & ~is_nan
    elif format.has_minus_zero:
        codes = torch.where(is_nan, format.nan_code, codes)
    else:
        return torch.where(is_nan, format.nan_code, _signed_codes(codes, negative, format))
    return _signed_codes(codes, negative, format)


def _signed_codes(codes: Tensor, negative: Tensor, format: FloatFormat) -> Tensor:
    width = 8 * codes.dtype.itemsize
    sign = 1 << (format.bits - 1) if format.bits < width else -(1 << (width - 1))
    return torch.where(negative, codes | sign, codes) if format.signed else codes
