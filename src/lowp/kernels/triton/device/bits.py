"""Reading and writing the numbers of tensors as integers, and drawing random bits.

A number is represented by the bits of an fp32 number in an int32, or, for a wide form, of an fp64 number in an int64:
its magnitude, which counts the representable numbers from zero, and its sign, which is the isolated sign bit. The
device's own conversions are used only between fp16 and fp32 for numbers that both represent.
"""

import triton
import triton.language as tl


@triton.jit
def read(pointer, offsets, mask, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return magnitude and sign of a tensor's numbers, whose bits are integers at `pointer`.

    s eeeeeeee mmmmmmm                    bf16: sixteen zeros are appended
    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm    fp32
    """
    raw = tl.load(pointer + offsets, mask=mask, other=0)
    if DTYPE == "fp64":
        magnitude = raw & 0x7FFFFFFFFFFFFFFF
        sign = raw & -0x8000000000000000
    else:
        if DTYPE == "fp32":
            magnitude = raw & 0x7FFFFFFF
            sign = raw & -0x80000000
        else:
            if DTYPE == "bf16":
                magnitude = (raw.to(tl.int32) << 16) & 0x7FFFFFFF
            else:
                wide = raw.to(tl.float16, bitcast=True).to(tl.float32)  # exact; a NaN becomes some NaN without sign
                magnitude = wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            sign = (raw.to(tl.int32) << 16) & -0x80000000
        if WIDE:
            magnitude = widened(magnitude)
            sign = sign.to(tl.int64) << 32
    return magnitude, sign


@triton.jit
def widened(magnitude):
    """Convert magnitudes of fp32 to magnitudes of fp64, exactly: another bias, and 29 zeros.

    A subnormal number m * 2**-149 is the sum 2**-97 + m * 2**-149, whose mantissa is m, less 2**-97.
    """
    wide = magnitude.to(tl.int64)
    moved = (wide << 29) + (896 << 52)
    anchor = (wide & 0) + (926 << 52)
    small = (wide | anchor).to(tl.float64, bitcast=True) - anchor.to(tl.float64, bitcast=True)
    moved = tl.where(magnitude < 0x00800000, small.to(tl.int64, bitcast=True), moved)
    return tl.where(magnitude >= 0x7F800000, (wide << 29) | (2047 << 52), moved)


@triton.jit
def narrowed(magnitude):
    """Convert magnitudes of fp64 that fp32 represents to magnitudes of fp32; NaN becomes the canonical one."""
    field = magnitude >> 52
    significand = (magnitude & 0xFFFFFFFFFFFFF) | (1 << 52)  # below fp32's normal numbers more than 29 bits are zero
    moved = (significand >> tl.minimum(tl.maximum(926 - field, 29), 63)) + (tl.maximum(field - 897, 0) << 23)
    moved = tl.where(magnitude >= (2047 << 52), 0x7F800000, moved)
    return tl.where(magnitude > (2047 << 52), 0x7FC00000, moved).to(tl.int32)


@triton.jit
def write(pointer, offsets, mask, magnitude, sign, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Write numbers that the dtype represents, in the form that `read` returns."""
    if DTYPE == "fp64":
        if not WIDE:
            magnitude = widened(magnitude)
            sign = sign.to(tl.int64) << 32
        raw = magnitude | sign
    else:
        if WIDE:
            magnitude = narrowed(magnitude)
            sign = (sign >> 32).to(tl.int32)
        if DTYPE == "fp32":
            raw = magnitude | sign
        elif DTYPE == "bf16":
            raw = ((magnitude | sign) >> 16).to(tl.int16)
        else:
            half = magnitude.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True)  # exact
            half = tl.where(magnitude > 0x7F800000, 0x7E00, half.to(tl.int32))
            raw = (half | (sign >> 16)).to(tl.int16)
    tl.store(pointer + offsets, raw, mask=mask)


@triton.jit
def philox(counter, seed, KIND: tl.constexpr):
    """Return four words (uint32) of Philox-4x32-10 at the counters (low, high, KIND, 0) of int64 numbers."""
    counter = counter.to(tl.int64)  # Triton passes an argument that fits int32 as int32
    c0 = counter.to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    c2 = c0 * 0 + KIND
    c3 = c0 * 0
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def first_words(first, seed, COUNT: tl.constexpr):
    """Return the first word of COUNT elements starting at the logical index `first`, a multiple of 4."""
    counter = (first >> 2) + tl.arange(0, COUNT // 4)
    one, two, three, four = philox(counter, seed, 0)
    return tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), (COUNT,))


@triton.jit
def infinity_bits(WIDE: tl.constexpr):
    return 0x7FF0000000000000 if WIDE else 0x7F800000


@triton.jit
def quiet_bit(WIDE: tl.constexpr):
    return 0x0008000000000000 if WIDE else 0x00400000


@triton.jit
def pointer(table, tensor, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address in a column of a tensor's row as a pointer."""
    found = tl.load(table + tensor * COLUMNS + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found
