"""Casts in blocks whose scale or element is the better of two: that of the smaller sum of squared errors.

The errors are compared in fp32, in units of the first scale. Where their difference is not above the bound of its own
error, fp64 decides, as the definition does.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read
from lowp.kernels.triton.device.codes import encoded, store
from lowp.kernels.triton.device.scaled import each_of, finite, keep, put_values, scales_of, write_blocks
from lowp.kernels.triton.device.scales import ratio, to_odd, wide_of
from lowp.kernels.triton.device.usual import bits_of, float_of, inverted


@triton.jit
def _nearest(x, WHOLES: tl.constexpr):
    """Return the nearest e2m1, or whole number to 7, of fp32 numbers that are not negative; and half the step there."""
    if WHOLES:
        power = x * 0.0 + 12582912.0  # 1.5 * 2**23
        nearest = tl.minimum((x + power) - power, 7.0)
        half = x * 0.0 + 0.5
    else:
        power = tl.maximum(float_of(bits_of(x) & 0x7F800000), 1.0) * 4194304.0  # 2**22
        nearest = tl.minimum((x + power) - power, 6.0)
        half = power * 5.9604644775390625e-08  # 2**-24
    return nearest, half


@triton.jit
def _nearest_wide(x, WHOLES: tl.constexpr):
    """Return the same elements of fp64 numbers."""
    step = x * 0.0 + 1.0
    if WHOLES:
        size = tl.minimum(x, 7.0)
    else:
        size = tl.minimum(x, 6.0)
        step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    magic = step * 6755399441055744.0  # 1.5 * 2**52
    return (size + magic) - magic


@triton.jit
def _sum_by_halves(table, SIZE: tl.constexpr):
    """Return the sums of rows of SIZE numbers: the second half is added to the first until one number is left."""
    GROUPS: tl.constexpr = table.shape[0]
    for turn in tl.static_range(9):
        if (SIZE >> turn) > 1:
            halves = tl.reshape(table, (GROUPS, 2, SIZE >> (turn + 1)))
            table = tl.reduce(halves, 1, tl.standard._sum_combine)
    return tl.reshape(table, (GROUPS,))


@triton.jit
def _error(wide, by, WHOLES: tl.constexpr, SIZE: tl.constexpr):
    """Return the squared errors in fp64 of rows of magnitudes under their scales."""
    quotient = tl.where(by == 0, 0.0, wide / by)
    rest = _nearest_wide(quotient, WHOLES) * by - wide
    return _sum_by_halves(rest * rest, SIZE)


@triton.jit
def _wide_divisor(by, outer, WHOLES: tl.constexpr):
    """Return scales times the outer scale in fp64; of whole numbers, so that 7 reaches as far as 6."""
    divisor = wide_of(by) * outer.to(tl.float64)
    if WHOLES:
        divisor = divisor * 6.0 / 7.0
    return divisor


@triton.jit
def _is_better(table, largest, by, other, outer, WHOLES: tl.constexpr, SIZE: tl.constexpr):
    """Return whether rows of finite magnitudes have smaller errors under `other` scales than under `by`.

    Quotients of at most 8 have an error of 2**-19, so that squares of rests up to 2 have one of 2**-16.6, and those of
    the second up to 4 times that. The terms are at most 20, and each of their sums rounds to 24 bits.
    """
    bound = SIZE * (6.103515625e-05 + SIZE * 1.1920928955078125e-06)  # 2**-14, 20 * 2**-24
    one = float_of(by) * outer
    two = one * 0.85714285714285714 if WHOLES else float_of(other) * outer
    size = float_of(largest)
    is_usual = (one > 8.6e-19) & (two < 1e30) & (two <= 2.0 * one) & (2.0 * two > one)
    is_usual = is_usual & (size <= 8.0 * one) & (size <= 8.0 * two)
    x = float_of(table)
    first = x * inverted(tl.where(is_usual, one, 1.0))[:, None]
    second = x * inverted(tl.where(is_usual, two, 1.0))[:, None]
    element, _half = _nearest(first, False)
    rest = element - first
    element, _half = _nearest(second, WHOLES)
    ratio_of_scales = tl.where(is_usual, two, 1.0) * inverted(tl.where(is_usual, one, 1.0))
    other_rest = (element - second) * ratio_of_scales[:, None]
    lead = tl.reduce(other_rest * other_rest - rest * rest, 1, tl.standard._sum_combine)
    better = is_usual & (lead < -bound)
    unsure = (largest != 0) & ((is_usual == 0) | ((lead >= -bound) & (lead <= bound)))
    if tl.reduce(unsure.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        wide = wide_of(table)
        error = _error(wide, _wide_divisor(by, outer, False)[:, None], False, SIZE)
        error_of_other = _error(wide, _wide_divisor(other, outer, WHOLES)[:, None], WHOLES, SIZE)
        better = tl.where(unsure, error_of_other < error, better)
    return better


@triton.jit
def _put_either(
    out, start, end, magnitude, sign, by, is_whole, divisor, hard, codes, DTYPE: tl.constexpr, LAYOUT: tl.constexpr,
    SHARING: tl.constexpr,
):  # fmt: skip
    """Write numbers as codes or values of whole numbers, or of e2m1, under divisors in fp64; zero divisors give zeros.

    Quotients in fp32 have an error of 2**-21 of them. A program with one nearer to a midpoint divides in fp64.
    """
    poisoned = by > 0x7F800000
    magnitude = tl.where(poisoned, 0, magnitude)
    near = divisor.to(tl.float32)
    quotient = float_of(magnitude) * inverted(tl.where((hard != 0) | poisoned | (by == 0), 1.0, near))
    whole, _half = _nearest(quotient, True)
    few, half = _nearest(quotient, False)
    element = tl.where(is_whole, whole, few)
    half = tl.where(is_whole, 0.5, half)
    doubt = tl.abs(quotient - element) >= half - quotient * 9.5367431640625e-07  # 2**-20
    element = tl.where(by == 0, 0.0, element)
    doubt = doubt | (hard != 0)
    if tl.reduce(doubt.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        exact = wide_of(magnitude) / divisor
        exact = tl.where(is_whole, _nearest_wide(exact, True), _nearest_wide(exact, False))
        element = tl.where((by == 0) | poisoned, 0.0, exact).to(tl.float32)
    side = tl.where(poisoned | (is_whole & (element == 0.0)), 0, sign)
    if SHARING.codes:
        size = element.to(tl.int32)
        code = encoded(bits_of(element), side, codes, LAYOUT)
        code = tl.where(is_whole, tl.where(side != 0, -size, size) & ((2 << codes.sign_place) - 1), code)
        store(out, start, end, code, LAYOUT)
    else:
        value = tl.where(poisoned, 0.0, element.to(tl.float64) * tl.where(poisoned, 1.0, divisor))
        if DTYPE == "fp32":
            bits = tl.minimum(bits_of(value.to(tl.float32)) & 0x7FFFFFFF, 0x7F7FFFFF)
        else:
            bits = to_odd(value)
        put_values(out, start, end, tl.where(poisoned, 0x7FC00000, bits), side, poisoned, DTYPE, SHARING)


@triton.jit(do_not_specialize=["numbers", "codes", "sharing", "second", "scale_numbers", "scale_codes"])
def tried(
    x, out, scales, outers, lost, total, numbers, codes, sharing, second, scale_numbers, scale_codes,
    DTYPE: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr,
    WHOLES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast `total` numbers like `scaled.blocks`, under outer scales, each block with the better of two.

    WHOLES: its elements are e2m1, or whole numbers, which a minus sign of the scale tells. Otherwise its scale is that
    of `sharing` or of `second`.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    magnitude, sign = read(x, places, places < total, DTYPE, False)
    table = tl.reshape(magnitude, (BLOCK // SIZE, SIZE))
    highest = tl.reduce(table, 1, tl.standard._elementwise_max)
    outer = tl.load(outers)
    by, exponent = scales_of(highest, highest, outer, scale_numbers, sharing, SHARING)
    other = by if WHOLES else ratio(highest, outer, scale_numbers, second, SHARING)
    better = _is_better(finite(table), finite(highest), by, other, outer, WHOLES, SIZE)
    groups = tl.program_id(0).to(tl.int64) * (BLOCK // SIZE) + tl.arange(0, BLOCK // SIZE)
    if WHOLES:
        if SHARING.codes:
            KEPT: tl.constexpr = SHARING.layout  # Triton 3.6 passes no tuple out of a tuple
            code = encoded(by, tl.where(better, -0x80000000, 0), scale_codes, KEPT)
            tl.store(scales + groups, code.to(tl.int8), mask=groups < total // SIZE)
        divisor = tl.where(better, _wide_divisor(by, outer, True), _wide_divisor(by, outer, False))
        hard = ((divisor < 8.6e-19) | (divisor > 1e30)) & (by != 0)
        _put_either(
            out, start, total, magnitude, sign, each_of(by, SIZE), each_of(better.to(tl.int32), SIZE) != 0,
            each_of(divisor, SIZE), each_of(hard.to(tl.int32), SIZE), codes, DTYPE, LAYOUT, SHARING,
        )  # fmt: skip
    else:
        by = tl.where(better & (by < 0x7F800000), other, by)
        if SHARING.codes:
            keep(scales, groups, groups < total // SIZE, by, exponent, scale_numbers, scale_codes, sharing, SHARING)
        write_blocks(
            out, start, total, magnitude, sign, highest, by, outer, 0, 0, numbers, codes, DTYPE, FORM, EXACT, LAYOUT,
            SHARING, SIZE, BLOCK,
        )  # fmt: skip
