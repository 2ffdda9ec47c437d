"""Statistics: the exponents, the maximum, the energy and the specials of a tensor, in one read."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read, widened, write
from lowp.kernels.triton.device.rounding import cast, infinity_bits


@triton.jit
def tally(magnitude, mask, WIDE: tl.constexpr):
    """Return a block's histogram [256], maximum (fp64's bits), sum of squares (fp64), zeros, NaNs and infinities."""
    infinity = infinity_bits(WIDE)
    finite = magnitude < infinity
    if WIDE:
        field = tl.minimum(tl.maximum((magnitude >> 52) - 896, 0), 254)
    else:
        field = tl.minimum(magnitude >> 23, 254)
    bins = tl.where(finite, tl.where(magnitude == 0, 0, field), 255).to(tl.int32)
    histogram = tl.histogram(bins, 256, mask=mask)
    known = tl.where(finite & mask, magnitude, 0)
    largest = tl.reduce(known, 0, tl.standard._elementwise_max)
    if WIDE:
        number = known.to(tl.float64, bitcast=True)
    else:
        number = known.to(tl.float32, bitcast=True).to(tl.float64)  # exact, subnormal numbers too
        largest = widened(largest)
    squares = tl.reduce(number * number, 0, tl.standard._sum_combine)
    zeros = tl.reduce(((magnitude == 0) & mask).to(tl.int32), 0, tl.standard._sum_combine)
    nans = tl.reduce(((magnitude > infinity) & mask).to(tl.int32), 0, tl.standard._sum_combine)
    infinities = tl.reduce(((magnitude == infinity) & mask).to(tl.int32), 0, tl.standard._sum_combine)
    return histogram, largest, squares, zeros, nans, infinities


@triton.jit
def keep(partial, histogram, largest, squares, zeros, nans, infinities):
    """Write a program's counts in its row of `partial`, int64 [programs, 264]."""
    row = partial + tl.program_id(0).to(tl.int64) * 264
    tl.store(row + tl.arange(0, 256), histogram.to(tl.int64))
    tl.store(row + 256, largest)
    tl.store(row + 257, squares.to(tl.int64, bitcast=True))
    tl.store(row + 258, zeros.to(tl.int64))
    tl.store(row + 259, nans.to(tl.int64))
    tl.store(row + 260, infinities.to(tl.int64))


@triton.jit
def _field(magnitude, WIDE: tl.constexpr):
    """Return the exponent fields of fp32, 0 to 254; what is not finite has a larger one, or in fp64 the largest."""
    if WIDE:
        field = tl.minimum(tl.maximum((magnitude >> 52) - 896, 0), 254).to(tl.int32)
        field = tl.where(magnitude >= infinity_bits(True), 255, field)
    else:
        field = magnitude >> 23
    return field


@triton.jit(do_not_specialize=["count"])
def statistics(x, partial, count, DTYPE: tl.constexpr, OTHERS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Count ROUNDS blocks in every program; what they found is added up by `merged`, in the order of the programs.

    A histogram of 32 bins takes a third of the instructions that one of 256 does: exponents are counted in a window
    that begins two above the largest of the first block, and zeros by themselves. A program that has met a number
    outside of it, or one that is not finite, reads its blocks again and counts these. partial: int64 [programs, 264],
    zeros. OTHERS is True, but where the instructions of all other programs are counted.
    """
    WIDE: tl.constexpr = DTYPE == "fp64"
    WINDOW: tl.constexpr = 32
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    places = start + tl.arange(0, BLOCK)
    magnitude, _sign = read(x, places, places < count, DTYPE, WIDE)
    known = tl.where(magnitude < infinity_bits(WIDE), magnitude, 0)
    top = tl.minimum(tl.reduce(_field(known, WIDE), 0, tl.standard._elementwise_max) + 2, 254)
    largest = known
    squares = (known & 0).to(tl.float64)
    zeros = (known & 0).to(tl.int32)
    outside = zeros != 0
    window = tl.histogram(zeros, WINDOW, mask=outside)
    for turn in tl.static_range(0, ROUNDS):
        here = places + turn * BLOCK
        mask = here < count
        magnitude, _sign = read(x, here, mask, DTYPE, WIDE)
        below = (top - _field(magnitude, WIDE)).to(tl.uint32, bitcast=True)
        inside = below < WINDOW
        window += tl.histogram((below & (WINDOW - 1)).to(tl.int32, bitcast=True), WINDOW, mask=mask & inside)
        outside = outside | ((inside == 0) & (magnitude != 0))
        zeros += ((magnitude == 0) & mask).to(tl.int32)
        known = tl.where(magnitude < infinity_bits(WIDE), magnitude, 0)
        largest = tl.maximum(largest, known)
        number = _number(known, WIDE)
        squares += number * number
    row = partial + tl.program_id(0).to(tl.int64) * 264
    most = tl.reduce(largest, 0, tl.standard._elementwise_max)
    zero = tl.reduce(zeros, 0, tl.standard._sum_combine)
    bins = top - tl.arange(0, WINDOW)
    tl.atomic_add(row + bins, window.to(tl.int64), mask=bins >= 0)
    tl.store(row + 256, most if WIDE else widened(most))
    tl.store(row + 257, tl.reduce(squares, 0, tl.standard._sum_combine).to(tl.int64, bitcast=True))
    tl.store(row + 258, zero.to(tl.int64))
    if top >= WINDOW:  # else zeros were in the window
        tl.atomic_add(row, zero.to(tl.int64))
    if tl.reduce(outside.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        if OTHERS:
            _count_others(x, row, places, count, top, DTYPE, WINDOW, ROUNDS, BLOCK)


@triton.jit
def _number(magnitude, WIDE: tl.constexpr):
    """Return finite numbers in fp64, exactly: subnormal ones too."""
    if WIDE:
        number = magnitude.to(tl.float64, bitcast=True)
    else:
        number = magnitude.to(tl.float32, bitcast=True).to(tl.float64)
    return number


@triton.jit
def _count_others(
    x, row, places, count, top, DTYPE: tl.constexpr, WINDOW: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count what is neither zero nor in the window."""
    WIDE: tl.constexpr = DTYPE == "fp64"
    infinity = infinity_bits(WIDE)
    nans = (places & 0).to(tl.int32)
    infinities = nans
    bins = tl.histogram(nans, 256, mask=nans != 0)
    for turn in range(0, ROUNDS):
        here = places + turn * BLOCK
        magnitude, _sign = read(x, here, here < count, DTYPE, WIDE)
        field = tl.minimum(_field(magnitude, WIDE), 255)
        outside = ((top - field).to(tl.uint32, bitcast=True) >= WINDOW) & (magnitude != 0)
        bins += tl.histogram(field, 256, mask=outside)
        nans += (magnitude > infinity).to(tl.int32)
        infinities += (magnitude == infinity).to(tl.int32)
    tl.atomic_add(row + tl.arange(0, 256), bins.to(tl.int64))
    tl.store(row + 259, tl.reduce(nans, 0, tl.standard._sum_combine).to(tl.int64))
    tl.store(row + 260, tl.reduce(infinities, 0, tl.standard._sum_combine).to(tl.int64))


@triton.jit(do_not_specialize=["count", "numbers"])
def quantize_and_count(
    x, out, seed, partial, count, numbers, DTYPE: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the values of a cast and count what was cast, in one read; element 0 has the logical index 0."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    mask = places < count
    magnitude, sign = read(x, places, mask, DTYPE, FORM.wide)
    histogram, largest, squares, zeros, nans, infinities = tally(magnitude, mask, FORM.wide)
    keep(partial, histogram, largest, squares, zeros, nans, infinities)
    key = tl.load(seed) if FORM.random_bits > 0 else 0
    magnitude, sign = cast(magnitude, sign, start, key, numbers, FORM, BLOCK)
    write(out, places, mask, magnitude, sign, DTYPE, FORM.wide)
