"""Casts with a scale per block or row: maximum, scale, and values or codes, in one read.

Division of fp32 numbers by a scale that is a power of two is exact. Other scales are mostly those of `usual`. Where it
knows no way, division is rounded once, which matters only for a quotient near the midpoint of two elements; these rare
quotients are divided again in fp64. All numbers under one level of scales are where `usual` does not serve.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read
from lowp.kernels.triton.device.codes import direct, encoded, store
from lowp.kernels.triton.device.rounding import cast
from lowp.kernels.triton.device.scales import power_bits, power_of_two, ratio, to_odd, wide_of
from lowp.kernels.triton.device.stochastic import is_undecided
from lowp.kernels.triton.device.usual import (
    bits_of,
    divisors,
    float_of,
    nearest,
    product_to_odd,
    put_nearest,
    put_under_powers,
)


@triton.jit
def finite(magnitude):
    """Return magnitudes, with zeros for infinity and NaN."""
    return tl.where(magnitude < 0x7F800000, magnitude, 0)


@triton.jit
def keep_numbers(x, out, places, end, DTYPE: tl.constexpr):
    """Write numbers that are infinite or NaN again as they are, after what was written of them."""
    tl.debug_barrier()  # other threads may have written there
    magnitude, _sign = read(x, places, places < end, DTYPE, False)  # again: few registers matter more
    mask = (places < end) & (magnitude >= 0x7F800000)
    tl.store(out + places, tl.load(x + places, mask=mask, other=0), mask=mask)


# -- elements ---------------------------------------------------------------------------------------------------------
@triton.jit
def quotients(magnitude, by, outer, SHARING: tl.constexpr):
    """Return the bits of magnitudes / (scale * outer), rounded to fp32; zeros if the scale is zero.

    The scale of a group with a NaN is not zero.
    """
    divisor = float_of(by)
    if SHARING.outer:
        divisor = divisor * outer
    found = bits_of(tl.div_rn(float_of(magnitude), divisor)) & 0x7FFFFFFF
    return tl.where(by == 0, 0, found)


@triton.jit
def _over_power(magnitude, by, SHARING: tl.constexpr):
    """Return magnitudes divided by powers of two; exact from 2**-126 on, far below the midpoints of elements."""
    if SHARING.low:  # scales of 2**-133 to 2**121, whose inverses fp32 does not all represent
        by = bits_of(float_of(by) * 64.0)
    inverse = tl.where(by >= 0x7F000000, 0x00400000, 0x7F000000 - by)
    inverse = tl.where(by < 0x00800000, 0x7F000000, inverse)
    quotient = float_of(magnitude) * float_of(inverse)
    if SHARING.low:
        quotient = quotient * 64.0
    return quotient


@triton.jit
def again(magnitude, by, outer, SHARING: tl.constexpr):
    """Return `quotients` computed in fp64, rounded to odd.

    Midpoints of elements have at most 9 bits, so that a quotient of two fp32 numbers is one, or 2**-33 of itself away:
    a product with the inverse of a scale, rounded to 41 bits, is on the same side, or is the midpoint. For codes this
    needs fewer registers than division, whose calls spill them; for values it needs more.
    """
    divisor = wide_of(by)
    if SHARING.codes and not SHARING.outer:
        inverse = (1.0 / float_of(by)).to(tl.float64)
        inverse = inverse * (2.0 - divisor * inverse)
        inverse = inverse * (2.0 - divisor * inverse)
        bits = (wide_of(magnitude) * inverse).to(tl.int64, bitcast=True)
        wide = ((bits + 0x800) & -0x1000).to(tl.float64, bitcast=True)
    else:
        if SHARING.outer:
            divisor = divisor * outer.to(tl.float64)
        wide = wide_of(magnitude) / divisor
    return tl.where(by == 0, 0, to_odd(wide))


@triton.jit
def _drawn(
    magnitude, sign, by, outer, first, seed, numbers, FORM: tl.constexpr, SHARING: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Return magnitude and sign of COUNT elements rounded stochastically, which compares all bits of fp64 quotients."""
    divisor = wide_of(by)
    if SHARING.outer:
        divisor = divisor * outer.to(tl.float64)
    quotient = (wide_of(magnitude) / divisor).to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    quotient = tl.where(by == 0, 0, quotient)
    element, side = cast(quotient, sign.to(tl.int64) << 32, first, seed, numbers, FORM, COUNT)
    return bits_of(element.to(tl.float64, bitcast=True).to(tl.float32)), (side >> 32).to(tl.int32)


@triton.jit
def is_close(quotient, element, by, outer, SHARING: tl.constexpr):
    """Return whether a quotient is so close to the midpoint of two elements that its rounding may decide."""
    low = (quotient + SHARING.tolerance) & ((1 << SHARING.low_bits) - 1)
    distance = tl.where(element > quotient, element - quotient, quotient - element)
    close = (low <= 2 * SHARING.tolerance) & (distance > SHARING.tolerance)
    if SHARING.outer:  # a product below fp32's normal numbers has lost bits
        product = bits_of(float_of(by) * outer)
        close = close | ((product < 0x00800000) & (by != 0))
    return close


@triton.jit
def elements(
    magnitude, sign, by, outer, first, seed, numbers, FORM: tl.constexpr, EXACT: tl.constexpr, SHARING: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return magnitude and sign of COUNT elements: numbers divided by their scales `by`, rounded."""
    if FORM.wide:
        element, side = _drawn(magnitude, sign, by, outer, first, seed, numbers, FORM, SHARING, COUNT)
    elif SHARING.power:
        quotient = bits_of(_over_power(magnitude, by, SHARING))
        element, side = cast(quotient, sign, first, seed, numbers, FORM, COUNT)
        if FORM.by_more:
            if is_undecided(quotient, first, seed, numbers, FORM, COUNT):
                if SHARING.again:
                    element, side = cast(quotient, sign, first, seed, numbers, EXACT, COUNT)
                else:
                    element = element ^ 1
    elif SHARING.near and not SHARING.outer:  # only where `usual` does not serve
        element, side = cast(again(magnitude, by, outer, SHARING), sign, first, seed, numbers, FORM, COUNT)
    else:
        quotient = quotients(magnitude, by, outer, SHARING)
        element, side = cast(quotient, sign, first, seed, numbers, FORM, COUNT)
        close = is_close(quotient, element, by, outer, SHARING)
        if tl.reduce(close.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
            if SHARING.again:
                exact = again(magnitude, by, outer, SHARING)
                element, side = cast(exact, sign, first, seed, numbers, FORM, COUNT)
            else:
                element = element ^ 1
    return element, side


@triton.jit
def codes_under_powers(
    magnitude, sign, by, hard, first, seed, numbers, codes, FORM: tl.constexpr, EXACT: tl.constexpr,
    LAYOUT: tl.constexpr, SHARING: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Return the codes of `elements` under powers of two without computing their values, and which are NaN."""
    quotient = bits_of(_over_power(magnitude, by, SHARING))
    code = direct(quotient, sign, first, seed, numbers, codes, FORM, LAYOUT, COUNT)
    if FORM.by_more:
        if is_undecided(quotient, first, seed, numbers, FORM, COUNT):
            if SHARING.again:
                element, side = cast(quotient, sign, first, seed, numbers, EXACT, COUNT)
                code = encoded(element, side, codes, LAYOUT)
            else:
                code = code ^ 1
    if SHARING.again:
        if hard != 0:
            code = tl.where(by > 0x7F800000, 0, code)
    return code, quotient > 0x7F800000


@triton.jit
def write(
    out, start, end, magnitude, sign, by, inverse, upper, lower, hard, outer, first, seed, numbers, codes,
    DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Write COUNT numbers, divided by their scales and rounded, as codes or values; return 1 if numbers were lost.

    inverse, upper, lower: the `divisors` of the numbers; hard: whether `usual` does not serve for them.
    """
    lost = tl.cast(0, tl.int32)
    USUAL: tl.constexpr = SHARING.near or SHARING.summed
    if USUAL:
        if hard != 0:
            if SHARING.again:
                element, side = elements(magnitude, sign, by, outer, first, seed, numbers, FORM, EXACT, SHARING, COUNT)
                lost = put(out, start, end, element, side, by, outer, codes, DTYPE, LAYOUT, SHARING)
        elif SHARING.near:
            found, power, binade = nearest(magnitude, inverse, upper, lower, numbers, LAYOUT, SHARING)
            put_nearest(
                out, start, end, sign, found, power, binade, by, upper, lower, outer, numbers, codes, DTYPE, LAYOUT,
                SHARING,
            )  # fmt: skip
        else:
            quotient = bits_of(_over_power(magnitude, by, SHARING))
            lost = put_under_powers(out, start, end, quotient, sign, by, numbers, DTYPE, SHARING, COUNT)
    elif SHARING.direct:
        code, missing = codes_under_powers(
            magnitude, sign, by, hard, first, seed, numbers, codes, FORM, EXACT, LAYOUT, SHARING, COUNT
        )  # fmt: skip
        store(out, start, end, code, LAYOUT)
        if SHARING.loses:
            lost = tl.reduce(missing.to(tl.int32), 0, tl.standard._elementwise_max)
    else:
        element, side = elements(magnitude, sign, by, outer, first, seed, numbers, FORM, EXACT, SHARING, COUNT)
        lost = put(out, start, end, element, side, by, outer, codes, DTYPE, LAYOUT, SHARING)
    return lost


@triton.jit
def put(
    out, start, end, element, side, by, outer, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr,
    SHARING: tl.constexpr,
):  # fmt: skip
    """Write codes, or the elements times their scales, which saturate at the largest number.

    Return 1 if numbers were lost: NaNs without a code, and values that a 16-bit dtype does not represent under a scale
    that is a power of two, which is an error, so that the written values do not matter. Under other scales values of 16
    bits are rounded once. Places beyond the end of a tensor are zeros and lose nothing.
    """
    poisoned = by > 0x7F800000
    if SHARING.codes:
        element = tl.where(poisoned, 0, element)
        code = encoded(element, tl.where(poisoned, 0, side), codes, LAYOUT)
        store(out, start, end, code, LAYOUT)
        lost = element > 0x7F800000
    else:
        is_nan = poisoned | (element > 0x7F800000)
        side = tl.where(poisoned, 0, side)
        if DTYPE == "fp32" or SHARING.power:
            value = float_of(element) * float_of(by)
            if SHARING.outer:
                value = value * outer
            bits = tl.minimum(bits_of(value) & 0x7FFFFFFF, 0x7F7FFFFF)
        else:
            bits = product_to_odd(element, by, outer, SHARING)
        bits = tl.where(is_nan, 0x7FC00000, bits)
        lost = put_values(out, start, end, bits, side, is_nan, DTYPE, SHARING)
    found = tl.cast(0, tl.int32)
    if SHARING.loses:
        found = tl.reduce(lost.to(tl.int32), 0, tl.standard._elementwise_max)
    return found


@triton.jit
def put_values(out, start, end, bits, side, is_nan, DTYPE: tl.constexpr, SHARING: tl.constexpr):
    """Write values, given by their bits in fp32 and, for 16 bits, rounded to odd; return which are lost."""
    lost = is_nan
    if DTYPE == "fp32":
        raw = bits | side
    elif DTYPE == "bf16":
        if SHARING.power:
            lost = (bits & 0xFFFF) != 0
            half = bits >> 16
        else:
            half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            half = tl.where(is_nan, half, tl.minimum(half, 0x7F7F))
        raw = (half | (side >> 16)).to(tl.int16)
    else:
        half = float_of(tl.minimum(bits, 0x47800000)).to(tl.float16)
        whole = half.to(tl.int16, bitcast=True).to(tl.int32)
        if SHARING.power:
            lost = (bits_of(half.to(tl.float32)) != bits) & (is_nan == 0)
        else:
            whole = tl.minimum(whole, 0x7BFF)
        raw = (tl.where(is_nan, 0x7E00, whole) | (side >> 16)).to(tl.int16)
    places = start + tl.arange(0, raw.shape[0])
    tl.store(out + places, raw, mask=places < end)
    return lost


@triton.jit
def keep(scales, places, mask, by, exponent, numbers, codes, sharing, SHARING: tl.constexpr):
    """Write scales as stored in `Quantized`: exponents minus the lowest one, fp32 numbers, or codes."""
    poisoned = by > 0x7F800000
    if SHARING.power:
        kept = tl.where(poisoned, 0xFF, exponent - sharing.lowest).to(tl.int8)
    elif SHARING.outer:
        LAYOUT: tl.constexpr = SHARING.layout  # Triton 3.6 passes no tuple out of a tuple
        code = encoded(by, by & 0, codes, LAYOUT)
        kept = code.to(tl.int8)
    else:
        kept = by
    tl.store(scales + places, kept, mask=mask)


@triton.jit
def scales_of(largest, highest, outer, numbers, sharing, SHARING: tl.constexpr):
    """Return the bits of groups' scales in fp32, NaN to mark infinities and NaNs; and exponents of powers of two."""
    if SHARING.power:
        exponent = power_of_two(largest, sharing)
        by = power_bits(exponent)
    else:
        exponent = largest & 0
        by = ratio(largest, outer, numbers, sharing, SHARING)
    if SHARING.marks:
        by = tl.where(highest >= 0x7F800000, 0x7FC00000, by)
    return by, exponent


@triton.jit
def each_of(of_groups, SIZE: tl.constexpr):
    """Return what groups of SIZE have for each of their numbers."""
    GROUPS: tl.constexpr = of_groups.shape[0]
    return tl.reshape(tl.broadcast_to(of_groups[:, None], (GROUPS, SIZE)), (GROUPS * SIZE,))


@triton.jit
def write_blocks(
    out, start, end, magnitude, sign, highest, by, outer, first, key, numbers, codes, DTYPE: tl.constexpr,
    FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr, SIZE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Write COUNT numbers under the scales `by` of groups of SIZE, with these largest magnitudes, like `write`."""
    each = each_of(by, SIZE)
    inverse, upper, lower, hard = each, each, each, 0  # not read
    if SHARING.near:
        inverse, upper, lower, hard = divisors(by, highest, outer, SHARING)
        inverse, upper, lower = each_of(inverse, SIZE), each_of(upper, SIZE), each_of(lower, SIZE)
        hard = tl.reduce(hard, 0, tl.standard._elementwise_max)
    elif SHARING.summed or SHARING.direct:
        hard = (tl.reduce(highest, 0, tl.standard._elementwise_max) >= 0x7E800000).to(tl.int32)
    return write(
        out, start, end, magnitude, sign, each, inverse, upper, lower, hard, outer, first, key, numbers, codes, DTYPE,
        FORM, EXACT, LAYOUT, SHARING, COUNT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "numbers", "codes", "sharing", "scale_numbers", "scale_codes"])
def blocks(
    x, out, scales, outers, lost, seed, total, first, numbers, codes, sharing, scale_numbers, scale_codes,
    DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast `total` numbers, of which SIZE neighbours share a scale; the first has the logical index `first`.

    If codes are written, scales are written to `scales`, one per group. `lost`: int32, set to 1 if `put` loses numbers.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    mask = places < total
    magnitude, sign = read(x, places, mask, DTYPE, False)
    table = tl.reshape(magnitude, (BLOCK // SIZE, SIZE))
    highest = tl.reduce(table, 1, tl.standard._elementwise_max)
    largest = highest
    if not SHARING.marks:
        largest = tl.reduce(finite(table), 1, tl.standard._elementwise_max)
    outer = tl.load(outers) if SHARING.outer else 1.0
    key = tl.load(seed) if FORM.random_bits > 0 else 0
    by, exponent = scales_of(largest, highest, outer, scale_numbers, sharing, SHARING)
    if SHARING.codes:
        groups = tl.program_id(0).to(tl.int64) * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)
        keep(scales, groups, groups < total // SIZE, by, exponent, scale_numbers, scale_codes, sharing, SHARING)
    missing = write_blocks(
        out, start, total, magnitude, sign, highest, by, outer, first + start, key, numbers, codes, DTYPE, FORM, EXACT,
        LAYOUT, SHARING, SIZE, BLOCK,
    )  # fmt: skip
    if SHARING.keeps:
        if tl.reduce(highest, 0, tl.standard._elementwise_max) >= 0x7F800000:
            keep_numbers(x, out, places, total, DTYPE)
    if SHARING.loses:
        if missing > 0:
            tl.store(lost, 1)
