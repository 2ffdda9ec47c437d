"""Checks of gradients over all parameters in one launch."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import pointer, read


@triton.jit
def _check_block(grads, inverse, places, mask, DTYPE: tl.constexpr, UNSCALE: tl.constexpr):
    """Unscale a block; return its magnitudes before, in the bits of fp32."""
    magnitude, sign = read(grads, places, mask, DTYPE, False)
    value = (magnitude | sign).to(tl.float32, bitcast=True)
    if UNSCALE:
        value = value * inverse
        bits = value.to(tl.int32, bitcast=True)
        if DTYPE == "fp32":
            tl.store(grads + places, bits, mask=mask)
        elif DTYPE == "fp16":
            tl.store(grads + places, value.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
        else:
            half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, half)
            tl.store(grads + places, half.to(tl.int16), mask=mask)
    return magnitude


@triton.jit
def _exponents(magnitude, mask):
    field = tl.where(magnitude == 0, 255, magnitude >> 23)  # that of infinity and NaN, which is not counted
    return tl.histogram(field, 256, mask=mask)


@triton.jit
def check(
    table, chunks, inverse, found, largest, histogram, DTYPE: tl.constexpr, UNSCALE: tl.constexpr,
    COUNTS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Unscale one chunk of one gradient; find infinities and NaNs, the largest magnitude and the exponents.

    table: int64 [gradients, 2], address and elements. found: fp32, set to 1 for infinities or NaNs. largest: int32
    [gradients], the bits of the largest magnitude before unscaling; NaN is larger than infinity. histogram: int32
    [256], counts of finite nonzero elements before unscaling by the exponent field of fp32.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    NUMBER: tl.constexpr = tl.int32 if DTYPE == "fp32" else tl.int16
    grads = pointer(table, tensor, 0, 2, NUMBER, ALIGNED)
    count = tl.load(table + tensor * 2 + 1)
    scale = tl.load(inverse) if UNSCALE else 1.0
    whole = count // 16 * 16
    most = tl.full((BLOCK,), 0, tl.int32)
    if COUNTS:
        bins = tl.full((256,), 0, tl.int32)
    for start in range(0, CHUNK, BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        here = places < whole
        magnitude = _check_block(grads, scale, places, here, DTYPE, UNSCALE)
        most = tl.maximum(most, magnitude)
        if COUNTS:
            bins += _exponents(magnitude, here)
    size = tl.reduce(most, 0, tl.standard._elementwise_max)
    if first + CHUNK >= count:  # the last chunk: the elements after the last vector of 16
        last = whole + tl.arange(0, 16)
        is_left = last < count  # a name has one shape in Triton
        few = _check_block(grads, scale, last, is_left, DTYPE, UNSCALE)
        size = tl.maximum(size, tl.reduce(few, 0, tl.standard._elementwise_max))
        if COUNTS:
            bins += _exponents(few, is_left)
    if size >= 0x7F800000:
        tl.store(found, 1.0)
    tl.atomic_max(largest + tensor, size)
    if COUNTS:
        field = tl.arange(0, 256)
        tl.atomic_add(histogram + field, tl.where(field == 255, 0, bins))
