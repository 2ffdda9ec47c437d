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


@triton.jit(do_not_specialize=["count"])
def statistics(x, partial, count, DTYPE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Count ROUNDS blocks in every program; what they found is added up by `merged`, in the order of the programs."""
    WIDE: tl.constexpr = DTYPE == "fp64"
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    places = start + tl.arange(0, BLOCK)
    magnitude, _sign = read(x, places, places < count, DTYPE, WIDE)
    histogram, largest, squares, zeros, nans, infinities = tally(magnitude, places < count, WIDE)
    for _ in tl.static_range(1, ROUNDS):
        places += BLOCK
        magnitude, _sign = read(x, places, places < count, DTYPE, WIDE)
        more, large, energy, zero, nan, infinite = tally(magnitude, places < count, WIDE)
        histogram += more
        largest = tl.maximum(largest, large)
        squares += energy
        zeros += zero
        nans += nan
        infinities += infinite
    keep(partial, histogram, largest, squares, zeros, nans, infinities)


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
