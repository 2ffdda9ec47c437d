"""Casts with a scale per block or row: maximum, scale, and values or codes, in one read.

Division of fp32 numbers by a scale that is a power of two is exact. Division by any other scale is rounded once, which
matters only for a quotient near the midpoint of two elements; these rare quotients are divided again in fp64.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read, widened
from lowp.kernels.triton.device.codes import direct, encoded, store
from lowp.kernels.triton.device.rounding import cast
from lowp.kernels.triton.device.stochastic import is_undecided


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _wide(magnitude):
    """Return fp32 numbers, given by their bits, in fp64, including subnormal numbers on devices that flush them."""
    return widened(magnitude).to(tl.float64, bitcast=True)


@triton.jit
def _to_odd(wide):
    """Return positive fp64 numbers as the bits of fp32, rounded to odd: a rounding to 22 bits or less may follow.

    NaN stays NaN; larger numbers become the largest finite one.
    """
    near = tl.where(wide > 3.4028234663852886e38, 3.4028234663852886e38, wide).to(tl.float32)
    bits = _bits(near) & 0x7FFFFFFF
    back = _wide(bits)
    even = (bits & 1) == 0
    bits = tl.where(even & (back < wide), bits + 1, bits)
    bits = tl.where(even & (back > wide), bits - 1, bits)
    return tl.where(wide != wide, 0x7FC00000, bits)


@triton.jit
def _finite(magnitude):
    """Return magnitudes, with zeros for infinity and NaN."""
    return tl.where(magnitude < 0x7F800000, magnitude, 0)


@triton.jit
def _product_to_odd(element, by, outer, SHARING: tl.constexpr):
    """Return the bits of elements times scales (times the outer scale) in fp32, to odd: a rounding to 16 bits follows.

    A scale of 24 bits is the sum of two parts of 12 bits, by which elements of up to 12 bits are multiplied exactly.
    The difference of the rounded product and the sum of the parts has the correct sign; small scales are scaled up
    before, so that no bit underflows fp32. Overflow becomes infinity, or NaN.
    """
    if SHARING.outer:
        few = _float(element) * _float(by)
        scale = _float((element & 0) + _bits(outer))
    else:
        few = _float(element)
        scale = _float(by)
    raise_by = tl.where(scale < 9.094947017729282e-13, 18446744073709551616.0, 1.0)  # 2**-40, 2**64
    upper = _float(_bits(scale * raise_by) & -4096)
    lower = scale * raise_by - upper
    near = few * scale
    error = (few * upper - near * raise_by) + few * lower
    return (_bits(near) - (error < 0.0).to(tl.int32)) | (error != 0.0).to(tl.int32)


# -- the scale of a group ---------------------------------------------------------------------------------------------
@triton.jit
def power_of_two(largest, sharing):
    """Return the exponents of groups, given the bits of their largest finite magnitudes.

    Subnormal numbers and zeros count as 2**-127, since their scale is the smallest in any case.
    """
    exponent = (largest >> 23) - 127 - sharing.top
    return tl.minimum(tl.maximum(exponent, sharing.lowest), sharing.highest)


@triton.jit
def power_bits(exponent):
    """Return the bits of 2**exponent in fp32, for -149 to 127: those below -126 are subnormal."""
    one = (exponent & 0) + 1
    return tl.where(exponent < -126, one << tl.maximum(exponent + 149, 0), (exponent + 127) << 23)


@triton.jit
def ratio(largest, outer, numbers, sharing, SHARING: tl.constexpr):
    """Return the bits of largest / maximum of the element (/ outer), rounded to the format of the scale, in fp32."""
    wide = _wide(largest) * sharing.factor / sharing.maximum
    if SHARING.outer:
        wide = wide / outer.to(tl.float64)
        found, _sign = cast(_to_odd(wide), largest & 0, 0, 0, numbers, SHARING.form, 1)
    else:
        near = tl.where(wide > 3.4028234663852886e38, 3.4028234663852886e38, wide).to(tl.float32)
        found = tl.where(largest == 0, 0x3F800000, tl.maximum(_bits(near), 0x00800000))
    return found


# -- elements ---------------------------------------------------------------------------------------------------------
@triton.jit
def quotients(magnitude, by, outer, SHARING: tl.constexpr):
    """Return the bits of magnitudes / (scale * outer), rounded to fp32; zeros if the divisor is zero."""
    divisor = _float(by)
    if SHARING.outer:
        divisor = divisor * outer
    found = _bits(tl.div_rn(_float(magnitude), divisor)) & 0x7FFFFFFF
    return tl.where(by == 0, tl.where(magnitude > 0x7F800000, magnitude, 0), found)


@triton.jit
def _over_power(magnitude, by, SHARING: tl.constexpr):
    """Return magnitudes divided by powers of two; exact from 2**-126 on, far below the midpoints of elements."""
    if SHARING.low:  # scales of 2**-133 to 2**121, whose inverses fp32 does not all represent
        by = _bits(_float(by) * 64.0)
    inverse = tl.where(by >= 0x7F000000, 0x00400000, 0x7F000000 - by)
    inverse = tl.where(by < 0x00800000, 0x7F000000, inverse)
    quotient = _float(magnitude) * _float(inverse)
    if SHARING.low:
        quotient = quotient * 64.0
    return quotient


@triton.jit
def again(magnitude, by, outer, SHARING: tl.constexpr):
    """Return `quotients` computed in fp64, rounded to odd."""
    divisor = _wide(by)
    if SHARING.outer:
        divisor = divisor * outer.to(tl.float64)
    wide = _wide(magnitude) / tl.where(by == 0, 1.0, divisor)
    return tl.where(by == 0, tl.where(magnitude > 0x7F800000, magnitude, 0), _to_odd(wide))


@triton.jit
def is_close(quotient, element, by, outer, SHARING: tl.constexpr):
    """Return whether a quotient is so close to the midpoint of two elements that its rounding may decide."""
    low = (quotient + SHARING.tolerance) & ((1 << SHARING.low_bits) - 1)
    distance = tl.where(element > quotient, element - quotient, quotient - element)
    close = (low <= 2 * SHARING.tolerance) & (distance > SHARING.tolerance)
    if SHARING.outer:  # a product below fp32's normal numbers has lost bits
        product = _bits(_float(by) * outer)
        close = close | ((product < 0x00800000) & (by != 0))
    return close


@triton.jit
def elements(
    magnitude, sign, by, outer, first, seed, numbers, FORM: tl.constexpr, EXACT: tl.constexpr, SHARING: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return magnitude and sign of COUNT elements: numbers divided by their scales `by`, rounded."""
    if SHARING.power:
        quotient = _bits(_over_power(magnitude, by, SHARING))
        element, side = cast(quotient, sign, first, seed, numbers, FORM, COUNT)
        if FORM.by_noise and FORM.varying and FORM.random_bits > 32:
            if is_undecided(quotient, first, seed, numbers, FORM, COUNT):
                if SHARING.again:
                    element, side = cast(quotient, sign, first, seed, numbers, EXACT, COUNT)
                else:
                    element = element ^ 1
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
def _direct(
    magnitude, sign, by, first, seed, numbers, codes, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr,
    SHARING: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Return the codes of `elements` under powers of two without computing their values, and which are NaN."""
    quotient = _bits(_over_power(magnitude, by, SHARING))
    code = direct(quotient, sign, first, seed, numbers, codes, FORM, LAYOUT, COUNT)
    if FORM.by_noise and FORM.varying and FORM.random_bits > 32:
        if is_undecided(quotient, first, seed, numbers, FORM, COUNT):
            if SHARING.again:
                element, side = cast(quotient, sign, first, seed, numbers, EXACT, COUNT)
                code = encoded(element, side, codes, LAYOUT)
            else:
                code = code ^ 1
    return tl.where(by > 0x7F800000, 0, code), quotient > 0x7F800000


@triton.jit
def write(
    out, places, mask, magnitude, sign, by, outer, first, seed, numbers, codes, DTYPE: tl.constexpr,
    FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write COUNT numbers, divided by their scales and rounded, as codes or values; return where numbers were lost."""
    if SHARING.direct:
        code, lost = _direct(
            magnitude, sign, by, first, seed, numbers, codes, FORM, EXACT, LAYOUT, SHARING, COUNT
        )  # fmt: skip
        store(out, places, mask, code, LAYOUT)
    else:
        element, side = elements(magnitude, sign, by, outer, first, seed, numbers, FORM, EXACT, SHARING, COUNT)
        lost = put(out, places, mask, element, side, by, outer, codes, DTYPE, LAYOUT, SHARING)
    return lost


@triton.jit
def put(
    out, places, mask, element, side, by, outer, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr,
    SHARING: tl.constexpr,
):  # fmt: skip
    """Write codes, or the elements times their scales, which saturate at the largest number.

    Return where numbers were lost: NaNs without a code, and values that a 16-bit dtype does not represent under a scale
    that is a power of two, which is an error, so that the written values do not matter. Under other scales values of 16
    bits are rounded once. Places beyond the end of a tensor are zeros and lose nothing.
    """
    poisoned = by > 0x7F800000
    if SHARING.codes:
        element = tl.where(poisoned, 0, element)
        code = encoded(element, tl.where(poisoned, 0, side), codes, LAYOUT)
        store(out, places, mask, code, LAYOUT)
        lost = element > 0x7F800000
    else:
        is_nan = poisoned | (element > 0x7F800000)
        side = tl.where(poisoned, 0, side)
        if DTYPE == "fp32" or SHARING.power:
            value = _float(element) * _float(by)
            if SHARING.outer:
                value = value * outer
            bits = tl.minimum(_bits(value) & 0x7FFFFFFF, 0x7F7FFFFF)
        else:
            bits = _product_to_odd(element, by, outer, SHARING)
        bits = tl.where(is_nan, 0x7FC00000, bits)
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
            half = _float(tl.minimum(bits, 0x47800000)).to(tl.float16)
            whole = half.to(tl.int16, bitcast=True).to(tl.int32)
            if SHARING.power:
                lost = (_bits(half.to(tl.float32)) != bits) & (is_nan == 0)
            else:
                whole = tl.minimum(whole, 0x7BFF)
            raw = (tl.where(is_nan, 0x7E00, whole) | (side >> 16)).to(tl.int16)
        tl.store(out + places, raw, mask=mask)
    return lost


@triton.jit
def keep(scales, places, mask, by, exponent, numbers, codes, sharing, SHARING: tl.constexpr):
    """Write scales as stored in `Quantized`: exponents minus the lowest one, fp32 numbers, or codes."""
    poisoned = by > 0x7F800000
    if SHARING.power:
        kept = tl.where(poisoned, 0xFF, exponent - sharing.lowest).to(tl.int8)
    elif SHARING.outer:
        code = encoded(by, by & 0, codes, SHARING.layout)
        kept = code.to(tl.int8)
    else:
        kept = by
    tl.store(scales + places, kept, mask=mask)


@triton.jit
def _scales(largest, highest, outer, numbers, sharing, SHARING: tl.constexpr):
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


@triton.jit(do_not_specialize=["first", "numbers", "codes", "sharing", "scale_numbers", "scale_codes"])
def blocks(
    x, out, scales, outers, lost, seed, total, first, numbers, codes, sharing, scale_numbers, scale_codes,
    DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast `total` numbers, of which SIZE neighbours share a scale; the first has the logical index `first`.

    If codes are written, scales are written to `scales`, one per group; `lost`, int32, counts numbers lost in `put`.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    mask = places < total
    magnitude, sign = read(x, places, mask, DTYPE, False)
    table = tl.reshape(magnitude, (BLOCK // SIZE, SIZE))
    highest = tl.reduce(table, 1, tl.standard._elementwise_max)
    largest = highest
    if not SHARING.marks:
        largest = tl.reduce(_finite(table), 1, tl.standard._elementwise_max)
    outer = tl.load(outers) if SHARING.outer else 1.0
    key = tl.load(seed) if FORM.random_bits > 0 else 0
    by, exponent = _scales(largest, highest, outer, scale_numbers, sharing, SHARING)
    if SHARING.codes:
        groups = tl.program_id(0).to(tl.int64) * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)
        keep(scales, groups, groups < total // SIZE, by, exponent, scale_numbers, scale_codes, sharing, SHARING)
    each = tl.reshape(tl.broadcast_to(by[:, None], (BLOCK // SIZE, SIZE)), (BLOCK,))
    missing = write(
        out, places, mask, magnitude, sign, each, outer, first + start, key, numbers, codes, DTYPE, FORM, EXACT, LAYOUT,
        SHARING, BLOCK,
    )  # fmt: skip
    if SHARING.loses:
        if tl.reduce(missing.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
            tl.atomic_add(lost, tl.reduce(missing.to(tl.int32), 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=["numbers", "codes", "sharing", "scale_numbers", "scale_codes"])
def rows(
    x, out, scales, outers, lost, length, numbers, codes, sharing, scale_numbers, scale_codes, DTYPE: tl.constexpr,
    FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast a row of `length` numbers that share a scale, like `blocks`; a WHOLE row fits one BLOCK and is read once."""
    row = tl.program_id(0).to(tl.int64)
    x += row * length
    out += row * length // 2 if LAYOUT.packed else row * length
    inside = tl.arange(0, BLOCK)
    magnitude, sign = read(x, inside, inside < length, DTYPE, False)
    highest = tl.reduce(magnitude, 0, tl.standard._elementwise_max)
    largest = highest
    if not SHARING.marks:
        largest = tl.reduce(_finite(magnitude), 0, tl.standard._elementwise_max)
    if not WHOLE:
        for start in range(BLOCK, length, BLOCK):
            more, _side = read(x, start + inside, start + inside < length, DTYPE, False)
            highest = tl.maximum(highest, tl.reduce(more, 0, tl.standard._elementwise_max))
            largest = tl.maximum(largest, tl.reduce(_finite(more), 0, tl.standard._elementwise_max))
    outer = tl.load(outers) if SHARING.outer else 1.0
    by, exponent = _scales(largest, highest, outer, scale_numbers, sharing, SHARING)
    if SHARING.codes:
        keep(scales, row, row >= 0, by, exponent, scale_numbers, scale_codes, sharing, SHARING)
    each = inside * 0 + by
    if WHOLE:
        missing = write(
            out, inside, inside < length, magnitude, sign, each, outer, 0, 0, numbers, codes, DTYPE, FORM, EXACT,
            LAYOUT, SHARING, BLOCK,
        )  # fmt: skip
        if SHARING.loses:
            if tl.reduce(missing.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
                tl.atomic_add(lost, tl.reduce(missing.to(tl.int32), 0, tl.standard._sum_combine))
    else:
        for start in range(0, length, BLOCK):
            places = start + inside
            magnitude, sign = read(x, places, places < length, DTYPE, False)
            missing = write(
                out, places, places < length, magnitude, sign, each, outer, 0, 0, numbers, codes, DTYPE, FORM, EXACT,
                LAYOUT, SHARING, BLOCK,
            )  # fmt: skip
            if SHARING.loses:
                if tl.reduce(missing.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
                    tl.atomic_add(lost, tl.reduce(missing.to(tl.int32), 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=["count"])
def largest_of_all(x, partial, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bits of the largest finite magnitude of each program's block, int32 [programs]."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude, _sign = read(x, places, places < count, DTYPE, False)
    tl.store(partial + tl.program_id(0), tl.reduce(_finite(magnitude), 0, tl.standard._elementwise_max))
