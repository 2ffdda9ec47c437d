"""Codes of formats, from the bits of numbers and back."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read, write
from lowp.kernels.triton.device.rounding import cast, in_quanta, infinity_bits, is_undecided, quiet_bit, raised


@triton.jit
def encoded(magnitude, sign, codes, LAYOUT: tl.constexpr):
    """Return the codes of values of a format; zero for a NaN that has none."""
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
            # below the normal numbers the code is the number of quanta: what a sum with 2**23 quanta has beyond these,
            # or the significand where its last bit lies
            MANTISSA: tl.constexpr = 52 if LAYOUT.wide else 23
            if LAYOUT.anchored:
                anchor = (magnitude & 0) + codes.unit_anchor
                sum = magnitude.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
                small = sum.to(tl.int32, bitcast=True) - anchor
            else:
                field = magnitude >> MANTISSA
                one = (magnitude & 0) + 1
                hidden = tl.where(field > 0, one << MANTISSA, 0)
                significand = (magnitude & ((one << MANTISSA) - 1)) | hidden
                place = codes.dropped + codes.low_field - tl.maximum(field, 1)
                small = significand >> tl.minimum(tl.maximum(place, 0), 63 if LAYOUT.wide else 31)
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
    return code, is_nan


@triton.jit
def direct(magnitude, sign, numbers, codes, FORM: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the codes of numbers of fp32, rounded by addition, without their values in between, and which are NaN.

    What overflows does so in the code: its exponent field has room for it in 32 bits.
    """
    is_nan = magnitude > infinity_bits(False)
    _near, small = in_quanta(magnitude, sign, numbers, FORM)
    if LAYOUT.integer:
        size = tl.minimum(small, tl.where(sign != 0, codes.least, codes.most))
        code = tl.where(sign != 0, -size, size)
    else:
        code = ((magnitude + raised(magnitude, sign, numbers, FORM)) >> codes.dropped) - codes.offset
        if LAYOUT.varying:
            code = tl.where(magnitude < codes.smallest_normal, small, code)
        if FORM.overflow == "saturate":
            code = tl.minimum(code, codes.most)
        else:
            code = tl.where(code > codes.most, codes.beyond, code)
        if LAYOUT.infinity and FORM.overflow == "nan":
            code = tl.where(code > codes.most, codes.nan_code, code)
        if LAYOUT.nan == "above":
            code = tl.where(is_nan, codes.nan_code, code)
        side = (sign.to(tl.uint32, bitcast=True) >> (31 - codes.sign_place).to(tl.uint32)).to(tl.int32, bitcast=True)
        if LAYOUT.minus_zero:
            code = code | side
        else:
            code = tl.where((code == 0) | (code == codes.nan_code), code, code | side)
        if LAYOUT.nan == "minus-zero":
            code = tl.where(is_nan, codes.nan_code, code)
    if LAYOUT.nan == "none":
        code = tl.where(is_nan, 0, code)
    return code, is_nan


@triton.jit
def _encode(
    x, out, seed, start, skipped, end, first, numbers, codes, DTYPE: tl.constexpr, FORM: tl.constexpr,
    LAYOUT: tl.constexpr, DIRECT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    places = start + tl.arange(0, COUNT)
    mask = (places >= skipped) & (places < end)
    magnitude, sign = read(x, places - skipped, mask, DTYPE, FORM.wide)
    if DIRECT:
        code, is_nan = direct(magnitude, sign, numbers, codes, FORM, LAYOUT)
    else:
        magnitude, sign = cast(magnitude, sign, first + start, seed, numbers, FORM, COUNT)
        code, is_nan = encoded(magnitude, sign, codes, LAYOUT)
    tl.store(out + (places - skipped), code.to(out.dtype.element_ty), mask=mask)
    return is_nan & mask


@triton.jit
def _encode_exactly(
    x, out, seed, start, skipped, end, first, numbers, codes, DTYPE: tl.constexpr, FORM: tl.constexpr,
    LAYOUT: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Encode again, in small pieces and with all bits, what holds a draw that 32 bits do not decide."""
    places = start + tl.arange(0, COUNT)
    mask = (places >= skipped) & (places < end)
    magnitude, _sign = read(x, places - skipped, mask, DTYPE, FORM.wide)
    PIECE: tl.constexpr = 128 if COUNT > 128 else COUNT
    if is_undecided(magnitude, first + start, seed, numbers, FORM, COUNT):
        for piece in range(0, COUNT, PIECE):
            _encode(x, out, seed, start + piece, skipped, end, first, numbers, codes, DTYPE, FORM, LAYOUT, False, PIECE)


@triton.jit(do_not_specialize=["count", "first", "numbers", "codes"])
def encode(
    x, out, seed, nans, count, skipped, first, numbers, codes, DTYPE: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr, LAYOUT: tl.constexpr, DIRECT: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the codes of `count` numbers, as `casts.quantize` writes values; add up NaNs that have none in `nans`."""
    end = count + skipped
    whole = end // 16 * 16
    key = tl.load(seed) if FORM.random_bits > 0 else 0
    start = tl.program_id(0).to(tl.int64) * BLOCK
    is_nan = _encode(x, out, key, start, skipped, whole, first, numbers, codes, DTYPE, FORM, LAYOUT, DIRECT, BLOCK)
    if FORM.by_noise and FORM.varying and FORM.random_bits > 32:
        _encode_exactly(x, out, key, start, skipped, whole, first, numbers, codes, DTYPE, EXACT, LAYOUT, BLOCK)
    if LAYOUT.nan == "none":
        if tl.reduce(is_nan.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
            tl.atomic_add(nans, tl.reduce(is_nan.to(tl.int32), 0, tl.standard._sum_combine))
    if TAIL:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            lost = _encode(x, out, key, whole, skipped, end, first, numbers, codes, DTYPE, EXACT, LAYOUT, DIRECT, 16)
            if LAYOUT.nan == "none":
                tl.atomic_add(nans, tl.reduce(lost.to(tl.int32), 0, tl.standard._sum_combine))


@triton.jit
def decoded(raw, codes, LAYOUT: tl.constexpr):
    """Return magnitude and sign of the values of codes.

    eee mm  of a normal number becomes  eeeeeeee mmmm...: shifted, and the difference of the biases added; a code below
    the normal numbers counts quanta, and becomes a number as the mantissa of 2**23 (2**52), which is taken off again.
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
        if LAYOUT.varying and LAYOUT.has_zero:
            if LAYOUT.subnormals:
                small = _counted(code, codes, LAYOUT)
                magnitude = tl.where(code < codes.subnormals_from, small, magnitude)
            else:
                magnitude = tl.where(code < codes.subnormals_from, 0, magnitude)
        elif not LAYOUT.subnormals and LAYOUT.has_zero:
            magnitude = tl.where(code < codes.subnormals_from, 0, magnitude)
        infinity = infinity_bits(LAYOUT.wide)
        nan = infinity_bits(LAYOUT.wide) + quiet_bit(LAYOUT.wide)
        if LAYOUT.infinity:
            magnitude = tl.where(code == codes.infinity_code, infinity, magnitude)
            if LAYOUT.nan == "above":
                magnitude = tl.where(code > codes.infinity_code, nan, magnitude)
        elif LAYOUT.nan == "above":
            magnitude = tl.where(code == codes.nan_code, nan, magnitude)
        lowest = -0x8000000000000000 if LAYOUT.wide else -0x80000000
        if LAYOUT.signed:
            negative = ((whole >> codes.sign_place) & 1) != 0
            if LAYOUT.nan == "minus-zero":
                is_nan = negative & (code == 0)
                magnitude = tl.where(is_nan, nan, magnitude)
                negative = negative & (is_nan == 0)
            sign = tl.where(negative, lowest, code & 0)
        else:
            sign = code & 0
    return magnitude, sign


@triton.jit
def _counted(code, codes, LAYOUT: tl.constexpr):
    anchor = (code & 0) + codes.anchor
    quantum = (code & 0) + codes.quantum
    if LAYOUT.wide:
        quanta = (anchor | code).to(tl.float64, bitcast=True) - anchor.to(tl.float64, bitcast=True)
        value = (quanta * quantum.to(tl.float64, bitcast=True)).to(tl.int64, bitcast=True)
    else:
        quanta = (anchor | code).to(tl.float32, bitcast=True) - anchor.to(tl.float32, bitcast=True)
        value = (quanta * quantum.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return value


@triton.jit
def _decode(raw, out, offsets, mask, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr):
    magnitude, sign = decoded(tl.load(raw + offsets, mask=mask, other=0), codes, LAYOUT)
    write(out, offsets, mask, magnitude, sign, DTYPE, LAYOUT.wide)


@triton.jit(do_not_specialize=["count", "codes"])
def decode(raw, out, count, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Write the values of `count` codes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    whole = count // 16 * 16
    places = start + tl.arange(0, BLOCK)
    _decode(raw, out, places, places < whole, codes, DTYPE, LAYOUT)
    if TAIL:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            places = whole + tl.arange(0, 16)
            _decode(raw, out, places, places < count, codes, DTYPE, LAYOUT)
