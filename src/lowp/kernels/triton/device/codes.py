"""Conversion of numbers to codes of formats and back."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import first_words, infinity_bits, quiet_bit, read, write
from lowp.kernels.triton.device.rounding import cast, directed, in_quanta, raised
from lowp.kernels.triton.device.stochastic import compared, drawn_up, is_undecided, lifted, split


@triton.jit
def encoded(magnitude, sign, codes, LAYOUT: tl.constexpr):
    """Return the codes of values of a format; zero for a NaN without a code."""
    is_nan = magnitude > infinity_bits(LAYOUT.wide)
    if LAYOUT.integer:
        if LAYOUT.wide:
            size = tl.where(is_nan, 0, magnitude).to(tl.float64, bitcast=True).to(tl.int64)
        else:
            size = tl.where(is_nan, 0, magnitude).to(tl.float32, bitcast=True).to(tl.int32)
        code = tl.where(sign != 0, -size, size)
    else:
        code = (magnitude >> codes.dropped) - codes.offset
        if LAYOUT.varying:
            # below the normal numbers the code is the number of quanta: the excess of a sum with 2**23 quanta,
            # or the significand shifted to its last bit
            MANTISSA: tl.constexpr = 52 if LAYOUT.wide else 23
            if LAYOUT.anchored:
                sum = magnitude.to(tl.float32, bitcast=True) + tl.cast(codes.unit_anchor, tl.float32, bitcast=True)
                small = sum.to(tl.int32, bitcast=True) - codes.unit_anchor
            else:
                HIDDEN: tl.constexpr = 1 << MANTISSA
                field = magnitude >> MANTISSA
                significand = (magnitude & (HIDDEN - 1)) | tl.where(field > 0, HIDDEN, 0)
                place = codes.dropped + codes.low_field - tl.maximum(field, 1)
                small = significand >> tl.minimum(tl.maximum(place, 0), MANTISSA)
            code = tl.where(magnitude < codes.smallest_normal, small, code)
        if LAYOUT.infinity:
            code = tl.where(magnitude == infinity_bits(LAYOUT.wide), codes.infinity_code, code)
        if LAYOUT.nan == "above":
            code = tl.where(is_nan, codes.nan_code, code)
        if LAYOUT.signed:
            one = (magnitude & 0) + 1
            code = tl.where(sign != 0, code | (one << codes.sign_place), code)
        if LAYOUT.nan == "minus-zero":
            code = tl.where(is_nan, codes.nan_code, code)
        elif LAYOUT.nan == "none":
            code = tl.where(is_nan, 0, code)
    return code


@triton.jit
def _nearest_code(magnitude, sign, numbers, codes, FORM: tl.constexpr, LAYOUT: tl.constexpr):
    """Return codes without sign, or integers, for numbers rounded by addition."""
    _near, small = in_quanta(magnitude, sign, numbers, FORM)
    if LAYOUT.integer:
        code = small
    else:
        code = _uncut(magnitude + raised(magnitude, sign, numbers, FORM), codes) - codes.offset
        if LAYOUT.varying:
            code = tl.where(magnitude < codes.smallest_normal, small, code)
    return code


@triton.jit
def _summed_code(magnitude, numbers, codes, FORM: tl.constexpr):
    """Return codes without sign for numbers rounded to nearest even by a sum, with overflow.

    The bits from the 23rd on are arbitrary.
    """
    most = numbers.maximum
    if FORM.overflow != "saturate":  # the number after the largest one
        most = most + (1 << codes.dropped)
    return summing(tl.minimum(magnitude, most), codes)[0]


@triton.jit
def summing(size, codes):
    """Return codes in the last 22 bits of sums of numbers, not above the largest one, with a power of two; and that.

    The power's ulp is the distance of the number's neighbours, and its mantissa the code of the binade's beginning:
    0 below the normal numbers, and 2**mantissa_bits more for each binade but the first.
    """
    power = tl.maximum(size & 0x7F800000, codes.smallest_normal)
    more = (codes.dropped << 23) - (codes.smallest_normal >> codes.dropped)
    anchor = power + (power >> codes.dropped) + more
    sum = size.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    return sum.to(tl.int32, bitcast=True), anchor


@triton.jit
def _drawn_code(
    magnitude, first, seed, numbers, codes, FORM: tl.constexpr, LAYOUT: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Return codes without sign, or integers, for numbers rounded with one word each; `split` counts units already.

    Above the smallest normal number, whose hidden bit is the exponent field's 1, each binade adds 2**mantissa_bits.
    """
    word = compared(first_words(first, seed, COUNT), FORM)
    if FORM.by_product:
        code = _uncut(lifted(magnitude, word, numbers, FORM), codes)
    elif FORM.varying:
        shift, whole, digit = split(magnitude, numbers, FORM)
        code = whole + (digit > word).to(tl.int32)
        if not LAYOUT.integer:
            binades = (magnitude >> 23) + shift - (numbers.low_field + numbers.dropped)
            if FORM.reaches_subnormals:
                binades = tl.maximum(binades, 0)
            code = code + binades * codes.subnormals_from
    else:
        code = _uncut(drawn_up(magnitude, word, numbers), codes)  # the bias is fp32's
    return code


@triton.jit
def _uncut(up, codes):
    """Return the bits of numbers above the cut; a NaN may have overflowed int32 into uint32."""
    return (up.to(tl.uint32) >> tl.cast(codes.dropped, tl.uint32)).to(tl.int32)


@triton.jit
def direct(
    magnitude, sign, first, seed, numbers, codes, FORM: tl.constexpr, LAYOUT: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Return the codes of COUNT fp32 numbers without computing their values; any for a NaN without a code.

    Overflow occurs in the code, whose exponent field has room for it in 32 bits.
    """
    is_nan = magnitude > infinity_bits(False)
    FOLLOWED: tl.constexpr = FORM.overflow != "nan" or not LAYOUT.infinity  # by the code of overflow
    SUMMED: tl.constexpr = LAYOUT.summed and FORM.by_addition and FORM.rounding == "nearest-even"
    DIRECTED: tl.constexpr = FORM.by_sum  # of floats, whose neighbours a sum rounds to
    ENDS: tl.constexpr = (SUMMED or DIRECTED) and (FORM.overflow == "saturate" or FOLLOWED)
    if ENDS and DIRECTED:
        sum, binade = directed(magnitude, sign, numbers, FORM)
        code = sum + (binade >> codes.dropped) - (codes.smallest_normal >> codes.dropped)
        code = code & 0x003FFFFF
        if FORM.overflow != "saturate":  # infinity becomes no finite number in any direction
            code = tl.where(magnitude == infinity_bits(False), codes.beyond, code)
    elif ENDS:
        code = _summed_code(magnitude, numbers, codes, FORM)
    elif FORM.by_noise:
        code = _drawn_code(magnitude, first, seed, numbers, codes, FORM, LAYOUT, COUNT)
    else:
        code = _nearest_code(magnitude, sign, numbers, codes, FORM, LAYOUT)
    if LAYOUT.integer:
        size = tl.minimum(code, tl.where(sign != 0, codes.least, codes.most))
        code = tl.where(sign != 0, -size, size)
    else:
        if not ENDS:
            code = _limited(code, codes, FORM, FOLLOWED)
        if LAYOUT.nan == "above" and (DIRECTED or FORM.overflow != "nan"):  # otherwise overflow becomes NaN
            code = tl.where(is_nan, codes.nan_code, code)
        code = _with_side(code, sign, codes, LAYOUT, ENDS)
        if LAYOUT.nan == "minus-zero":
            code = tl.where(is_nan, codes.nan_code, code)
    return code


@triton.jit
def _limited(code, codes, FORM: tl.constexpr, FOLLOWED: tl.constexpr):
    """Return the codes of magnitudes with that of overflow for those above the largest number's."""
    if FORM.overflow == "saturate":  # Triton 3.6 passes no string out of a tuple
        code = tl.minimum(code, codes.most)
    elif FOLLOWED:
        code = tl.minimum(code, codes.beyond)
    else:
        code = tl.where(code > codes.most, codes.nan_code, code)
    return code


@triton.jit
def _with_side(code, sign, codes, LAYOUT: tl.constexpr, ENDS: tl.constexpr):
    """Return the codes of magnitudes with the bits of their signs; of formats without -0 not those of zero and NaN."""
    above = 24 if LAYOUT.in_byte else 28 if LAYOUT.in_nibble else 31 - codes.sign_place
    side = (sign.to(tl.uint32) >> tl.cast(above, tl.uint32)).to(tl.int32)
    if LAYOUT.minus_zero:
        code = code | side
    else:
        if ENDS:
            code = code & 0x003FFFFF
        code = tl.where((code == 0) | (code == codes.nan_code), code, code | side)
    return code


@triton.jit
def store(out, start, end, code, LAYOUT: tl.constexpr):
    """Write codes to those places from `start` on that are in 0 .. `end`; if packed, two per byte, the first low.

    For packed codes both numbers are even. Above a byte's bits codes are arbitrary.
    """
    COUNT: tl.constexpr = code.shape[0]
    if LAYOUT.packed:
        low, high = tl.split(tl.reshape(code, (COUNT // 2, 2)))
        places = (start >> 1) + tl.arange(0, COUNT // 2)
        if LAYOUT.integer:
            low = low & 15
        byte = low | (high << 4)
        tl.store(out + places, byte.to(out.dtype.element_ty), mask=(places >= 0) & (places < end >> 1))
    else:
        places = start + tl.arange(0, COUNT)
        tl.store(out + places, code.to(out.dtype.element_ty), mask=(places >= 0) & (places < end))


@triton.jit
def _put(
    out, start, end, magnitude, sign, seed, first, numbers, codes, FORM: tl.constexpr, LAYOUT: tl.constexpr,
    DIRECT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write the codes of COUNT numbers, the first of which has the logical index `first`."""
    if DIRECT:
        code = direct(magnitude, sign, first, seed, numbers, codes, FORM, LAYOUT, COUNT)
    else:
        magnitude, sign = cast(magnitude, sign, first, seed, numbers, FORM, COUNT)
        code = encoded(magnitude, sign, codes, LAYOUT)
    store(out, start, end, code, LAYOUT)


@triton.jit
def _encode(
    x, out, seed, start, skipped, end, first, numbers, codes, DTYPE: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr, LAYOUT: tl.constexpr, DIRECT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Encode those of COUNT places from `start` on that are in `skipped` .. `end`; return their magnitudes."""
    places = start + tl.arange(0, COUNT)
    mask = (places >= skipped) & (places < end)
    magnitude, sign = read(x, places - skipped, mask, DTYPE, FORM.wide)
    if FORM.by_more:
        if is_undecided(magnitude, first + start, seed, numbers, FORM, COUNT):  # as in `casts`: in small blocks
            if EXACT is not None:  # None only to count the instructions of the usual path
                PIECE: tl.constexpr = 128 if COUNT > 128 else COUNT
                for piece in range(0, COUNT, PIECE):
                    few = start + piece + tl.arange(0, PIECE)
                    inside = (few >= skipped) & (few < end)
                    size, side = read(x, few - skipped, inside, DTYPE, FORM.wide)
                    here, to = first + start + piece, start + piece - skipped
                    _put(out, to, end - skipped, size, side, seed, here, numbers, codes, EXACT, LAYOUT, False, PIECE)
        else:
            _put(
                out, start - skipped, end - skipped, magnitude, sign, seed, first + start, numbers, codes, FORM, LAYOUT,
                DIRECT, COUNT,
            )  # fmt: skip
    else:
        _put(
            out, start - skipped, end - skipped, magnitude, sign, seed, first + start, numbers, codes, FORM, LAYOUT,
            DIRECT, COUNT,
        )  # fmt: skip
    return magnitude


@triton.jit(do_not_specialize=["count", "first", "numbers", "codes"])
def encode(
    x, out, seed, nans, count, skipped, first, numbers, codes, DTYPE: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr, LAYOUT: tl.constexpr, DIRECT: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the codes of `count` numbers, as `casts.quantize` writes values; set `nans` to 1 if one has no code."""
    end = count + skipped
    whole = end // 16 * 16
    key = tl.load(seed) if FORM.random_bits else 0
    start = tl.program_id(0).to(tl.int64) * BLOCK
    seen = _encode(x, out, key, start, skipped, whole, first, numbers, codes, DTYPE, FORM, EXACT, LAYOUT, DIRECT, BLOCK)
    if LAYOUT.nan == "none":
        _tell_nans(nans, seen, LAYOUT.wide)
    if TAIL:
        if start + BLOCK > end:  # the last program
            few = _encode(  # a name has one shape in Triton
                x, out, key, whole, skipped, end, first, numbers, codes, DTYPE, FORM, EXACT, LAYOUT, DIRECT, 16
            )
            if LAYOUT.nan == "none":
                _tell_nans(nans, few, LAYOUT.wide)


@triton.jit
def _tell_nans(found, magnitude, WIDE: tl.constexpr):
    """Set `found` to 1 if there are NaNs, or infinities: those with zero have a sum only if there are none."""
    FLOAT: tl.constexpr = tl.float64 if WIDE else tl.float32
    products = magnitude.to(FLOAT, bitcast=True) * 0.0
    if tl.reduce(products, 0, tl.standard._sum_combine) != 0.0:
        tl.store(found, 1)


@triton.jit
def decoded(raw, codes, LAYOUT: tl.constexpr):
    """Return magnitude and sign of the values of codes.

    eee mm  of a normal number becomes  eeeeeeee mmmm...: shifted, plus the difference of the biases. A code below the
    normal numbers counts quanta; it is converted as the mantissa of 2**23 (2**52), which is subtracted again.
    """
    if LAYOUT.integer:
        if LAYOUT.wide:
            value = raw.to(tl.int64).to(tl.float64).to(tl.int64, bitcast=True)
            magnitude = value & 0x7FFFFFFFFFFFFFFF
        else:
            value = raw.to(tl.int32).to(tl.float32).to(tl.int32, bitcast=True)
            magnitude = value & 0x7FFFFFFF
        sign = value ^ magnitude
    else:
        whole = raw.to(tl.int64) if LAYOUT.wide else raw.to(tl.int32)
        code = whole & codes.magnitude_mask
        magnitude = (code + codes.offset) << codes.dropped
        if LAYOUT.has_zero and not LAYOUT.subnormals:
            magnitude = tl.where(code < codes.subnormals_from, 0, magnitude)
        elif LAYOUT.has_zero and LAYOUT.varying:
            magnitude = tl.where(code >= codes.subnormals_from, magnitude, _counted(code, codes, LAYOUT))
        infinity = infinity_bits(LAYOUT.wide)
        nan = infinity_bits(LAYOUT.wide) + quiet_bit(LAYOUT.wide)
        if LAYOUT.infinity:
            magnitude = tl.where(code == codes.infinity_code, infinity, magnitude)
            if LAYOUT.nan == "above":
                magnitude = tl.where(code > codes.infinity_code, nan, magnitude)
        elif LAYOUT.nan == "above":
            magnitude = tl.where(code == codes.nan_code, nan, magnitude)
        if LAYOUT.signed:
            negative = ((whole >> codes.sign_place) & 1) != 0
            if LAYOUT.nan == "minus-zero":
                is_nan = negative & (code == 0)
                magnitude = tl.where(is_nan, nan, magnitude)
                negative = negative & (is_nan == 0)
            sign = negative.to(code.dtype) << (63 if LAYOUT.wide else 31)
        else:
            sign = code & 0
    return magnitude, sign


@triton.jit
def _counted(code, codes, LAYOUT: tl.constexpr):
    FLOAT: tl.constexpr = tl.float64 if LAYOUT.wide else tl.float32
    anchor = (code & 0) + codes.anchor
    quantum = (code & 0) + codes.quantum
    quanta = (anchor | code).to(FLOAT, bitcast=True) - anchor.to(FLOAT, bitcast=True)
    return (quanta * quantum.to(FLOAT, bitcast=True)).to(tl.int64 if LAYOUT.wide else tl.int32, bitcast=True)


@triton.jit
def _write_products(out, offsets, mask, raw, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    """Write the values of signed codes of up to 16 bits, each a product.

    s eeee mmm              at the top of 32 bits, shifted arithmetically and masked, becomes
    s 0000eeee mmm000...    whose exponent has another bias: fp32 multiplies it exactly, with eeee = 0 as well.
    """
    top = raw.to(tl.int32) << (31 - codes.sign_place)
    moved = (top >> codes.spread) & codes.digits
    value = moved.to(tl.float32, bitcast=True) * tl.cast(codes.power, tl.float32, bitcast=True)
    limit = tl.cast(codes.limit, tl.float32, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    if LAYOUT.infinity:
        bits = tl.where(tl.abs(value) >= limit, (bits & -0x80000000) | 0x7F800000, bits)
    if LAYOUT.nan == "minus-zero":
        is_nan, side = top == -0x80000000, 0
    else:
        is_nan, side = tl.abs(value) > limit if LAYOUT.infinity else tl.abs(value) >= limit, bits & -0x80000000
    if DTYPE == "fp16":
        half = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)
        if LAYOUT.nan != "none":
            half = tl.where(is_nan, (side >> 16) | 0x7E00, half.to(tl.int32))
        bits = half
    else:
        if LAYOUT.nan != "none":
            bits = tl.where(is_nan, side | 0x7FC00000, bits)
        if DTYPE == "bf16":
            bits = bits >> 16
    tl.store(out + offsets, bits.to(tl.int32 if DTYPE == "fp32" else tl.int16), mask=mask)


@triton.jit
def _decode(raw, out, offsets, mask, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.packed:
        byte = tl.load(raw + (offsets >> 1), mask=mask).to(tl.int32)
        code = (byte >> ((offsets & 1) << 2).to(tl.int32)) & 15
        if LAYOUT.integer:
            code = (code ^ 8) - 8
    else:
        code = tl.load(raw + offsets, mask=mask)
    if LAYOUT.by_product and DTYPE != "fp64":
        _write_products(out, offsets, mask, code, codes, DTYPE, LAYOUT)
    else:
        magnitude, sign = decoded(code, codes, LAYOUT)
        write(out, offsets, mask, magnitude, sign, DTYPE, LAYOUT.wide)


@triton.jit(do_not_specialize=["count", "codes"])
def decode(raw, out, count, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Write the values of `count` codes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    whole = count // 16 * 16
    places = start + tl.arange(0, BLOCK)
    _decode(raw, out, places, places < whole, codes, DTYPE, LAYOUT)
    if TAIL:
        if start + BLOCK > count:
            few = tl.cast(whole, tl.int64) + tl.arange(0, 16)
            _decode(raw, out, few, few < count, codes, DTYPE, LAYOUT)
