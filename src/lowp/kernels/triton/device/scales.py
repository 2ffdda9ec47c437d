"""The scales of groups of numbers: powers of two, or ratios of maxima rounded to a format."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import widened
from lowp.kernels.triton.device.rounding import cast
from lowp.kernels.triton.device.usual import bits_of, float_of, inverted


@triton.jit
def wide_of(magnitude):
    """Return fp32 numbers, given by their bits, in fp64, including subnormal numbers on devices that flush them."""
    return widened(magnitude).to(tl.float64, bitcast=True)


@triton.jit
def to_odd(wide):
    """Return positive fp64 numbers as the bits of fp32, rounded to odd: a rounding to 22 bits or less may follow.

    NaN stays NaN; larger numbers become the largest finite one.
    """
    near = tl.where(wide > 3.4028234663852886e38, 3.4028234663852886e38, wide).to(tl.float32)
    bits = bits_of(near) & 0x7FFFFFFF
    back = wide_of(bits)
    even = (bits & 1) == 0
    bits = tl.where(even & (back < wide), bits + 1, bits)
    bits = tl.where(even & (back > wide), bits - 1, bits)
    return tl.where(wide != wide, 0x7FC00000, bits)


@triton.jit
def power_of_two(largest, sharing):
    """Return the exponents of groups, given the bits of their largest finite magnitudes.

    Subnormal numbers and zeros count as 2**-127, since their scale is the smallest in any case. What is added to the
    bits doubles scales by some rules.
    """
    exponent = ((largest + sharing.carry) >> 23) - 127 - sharing.top
    return tl.minimum(tl.maximum(exponent, sharing.lowest), sharing.highest)


@triton.jit
def power_bits(exponent):
    """Return the bits of 2**exponent in fp32, for -149 to 127: those below -126 are subnormal."""
    one = (exponent & 0) + 1
    return tl.where(exponent < -126, one << tl.maximum(exponent + 149, 0), (exponent + 127) << 23)


@triton.jit
def ratio(largest, outer, numbers, sharing, SHARING: tl.constexpr):
    """Return the bits of largest / maximum of the element (/ outer), rounded to the format of the scale, in fp32.

    A maximum has at most 8 bits, so that a quotient is 2**-33 of itself away from midpoints of fp32, but for those that
    fp32 represents: 48 bits of the maximum's inverse suffice.
    """
    if SHARING.outer:
        found = _rounded_ratio(largest, outer, numbers, sharing, SHARING)
    else:
        inverse = (largest & 0).to(tl.float64) + sharing.inverse + sharing.inverse_rest
        near = tl.minimum(bits_of((float_of(largest).to(tl.float64) * inverse).to(tl.float32)), 0x7F7FFFFF)
        found = tl.where(largest == 0, 0x3F800000, tl.maximum(near, 0x00800000))
    return found


@triton.jit
def _to_scales(magnitude, numbers, FORM: tl.constexpr):
    """Return magnitudes rounded to nearest; of numbers that are not negative no sign is looked at."""
    found, _sign = cast(magnitude, magnitude, 0, 0, numbers, FORM, 1)  # nothing is drawn
    return found


@triton.jit
def _rounded_ratio(largest, outer, numbers, sharing, SHARING: tl.constexpr):
    """Return ratios of groups rounded to the few bits of the scale's format.

    In fp32 between two bounds, or divided in fp64 where these are rounded differently. Six operations are in error by
    2**-24 or 2**-23 each, in all by less than 2**-20. Outer scales at the ends of fp32's range are left to fp64.
    """
    FORM: tl.constexpr = SHARING.form  # Triton 3.6 passes no tuple out of a tuple
    divisor = float_of((largest & 0) + bits_of(outer)) * sharing.maximum
    inverse = inverted(divisor)
    low, high = (
        float_of(largest) * (inverse * 0.99999904632568359375),
        float_of(largest) * (inverse * 1.00000095367431640625),
    )
    found = _to_scales(bits_of(low) & 0x7FFFFFFF, numbers, FORM)
    other = _to_scales(bits_of(high) & 0x7FFFFFFF, numbers, FORM)
    is_plain = (bits_of(divisor) >= 0x01000000) & (bits_of(divisor) < 0x7E000000)
    if tl.reduce(((found != other) | (is_plain == 0)).to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        if SHARING.again:
            wide = wide_of(largest) / sharing.maximum / outer.to(tl.float64)
            found = _to_scales(to_odd(wide), numbers, FORM)
        else:
            found = found ^ 1
    return found
