"""Exact products of int16 matrices on tensor cores that multiply int8.

x = 256 h + l + 128, with h = x >> 8 and l = (x & 255) - 128, both in -128 .. 127:

    x   s hhhhhhh llllllll       sum a b = 2^16 sum ha hb + 2^8 sum (ha lb + la hb) + sum la lb
                                           + 128 (sum a + sum b) - 2^14 depth

Every sum of products of digits fits int32 for a depth up to 2^15 and any operands.
"""

import triton
import triton.language as tl


@triton.jit
def _high(x):
    return (x >> 8).to(tl.int8)


@triton.jit
def _low(x):
    return ((x & 255) - 128).to(tl.int8)


@triton.jit
def _total(
    a, b, rows, columns, m, n, depth, along_m, along_ak, along_bk, along_n, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the exact sums of a tile in int64; elements outside the operands are zero."""
    high = tl.full((ROWS, COLUMNS), 0, tl.int32)
    middle = high
    low = high
    sum_a = tl.full((ROWS,), 0, tl.int32)
    sum_b = tl.full((COLUMNS,), 0, tl.int32)
    in_rows, in_columns = rows < m, columns < n
    steps = (depth + DEPTH - 1) // DEPTH
    for step in range(0, steps):
        inner = step * DEPTH + tl.arange(0, DEPTH)
        left = tl.load(
            a + rows[:, None].to(tl.int64) * along_m + inner[None, :].to(tl.int64) * along_ak,
            mask=in_rows[:, None] & (inner[None, :] < depth), other=0,
        )  # fmt: skip
        right = tl.load(
            b + inner[:, None].to(tl.int64) * along_bk + columns[None, :].to(tl.int64) * along_n,
            mask=(inner[:, None] < depth) & in_columns[None, :], other=0,
        )  # fmt: skip
        left_high, left_low, right_high, right_low = _high(left), _low(left), _high(right), _low(right)
        high = tl.dot(left_high, right_high, high, out_dtype=tl.int32)
        middle = tl.dot(left_high, right_low, middle, out_dtype=tl.int32)
        middle = tl.dot(left_low, right_high, middle, out_dtype=tl.int32)
        low = tl.dot(left_low, right_low, low, out_dtype=tl.int32)
        sum_a += tl.reduce(left.to(tl.int32), 1, tl.standard._sum_combine)
        sum_b += tl.reduce(right.to(tl.int32), 0, tl.standard._sum_combine)
    sums = sum_a[:, None].to(tl.int64) + sum_b[None, :].to(tl.int64)
    total = (high.to(tl.int64) << 16) + (middle.to(tl.int64) << 8) + low.to(tl.int64)
    return total + (sums << 7) - (tl.cast(steps * DEPTH, tl.int64) << 14)


@triton.jit
def matmul(
    a, b, out, seen, scale, m, n, depth, batch_a, along_m, along_ak, batch_b, along_bk, along_n,
    KIND: tl.constexpr, LOWEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a tile of a @ b times `scale`, a power of two. KIND: int64 (not scaled), fp64, fp32, int16, or chained:
    fp32 sums of exact sums over a depth of 256. A scale of 0 returns at once; a scale of NaN makes every float NaN.

    seen, int64 [3], accumulates the elements that did not fit int16, the largest |mantissa| and the largest |sum|.
    """
    # tiles by rows, columns, then batch, in one axis: a second axis of CUDA's grid has at most 65,535
    tall = (m + ROWS - 1) // ROWS
    wide = (n + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    rows = tile % tall * ROWS + tl.arange(0, ROWS)
    columns = tile // tall % wide * COLUMNS + tl.arange(0, COLUMNS)
    batch = (tile // tall // wide).to(tl.int64)
    a += batch * batch_a
    b += batch * batch_b
    factor = tl.load(scale)
    depth = tl.where(factor == 0, 0, depth)  # a scale of 0 needs no sum
    if KIND == "chained":
        chain = tl.full((ROWS, COLUMNS), 0, tl.float32)
        for first in range(0, depth, 256):
            left, right = a + tl.cast(first, tl.int64) * along_ak, b + tl.cast(first, tl.int64) * along_bk
            few = tl.minimum(depth - first, 256)
            total = _total(
                left, right, rows, columns, m, n, few, along_m, along_ak, along_bk, along_n, ROWS, COLUMNS, DEPTH
            )
            chain = chain + total.to(tl.float32)
        total = tl.full((ROWS, COLUMNS), 0, tl.int64)
    else:
        total = _total(a, b, rows, columns, m, n, depth, along_m, along_ak, along_bk, along_n, ROWS, COLUMNS, DEPTH)
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    places = batch * m * n + rows[:, None].to(tl.int64) * n + columns[None, :]
    size = tl.where(mask, tl.abs(total), 0)
    tl.atomic_max(seen + 2, _largest(size))
    if KIND == "chained":
        tl.store(out + places, (chain.to(tl.float64) * factor).to(tl.float32), mask=mask)
    elif KIND == "int64":
        tl.store(out + places, total, mask=mask)
    else:
        value = total.to(tl.float64) * factor  # exact: a sum is below 2^46
        if KIND == "fp64":
            tl.store(out + places, value, mask=mask)
        elif KIND == "fp32":
            tl.store(out + places, value.to(tl.float32), mask=mask)
        else:
            near = tl.where(value > 65536.0, 65536.0, tl.where(value < -65536.0, -65536.0, value))
            whole = _to_nearest(near)
            kept = tl.minimum(tl.maximum(whole, LOWEST), 32767)
            tl.store(out + places, kept.to(tl.int16), mask=mask)
            lost = tl.where(mask & (kept != whole), 1, 0)
            magnitude = tl.where(mask, tl.abs(kept), 0)
            tl.atomic_add(seen, _counted(lost).to(tl.int64))
            tl.atomic_max(seen + 1, _largest(magnitude).to(tl.int64))


@triton.jit
def _to_nearest(value):
    """Return numbers below 2^51 as integers, to nearest even: a sum with 1.5 * 2^52 has no fractional bits."""
    anchor = (value.to(tl.int64, bitcast=True) & 0) + 0x4338000000000000
    moved = value + anchor.to(tl.float64, bitcast=True)
    return (moved.to(tl.int64, bitcast=True) - anchor).to(tl.int32)


@triton.jit
def _largest(x):
    return tl.reduce(tl.reduce(x, 1, tl.standard._elementwise_max), 0, tl.standard._elementwise_max)


@triton.jit
def _counted(x):
    return tl.reduce(tl.reduce(x, 1, tl.standard._sum_combine), 0, tl.standard._sum_combine)
