"""Statistics of a tensor in one read: exponents, maximum, energy, zeros, NaNs and infinities."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import infinity_bits, read, widened


@triton.jit
def _field(magnitude, WIDE: tl.constexpr):
    """Return the exponent fields of fp32, 0 to 254; larger for infinity and NaN, in fp64 the largest."""
    if WIDE:
        field = tl.minimum(tl.maximum((magnitude >> 52) - 896, 0), 254).to(tl.int32)
        field = tl.where(magnitude >= infinity_bits(True), 255, field)
    else:
        field = magnitude >> 23
    return field


@triton.jit(do_not_specialize=["count"])
def statistics(
    x, partial, count, DTYPE: tl.constexpr, OTHERS: tl.constexpr, TAIL: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count ROUNDS blocks in every program; `merged` adds up the results in the order of the programs.

    A histogram of 32 bins takes a third of the instructions of one with 256. Its first 31 bins are exponents, starting
    two above the largest of the first block and descending; the last bin counts zeros. If its largest or smallest
    number shows that a program met other numbers, it reads its blocks again and counts them with 256 bins. partial:
    int64 [programs, 264], zeros. TAIL: `count` is not a multiple of 16, and loads are not vectorized. OTHERS: False
    only to count the instructions of programs that do not read their blocks again.
    """
    WIDE: tl.constexpr = DTYPE == "fp64"
    LAST: tl.constexpr = 31
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    places = start + tl.arange(0, BLOCK)
    if not TAIL:
        count = count // 16 * 16
    magnitude, _sign = read(x, places, places < count, DTYPE, WIDE)
    known = tl.where(magnitude < infinity_bits(WIDE), magnitude, 0)
    top = tl.minimum(tl.reduce(_field(known, WIDE), 0, tl.standard._elementwise_max) + 2, 254)
    largest = magnitude
    least = _less_one(magnitude, WIDE)
    squares = (magnitude & 0).to(tl.float64)
    window = tl.histogram((magnitude & 0).to(tl.int32), LAST + 1, mask=places < 0)
    for turn in tl.static_range(0, ROUNDS):
        here = places + turn * BLOCK
        magnitude, _sign = read(x, here, here < count, DTYPE, WIDE)
        below = tl.minimum((top - _field(magnitude, WIDE)).to(tl.uint32, bitcast=True), LAST)
        window += tl.histogram(below.to(tl.int32, bitcast=True), LAST + 1)
        largest = tl.maximum(largest, magnitude)
        least = tl.minimum(least, _less_one(magnitude, WIDE))
        squares = _with_square(magnitude, squares, WIDE)
    row = partial + tl.program_id(0).to(tl.int64) * 264
    most = tl.reduce(largest, 0, tl.standard._elementwise_max)
    fewest = tl.reduce(least, 0, tl.standard._elementwise_min)
    lowest = _field((fewest + 1).to(largest.dtype, bitcast=True), WIDE)  # 0 for subnormal numbers and empty blocks
    fits = (most < infinity_bits(WIDE)) & (_field(most, WIDE) <= top)
    fits = fits & ((lowest >= tl.maximum(top - LAST + 1, 1)) | (most == 0))
    if fits:
        # zeros, and places beyond the end, are in the last bin or in the bin of exponent 0
        absent = BLOCK * ROUNDS - tl.minimum(tl.maximum(count - start, 0), BLOCK * ROUNDS)
        bins = tl.arange(0, LAST + 1)
        of_zeros = bins == tl.minimum(top, LAST)
        found = window.to(tl.int64) - tl.where(of_zeros, absent, 0)
        tl.store(row + tl.where(of_zeros, 0, top - bins), found, mask=bins <= top)
        tl.store(row + 256, most if WIDE else widened(most))
        tl.store(row + 257, tl.reduce(squares, 0, tl.standard._sum_combine).to(tl.int64, bitcast=True))
        tl.store(row + 258, tl.reduce(tl.where(of_zeros, found, 0), 0, tl.standard._sum_combine))
    elif OTHERS:
        _count_all(x, row, start, count, DTYPE, ROUNDS * 4, BLOCK // 4)
    else:
        tl.store(row + 256, most.to(tl.int64))


@triton.jit
def _less_one(magnitude, WIDE: tl.constexpr):
    """Return magnitudes minus one, unsigned, so that zero is the largest."""
    if WIDE:
        less = (magnitude - 1).to(tl.uint64, bitcast=True)
    else:
        less = (magnitude - 1).to(tl.uint32, bitcast=True)
    return less


@triton.jit
def _with_square(magnitude, sum, WIDE: tl.constexpr):
    """Add the squares of numbers to sums in fp64, which represents the squares of fp32 numbers exactly."""
    if WIDE:
        number = magnitude.to(tl.float64, bitcast=True)
        sum = sum + number * number
    else:
        number = magnitude.to(tl.float32, bitcast=True).to(tl.float64)
        sum = tl.fma(number, number, sum)
    return sum


@triton.jit
def _count_all(x, row, start, count, DTYPE: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Count blocks of any numbers; rare, so that few registers matter more than time: in small blocks."""
    places = start + tl.arange(0, BLOCK)
    WIDE: tl.constexpr = DTYPE == "fp64"
    infinity = infinity_bits(WIDE)
    none = (places & 0).to(tl.int32)
    zeros, nans, infinities = none, none, none
    bins = tl.histogram(none, 256, mask=none != 0)
    largest = (places & 0).to(tl.int64 if WIDE else tl.int32)
    squares = none.to(tl.float64)
    for turn in range(0, ROUNDS):
        here = places + turn * BLOCK
        magnitude, _sign = read(x, here, here < count, DTYPE, WIDE)
        bins += tl.histogram(_field(magnitude, WIDE), 256, mask=here < count)
        zeros += ((magnitude == 0) & (here < count)).to(tl.int32)
        nans += (magnitude > infinity).to(tl.int32)
        infinities += (magnitude == infinity).to(tl.int32)
        known = tl.where(magnitude < infinity, magnitude, 0)
        largest = tl.maximum(largest, known)
        squares = _with_square(known, squares, WIDE)
    most = tl.reduce(largest, 0, tl.standard._elementwise_max)
    tl.store(row + tl.arange(0, 256), bins.to(tl.int64))
    tl.store(row + 256, most if WIDE else widened(most))
    tl.store(row + 257, tl.reduce(squares, 0, tl.standard._sum_combine).to(tl.int64, bitcast=True))
    tl.store(row + 258, tl.reduce(zeros, 0, tl.standard._sum_combine).to(tl.int64))
    tl.store(row + 259, tl.reduce(nans, 0, tl.standard._sum_combine).to(tl.int64))
    tl.store(row + 260, tl.reduce(infinities, 0, tl.standard._sum_combine).to(tl.int64))
