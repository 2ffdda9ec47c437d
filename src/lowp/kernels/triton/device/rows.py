"""Casts with a scale per row, or one for a tensor: a program casts a row, or a part of a long one."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read
from lowp.kernels.triton.device.scaled import finite, keep, keep_numbers, scales_of, write
from lowp.kernels.triton.device.usual import divisors


@triton.jit
def _read(x, places, length, DTYPE: tl.constexpr, SHARING: tl.constexpr):
    """Return magnitudes and signs of a row's numbers; with `spoils` infinities are NaN."""
    magnitude, sign = read(x, places, places < length, DTYPE, False)
    if SHARING.spoils:
        magnitude = tl.where(magnitude >= 0x7F800000, 0x7FC00000, magnitude)
    return magnitude, sign


@triton.jit
def _scale(
    scales, row, is_first, highest, largest, outer, scale_numbers, scale_codes, sharing, SHARING: tl.constexpr
):  # fmt: skip
    """Return the scale of a row by its maxima, written where codes are, its `divisors`, and whether `usual` fails."""
    by, exponent = scales_of(largest, highest, outer, scale_numbers, sharing, SHARING)
    if SHARING.codes:
        keep(scales, row, is_first, by, exponent, scale_numbers, scale_codes, sharing, SHARING)
    inverse, upper, lower, hard = by, by, by, 0  # not read
    if SHARING.near:
        inverse, upper, lower, hard = divisors(by, highest, outer, SHARING)
    elif SHARING.summed or SHARING.direct:
        hard = (highest >= 0x7E800000).to(tl.int32)
    return by, inverse, upper, lower, hard


@triton.jit
def _write(
    x, out, lost, start, length, magnitude, sign, highest, by, inverse, upper, lower, hard, outer, first, key, numbers,
    codes, DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Write COUNT numbers of a row from `start` on, whose first number has the logical index `first`."""
    inside = tl.arange(0, COUNT)
    missing = write(
        out, start, length, magnitude, sign, inside * 0 + by, inverse, upper, lower, hard, outer, first + start, key,
        numbers, codes, DTYPE, FORM, EXACT, LAYOUT, SHARING, COUNT,
    )  # fmt: skip
    if SHARING.keeps:
        if highest >= 0x7F800000:
            keep_numbers(x, out, start + inside, length, DTYPE)
    if SHARING.loses:
        if missing > 0:
            tl.store(lost, 1)


@triton.jit(do_not_specialize=["first", "numbers", "codes", "sharing", "scale_numbers", "scale_codes"])
def rows(
    x, out, scales, outers, lost, seed, length, first, numbers, codes, sharing, scale_numbers, scale_codes,
    DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast a row of `length` numbers that share a scale, like `blocks`; a WHOLE row fits one BLOCK and is read once."""
    row = tl.program_id(0).to(tl.int64)
    x += row * length
    out += row * length // 2 if LAYOUT.packed else row * length
    first += row * length
    inside = tl.arange(0, BLOCK)
    magnitude, sign = _read(x, inside, length, DTYPE, SHARING)
    highest = tl.reduce(magnitude, 0, tl.standard._elementwise_max)
    largest = highest
    if not SHARING.marks:
        if SHARING.again and highest >= 0x7F800000:
            largest = tl.reduce(finite(magnitude), 0, tl.standard._elementwise_max)
    if not WHOLE:
        for start in range(BLOCK, length, BLOCK):
            more, _side = _read(x, start + inside, length, DTYPE, SHARING)
            highest = tl.maximum(highest, tl.reduce(more, 0, tl.standard._elementwise_max))
            largest = tl.maximum(largest, tl.reduce(finite(more), 0, tl.standard._elementwise_max))
    outer = 1.0  # rows have no other
    key = tl.load(seed) if FORM.random_bits else 0
    by, inverse, upper, lower, hard = _scale(
        scales, row, row >= 0, highest, largest, outer, scale_numbers, scale_codes, sharing, SHARING
    )
    if WHOLE:
        _write(
            x, out, lost, 0, length, magnitude, sign, highest, by, inverse, upper, lower, hard, outer, first, key,
            numbers, codes, DTYPE, FORM, EXACT, LAYOUT, SHARING, BLOCK,
        )  # fmt: skip
    else:
        for start in range(0, length, BLOCK):
            magnitude, sign = _read(x, start + inside, length, DTYPE, SHARING)
            _write(
                x, out, lost, start, length, magnitude, sign, highest, by, inverse, upper, lower, hard, outer, first,
                key, numbers, codes, DTYPE, FORM, EXACT, LAYOUT, SHARING, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["first", "numbers", "codes", "sharing", "scale_numbers", "scale_codes"])
def parts(
    x, out, scales, outers, lost, seed, maxima, length, first, numbers, codes, sharing, scale_numbers, scale_codes,
    DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast one block of a row of `length` numbers, whose `maxima` are those of `largest_of_rows`, like `rows`."""
    row, start = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BLOCK
    x += row * length
    out += row * length // 2 if LAYOUT.packed else row * length
    first += row * length
    magnitude, sign = _read(x, start + tl.arange(0, BLOCK), length, DTYPE, SHARING)
    highest, largest = tl.load(maxima + 2 * row), tl.load(maxima + 2 * row + 1)
    outer = 1.0  # rows have no other
    key = tl.load(seed) if FORM.random_bits else 0
    by, inverse, upper, lower, hard = _scale(
        scales, row, start == 0, highest, largest, outer, scale_numbers, scale_codes, sharing, SHARING
    )
    _write(
        x, out, lost, start, length, magnitude, sign, highest, by, inverse, upper, lower, hard, outer, first, key,
        numbers, codes, DTYPE, FORM, EXACT, LAYOUT, SHARING, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def largest_of_rows(x, partial, length, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the bits of the largest magnitude of each block of each row, and of its largest finite one.

    partial: int32 [rows, 2, blocks]; a program for each block and row.
    """
    row, count = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude, _sign = read(x + row * length, places, places < length, DTYPE, False)
    partial += 2 * row * count + tl.program_id(0)
    tl.store(partial, tl.reduce(magnitude, 0, tl.standard._elementwise_max))
    tl.store(partial + count, tl.reduce(finite(magnitude), 0, tl.standard._elementwise_max))
