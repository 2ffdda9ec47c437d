"""Elements under shared scales as they usually are: finite, and not at the ends of fp32's range.

Powers of two are divided out exactly. Where the scale is a ratio of maxima, a number is multiplied by an inverse of it
that is a little too small, so that the product is rounded to the nearest element or to the one below. The midpoint
above that element, times the scale, is subtracted from the number exactly; the difference's sign decides. Programs with
infinities, NaNs or scales at the ends of fp32's range divide, in `scaled`.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.codes import store


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def product_to_odd(element, by, outer, SHARING: tl.constexpr):
    """Return the bits of elements times scales (times the outer scale) in fp32, to odd: a rounding to 16 bits follows.

    A scale of 24 bits is the sum of two parts of 12 bits, by which elements of up to 12 bits are multiplied exactly.
    The difference of the rounded product and the sum of the parts has the correct sign; small scales are scaled up
    before, so that no bit underflows fp32. Overflow becomes infinity, or NaN.
    """
    if SHARING.outer:
        few = float_of(element) * float_of(by)
        scale = outer
    else:
        few = float_of(element)
        scale = float_of(by)
    raise_by = tl.where(scale < 9.094947017729282e-13, 18446744073709551616.0, 1.0)  # 2**-40, 2**64
    upper = float_of(bits_of(scale * raise_by) & -4096)
    lower = scale * raise_by - upper
    near = few * scale
    error = (few * upper - near * raise_by) + few * lower
    return to_odd_of(near, error)


@triton.jit
def divisors(by, highest, outer, SHARING: tl.constexpr):
    """Return the scales of groups (times the outer scale) as an inverse and a sum of two numbers, and which are hard.

    In units of 2**-24, the inverse is in error by two after its correction, its reduction and the product with a number
    by one each, and with an outer scale the divisor by one, in all by five; it is reduced by six. The upper number has
    12 bits, and the lower one the rest: 12 bits, or up to 13 more than the scale within the group. Hard are groups with
    numbers from 2**126 on, with infinities and NaNs among them, and divisors below 2**-60 of numbers that are not zero.
    """
    divisor = float_of(by)
    if SHARING.outer:
        divisor = divisor * outer
    inverse = inverted(divisor) * (1.0 - 3.5762786865234375e-07)
    upper = float_of(bits_of(divisor) & -4096)
    if SHARING.outer:
        inverse = tl.where(by == 0, 0.0, inverse)
        few = float_of(bits_of(outer) & -4096)
        lower = (float_of(by) * few - upper) + float_of(by) * (outer - few)
    else:
        lower = divisor - upper
    hard = (highest >= 0x7E800000) | ((bits_of(divisor) < 0x21800000) & (highest != 0))
    return inverse, upper, lower, hard.to(tl.int32)


@triton.jit
def inverted(divisor):
    """Return 1 / divisor in fp32 but for 2**-23: corrected once, as a device may be in error by two units."""
    inverse = 1.0 / divisor
    return inverse * (2.0 - divisor * inverse)


@triton.jit
def nearest(magnitude, inverse, upper, lower, numbers, LAYOUT: tl.constexpr, SHARING: tl.constexpr):
    """Return elements without sign as the bits of their sums with powers of two whose ulp is the neighbours' distance.

    Also the bits of these powers, and of the elements' binades. A quotient beyond the largest element, which a rounded
    scale makes, is taken for one before the last midpoint, from which the difference leads to the largest element.
    Midpoints have few bits, so that their products with both parts of the divisor are exact, and so is the first
    difference if the midpoint is near; zero is a tie, which moves to the even element.
    """
    value = float_of(magnitude)
    less = value * inverse
    if LAYOUT.integer:
        binade = magnitude & 0  # not read
        power = binade + 0x4B000000  # 2**23
        sum = less + float_of(power)
        middle = (sum - float_of(power)) + 0.5
    else:
        if SHARING.outer:
            less = float_of(tl.minimum(bits_of(less), numbers.maximum - numbers.below_half - 2))
        binade = tl.maximum(bits_of(less) & 0x7F800000, numbers.smallest_normal)
        power = binade + (numbers.dropped << 23)
        sum = less + float_of(power)
        middle = tl.fma(float_of(power), 5.9604644775390625e-08, sum - float_of(power))  # and half an ulp: 2**-24
    rest = tl.fma(-middle, lower, tl.fma(-middle, upper, value))
    bits = bits_of(sum)
    not_above = -bits_of(rest) - (bits & 1)  # negative if the rest is positive, or zero and the element odd
    bits = bits + (not_above.to(tl.uint32) >> 31).to(tl.int32)
    return bits, power, binade


@triton.jit
def put_under_powers(
    out, start, end, quotient, sign, by, numbers, DTYPE: tl.constexpr, SHARING: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Write finite quotients, rounded to nearest even and saturated, times powers of two; return 1 if numbers are lost.

    Those are values that a dtype of 16 bits does not represent.
    """
    size = tl.minimum(quotient, numbers.maximum)
    anchor = tl.maximum(size & 0x7F800000, numbers.smallest_normal) + (numbers.dropped << 23)
    element = (float_of(size) + float_of(anchor)) - float_of(anchor)
    bits = bits_of(element * float_of(by))
    lost = tl.cast(0, tl.int32)
    if DTYPE == "fp32":
        raw = bits | sign
    else:
        if DTYPE == "bf16":
            rest = bits & 0xFFFF
            raw = ((bits | sign) >> 16).to(tl.int16)
        else:
            half = float_of(bits).to(tl.float16)
            rest = bits_of(half.to(tl.float32)) ^ bits
            raw = (half.to(tl.int16, bitcast=True).to(tl.int32) | (sign >> 16)).to(tl.int16)
        if SHARING.loses:
            lost = any_bits(rest, COUNT).to(tl.int32)
    places = start + tl.arange(0, COUNT)
    tl.store(out + places, raw, mask=places < end)
    return lost


@triton.jit
def any_bits(words, COUNT: tl.constexpr):
    """Return whether any of COUNT words is not zero; the maximum of a quarter of them, as `or` costs half of it."""
    one, other = tl.split(tl.reshape(words, (COUNT // 2, 2)))
    one, other = tl.split(tl.reshape(one | other, (COUNT // 4, 2)))
    return tl.reduce((one | other).to(tl.uint32), 0, tl.standard._elementwise_max) > 0


@triton.jit
def put_nearest(
    out, start, end, sign, found, power, binade, by, upper, lower, outer, numbers, codes, DTYPE: tl.constexpr,
    LAYOUT: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    """Write what `nearest` returns: codes, or elements times their scales in the dtype, rounded once in 16 bits.

    The mantissa of a sum is the code but for that of the binade's beginning; the code's other bits are any.
    """
    if SHARING.codes:
        if LAYOUT.integer:
            code = (found ^ (sign >> 31)) - (sign >> 31)
        else:
            above = 24 if LAYOUT.in_byte else 28 if LAYOUT.in_nibble else 31 - codes.sign_place
            side = (sign.to(tl.uint32) >> tl.cast(above, tl.uint32)).to(tl.int32)
            code = found + (binade >> numbers.dropped) - (numbers.smallest_normal >> numbers.dropped) | side
        store(out, start, end, code, LAYOUT)
    else:
        element = float_of(found) - float_of(power)
        side = tl.where(element == 0.0, 0, sign) if LAYOUT.integer else sign
        if DTYPE == "fp32":
            value = element * float_of(by)
            if SHARING.outer:
                value = value * outer
            raw = bits_of(value) | side
        else:
            large = element * upper
            near = tl.fma(element, lower, large)
            bits = to_odd_of(near, tl.fma(element, lower, large - near))
            if DTYPE == "bf16":
                raw = ((bits + 0x7FFF + ((bits >> 16) & 1) | side) >> 16).to(tl.int16)
            else:
                half = float_of(bits).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
                if SHARING.outer:
                    half = tl.minimum(half, 0x7BFF)
                raw = (half | (side >> 16)).to(tl.int16)
        places = start + tl.arange(0, raw.shape[0])
        tl.store(out + places, raw, mask=places < end)


@triton.jit
def to_odd_of(near, error):
    """Return the bits of positive numbers rounded to nearest in fp32 with an error, rounded to odd instead."""
    bits = bits_of(near) + (bits_of(error) >> 31)  # minus one if negative: no difference is -0
    return tl.where(error != 0.0, bits | 1, bits)
