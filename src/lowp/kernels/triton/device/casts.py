"""The kernel of element-wise casts to values."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read, write
from lowp.kernels.triton.device.rounding import cast
from lowp.kernels.triton.device.stochastic import is_undecided


@triton.jit
def _quantize(
    x, out, seed, start, skipped, end, first, numbers, DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Cast those of COUNT places from `start` that are in `skipped` .. `end`; `first`: the logical index of place 0."""
    places = start + tl.arange(0, COUNT)
    mask = (places >= skipped) & (places < end)
    magnitude, sign = read(x, places - skipped, mask, DTYPE, FORM.wide)
    if FORM.by_more:
        if is_undecided(magnitude, first + start, seed, numbers, FORM, COUNT):
            # rare, so that few registers matter more than time: in small blocks, with all bits
            if EXACT is not None:  # None only to count the instructions of the usual path
                PIECE: tl.constexpr = 128 if COUNT > 128 else COUNT
                for piece in range(0, COUNT, PIECE):
                    few = start + piece + tl.arange(0, PIECE)
                    inside = (few >= skipped) & (few < end)
                    size, side = read(x, few - skipped, inside, DTYPE, FORM.wide)
                    size, side = cast(size, side, first + start + piece, seed, numbers, EXACT, PIECE)
                    write(out, few - skipped, inside, size, side, DTYPE, FORM.wide)
        else:
            magnitude, sign = cast(magnitude, sign, first + start, seed, numbers, FORM, COUNT)
            write(out, places - skipped, mask, magnitude, sign, DTYPE, FORM.wide)
    else:
        magnitude, sign = cast(magnitude, sign, first + start, seed, numbers, FORM, COUNT)
        write(out, places - skipped, mask, magnitude, sign, DTYPE, FORM.wide)


@triton.jit(do_not_specialize=["count", "first", "numbers"])
def quantize(
    x, out, seed, count, skipped, first, numbers, DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr,
    TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values of `count` numbers, the first of which has the logical index `first` + `skipped`.

    `first` is a multiple of 4. The compiler knows that the main part ends with a vector of 16; TAIL is the rest.
    """
    end = count + skipped
    whole = end // 16 * 16
    key = tl.load(seed) if FORM.random_bits else 0
    start = tl.program_id(0).to(tl.int64) * BLOCK
    _quantize(x, out, key, start, skipped, whole, first, numbers, DTYPE, FORM, EXACT, BLOCK)
    if TAIL:
        if start + BLOCK > end:  # the last program
            _quantize(x, out, key, whole, skipped, end, first, numbers, DTYPE, FORM, EXACT, 16)
