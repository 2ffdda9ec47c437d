"""The kernels of plain casts: values, codes, and values of codes."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read, write
from lowp.kernels.triton.device.rounding import cast


@triton.jit
def _quantize(
    x, out, seed, offsets, mask, first, numbers, DTYPE: tl.constexpr, FORM: tl.constexpr, COUNT: tl.constexpr
):
    magnitude, sign = read(x, offsets, mask, DTYPE, FORM.wide)
    magnitude, sign = cast(magnitude, sign, first, seed, numbers, FORM, COUNT)
    write(out, offsets, mask, magnitude, sign, DTYPE, FORM.wide)


@triton.jit(do_not_specialize=["count", "first", "numbers"])
def quantize(
    x,
    out,
    seed,
    count,
    skipped,
    first,
    numbers,
    DTYPE: tl.constexpr,
    FORM: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the values of `count` numbers, the first of which has the logical index `first` + `skipped`.

    `first` is a multiple of 4. What ends with a vector of 16 is known to; the rest has a turn of its own (TAIL).
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    whole = (count + skipped) // 16 * 16
    key = tl.load(seed) if FORM.random_bits > 0 else 0
    places = start + tl.arange(0, BLOCK)
    mask = places < whole
    if skipped > 0:
        mask = mask & (places >= skipped)
    _quantize(x, out, key, places - skipped, mask, first + start, numbers, DTYPE, FORM, BLOCK)
    if TAIL:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            places = whole + tl.arange(0, 16)
            mask = (places < count + skipped) & (places >= skipped)
            _quantize(x, out, key, places - skipped, mask, first + whole, numbers, DTYPE, FORM, 16)
