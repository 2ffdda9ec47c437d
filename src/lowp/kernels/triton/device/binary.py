"""Casts to one bit, with the numbers -1 and +1."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import first_words, philox
from lowp.kernels.triton.device.stochastic import digit_at


@triton.jit
def binary(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return -1 for negative numbers, otherwise +1; stochastic: +1 with probability (x + 1) / 2."""
    sign = tl.where(magnitude != 0, sign, 0)
    if FORM.random_bits > 0:
        plus = _drawn_binary(magnitude, sign != 0, first, seed, FORM, COUNT)
        sign = tl.where(magnitude < numbers.quantum, (plus ^ 1) << 63, sign)  # no draw from 1 on
    return (magnitude & 0) + numbers.quantum, sign


@triton.jit
def _drawn_binary(magnitude, minus, first, seed, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return whether a uniform number is below (1 + x) / 2 = 1/2 +- |x| / 2, for fp64 |x| < 1, as 1 or 0.

    Compares digit by digit from the last, with the borrow from beyond the 160 bits.
    """
    significand = (magnitude & 0xFFFFFFFFFFFFF) | (1 << 52)  # of zero and subnormal numbers too: some bits beyond all
    shift = 1076 - (magnitude >> 52)  # |x| / 2 = significand / 2**shift
    one = (magnitude & 0) + 1
    behind = (significand & ((one << tl.minimum(tl.maximum(shift - 160, 0), 62)) - 1)) != 0
    word0 = first_words(first, seed, COUNT)
    word1, word2, word3, word4 = philox(first + tl.arange(0, COUNT), seed, 1)
    borrow = tl.where(behind, one, 0)
    # from the last digit to the first; `later`: the result of the digits compared so far
    later = magnitude & 0
    previous = later
    more = borrow
    for turn in tl.static_range(5):
        word = word4 if turn == 0 else word3 if turn == 1 else word2 if turn == 2 else word1 if turn == 3 else word0
        digit = digit_at(significand, shift, 4 - turn) & 0xFFFFFFFF
        half = 0x80000000 if turn == 4 else 0
        less = half - digit - borrow
        borrow = tl.where(less < 0, one, 0)
        digit = tl.where(minus, less, digit ^ half) & 0xFFFFFFFF
        drawn = word.to(tl.int64)
        if turn == 4 and FORM.random_bits <= 32:
            later = _units_above(drawn, digit, previous, more, FORM)
        else:
            later = tl.where(drawn < digit, one, tl.where(drawn == digit, later, 0))
        if turn < 3:
            more = more | tl.where(digit != 0, one, 0)
        previous = digit
    return later


@triton.jit
def _units_above(drawn, digit, following, more, FORM: tl.constexpr):
    """Return 1 if the first N drawn bits are below two digits followed by `more`, in N bits; otherwise 0."""
    CUT: tl.constexpr = 32 - FORM.random_bits
    units = digit >> CUT
    rest = ((digit & ((1 << CUT) - 1)) << 32) | following
    half = (digit & 0) + (1 << (CUT + 31))
    if FORM.rounding == "stochastic-b":
        units = units + tl.where(rest >= half, 1, 0)
    elif FORM.rounding == "stochastic-c":
        up = (rest > half) | ((rest == half) & ((more != 0) | ((units & 1) != 0)))
        units = units + tl.where(up, 1, 0)
    return ((drawn >> CUT) < units).to(tl.int64)
