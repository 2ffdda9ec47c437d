"""Tensors as int16 under a power of two that is a number of the device: looked at, rounded, and written.

    value = mantissa * 2**exponent        mantissa: LOWEST .. 32767, LOWEST -32768 or -32767

What all programs find together is gathered by integer atomics. The last program to end, told by a counter, draws the
conclusions, so that a tensor takes one launch, and what was found lies ready for the next.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read
from lowp.kernels.triton.device.rounding import cast

_INFINITY = tl.constexpr(0x7F800000)
_NOT_FINITE = tl.constexpr(1 << 15)  # in the place of an exponent, see `lowp.kernels.int16.mantissas`
_ANCHOR = tl.constexpr(0x4B400000)  # 1.5 * 2**23, in whose binade fp32 counts integers


@triton.jit
def _power(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _powers(exponent):
    """Return two powers of two in fp32 whose product is 2**exponent, by which numbers are multiplied in turn."""
    half = tl.minimum(tl.maximum(exponent, -252), 252) >> 1
    return _power(half), _power(tl.minimum(tl.maximum(exponent - half, -126), 127))


@triton.jit
def _units(bits, exponent):
    """Return fp32 numbers, given by their bits, over 2**exponent: exact, but for results below 2**-126."""
    one, other = _powers(-exponent)
    return bits.to(tl.float32, bitcast=True) * one * other


@triton.jit
def _whole(units):
    """Return numbers to the nearest integers, ties to even; those beyond 65536 are 65536. Of a NaN any."""
    near = tl.where(units > 65536.0, 65536.0, tl.where(units < -65536.0, -65536.0, units))
    return (near + 12582912.0).to(tl.int32, bitcast=True) - _ANCHOR


@triton.jit
def _rounded(magnitude, sign, exponent, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return numbers over 2**exponent as integers, rounded once; those beyond 65536 are 65536.

    Of what is not finite any. A form that is not to nearest even rounds fp32 numbers to integers of 24 bits. What
    vanishes in fp32 is the smallest number there: it is not zero, and rounds so.
    """
    units = _units(magnitude | sign, exponent)
    if FORM.rounding != "nearest-even":
        size = units.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        size = tl.where((size == 0) & (magnitude != 0), 1, size)
        size, side = cast(size, sign, first, seed, numbers, FORM, COUNT)
        units = (size | side).to(tl.float32, bitcast=True)
    return _whole(units)


@triton.jit
def _misses(magnitude, sign, exponent, LOWEST: tl.constexpr):
    """Return 1 where a number is no mantissa under an exponent, else 0; a -0 is one."""
    units = _units(magnitude | sign, exponent)
    whole = _whole(units)
    back = (whole + _ANCHOR).to(tl.float32, bitcast=True) - 12582912.0
    held = (whole >= LOWEST) & (whole <= 32767) & (back == units) & ((whole != 0) | (magnitude == 0))
    return tl.where(held, 0, 1)


@triton.jit
def _own_exponent(largest, form, FIXED: tl.constexpr):
    """Return the exponent of a tensor whose largest magnitude is given by its bits, or the one that is FIXED.

    A subnormal number counts units of 2**-149, whose number fp32 holds as a normal one.
    """
    if FIXED:
        exponent = (largest & 0) + form.offset
    else:
        units = largest.to(tl.float32).to(tl.int32, bitcast=True) >> 23
        floor = tl.where(largest < 0x00800000, units - 276, (largest >> 23) - 127)
        exponent = tl.minimum(tl.maximum(floor + form.offset, form.lowest), form.highest)
        exponent = tl.where(largest == 0, 0, exponent)
    return exponent


@triton.jit
def _gather(place, found):
    """Raise the number at a place to what a program found; most programs find nothing larger than is there."""
    if found > tl.load(place):
        tl.atomic_max(place, found)


# -- operands ---------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["form"])
def look(
    x, hint, found, total, form, LOWEST: tl.constexpr, HINTED: tl.constexpr, FIXED: tl.constexpr,
    FINITE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the exponent of a tensor: that of its maximum, or `hint` where every number is a mantissa under it.

    FINITE: what is not finite does not count. found: int32 [8], zeros. 0: the bits of the largest magnitude;
    1: whether a number missed the hint; 3: the exponent; 4: the same, and `NOT_FINITE` of what has an infinity or a
    NaN; 5: whether all is finite; 6: whether the hint serves; 7: the programs that have ended.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude, sign = read(x, places, places < total, DTYPE, False)
    size = tl.where(magnitude < _INFINITY, magnitude, 0) if FINITE else magnitude
    _gather(found, tl.reduce(size, 0, tl.standard._elementwise_max))
    if HINTED:
        missed = _misses(magnitude, sign, tl.load(hint), LOWEST)
        _gather(found + 1, tl.reduce(missed, 0, tl.standard._elementwise_max))
    if tl.atomic_add(found + 7, 1) == tl.num_programs(0) - 1:
        largest = tl.atomic_max(found, 0)
        exponent = _own_exponent(largest, form, FIXED)
        if HINTED:
            serves = tl.atomic_max(found + 1, 0) == 0
            exponent = tl.where(serves, tl.load(hint), exponent)
            tl.store(found + 6, serves.to(tl.int32))
        is_finite = largest < _INFINITY
        tl.store(found + 3, exponent)
        tl.store(found + 4, tl.where(is_finite, exponent, _NOT_FINITE))
        tl.store(found + 5, is_finite.to(tl.int32))


@triton.jit
def look_again(x, found, exact, total, LOWEST: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Write into `exact`, int8, whether every number is a mantissa under the exponent that `look` has found.

    found: of the call before; 2: whether a number missed. Nothing is read where the hint served, or all is lost.
    """
    if (tl.load(found + 6) == 0) & (tl.load(found + 5) != 0):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        magnitude, sign = read(x, places, places < total, DTYPE, False)
        missed = _misses(magnitude, sign, tl.load(found + 3), LOWEST)
        _gather(found + 2, tl.reduce(missed, 0, tl.standard._elementwise_max))
    # the counter of the call before stands at as many programs
    if tl.atomic_add(found + 7, 1) == 2 * tl.num_programs(0) - 1:
        serves = (tl.load(found + 5) != 0) & (tl.atomic_max(found + 2, 0) == 0)
        tl.store(exact, (serves | (tl.load(found + 6) != 0)).to(tl.int8))


@triton.jit(do_not_specialize=["numbers"])
def convert(
    x, out, exponent, seed, total, numbers, LOWEST: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write mantissas under an exponent into `out`; what is not finite becomes 0. Element 0 has the logical index 0."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    key = tl.load(seed) if FORM.random_bits > 0 else start  # not read
    magnitude, sign = read(x, places, places < total, DTYPE, False)
    whole = _rounded(magnitude, sign, tl.load(exponent), start, key, numbers, FORM, BLOCK)
    kept = tl.minimum(tl.maximum(whole, LOWEST), 32767)
    kept = tl.where(magnitude < _INFINITY, kept, 0)
    tl.store(out + places, kept.to(tl.int16), mask=places < total)


# -- writes -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["index", "size", "of_zeros"])
def begin(
    x, exponents, before, started, when, bounds, guesses, scratch, total, index, size, of_zeros, WHEN: tl.constexpr,
    TABLE: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Let an entry that has not started begin with the exponent that `guesses` has for the largest finite number.

    `when`, int8: whether the write that follows counts. Nothing is read of an entry that has started. bounds: fp64
    [size], and guesses: int32 [2 size + 1], of `FirstExponents`; `of_zeros` is the guess of zeros, which start
    nothing. scratch: int32 [2], zeros before and after.
    """
    anew = tl.load(started + index) == 0
    if WHEN:
        anew = anew & (tl.load(when) != 0)
    if anew:
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        magnitude, _sign = read(x, places, places < total, DTYPE, False)
        known = tl.where(magnitude < _INFINITY, magnitude, 0)
        _gather(scratch, tl.reduce(known, 0, tl.standard._elementwise_max))
        if tl.atomic_add(scratch + 1, 1) == tl.num_programs(0) - 1:
            largest = tl.atomic_max(scratch, 0)
            value = largest.to(tl.float32, bitcast=True).to(tl.float64)
            rows = tl.arange(0, TABLE)
            here = rows < size
            bound = tl.load(bounds + rows, mask=here, other=0.0)
            passed = (bound < value).to(tl.int32) + (bound <= value).to(tl.int32)
            place = tl.reduce(tl.where(here, passed, 0), 0, tl.standard._sum_combine)
            exponent = tl.where(largest > 0, tl.load(guesses + place), of_zeros)
            tl.store(exponents + index, exponent)
            tl.store(before + index, exponent)
            tl.store(started + index, (largest > 0).to(tl.int8))
            tl.store(scratch, 0)
            tl.store(scratch + 1, 0)


@triton.jit(do_not_specialize=["index", "numbers"])
def write(
    x, out, exponents, when, otherwise, record, flags, total, index, numbers, LOWEST: tl.constexpr,
    WHEN: tl.constexpr, DTYPE: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values of a tensor under an exponent in fp32; what is not finite stays as it is.

    WHEN: only where `when`, int8, holds; elsewhere `out` is the tensor, and nothing is recorded but an exponent, which
    is `otherwise`. record: int64 [8], zeros. 0: the largest |mantissa| of what is finite; 1: the finite numbers that
    did not fit; 2: those that would not fit under half the unit; 3: the bits of the largest magnitude; 4: the programs
    that have ended; 5: the elements; 7: the exponent. flags: int8 [3], in the same memory: whether anything is not
    finite, whether anything is NaN, and whether all vanished.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    exponent = tl.load(exponents + index)
    magnitude, sign = read(x, places, places < total, DTYPE, False)
    whole = _rounded(magnitude, sign, exponent, start, tl.cast(0, tl.int64), numbers, FORM, BLOCK)
    kept = tl.minimum(tl.maximum(whole, LOWEST), 32767)
    one, other = _powers(exponent)
    value = ((kept + _ANCHOR).to(tl.float32, bitcast=True) - 12582912.0) * one * other
    happens = tl.load(exponents + index) == exponent
    finite = magnitude < _INFINITY
    written = finite
    if WHEN:
        happens = tl.load(when) != 0
        written = finite & happens
    bits = tl.where(written, value.to(tl.int32, bitcast=True), magnitude | sign)
    tl.store(out + places, bits, mask=places < total)
    if happens:
        size = tl.where(finite, tl.abs(kept), 0)
        lost = tl.reduce((finite & (kept != whole)).to(tl.int32), 0, tl.standard._sum_combine)
        crowded = tl.reduce((size > 16383).to(tl.int32), 0, tl.standard._sum_combine)
        _gather(record, tl.reduce(size, 0, tl.standard._elementwise_max).to(tl.int64))
        _gather(record + 3, tl.reduce(magnitude, 0, tl.standard._elementwise_max).to(tl.int64))
        if lost > 0:
            tl.atomic_add(record + 1, lost.to(tl.int64))
        if crowded > 0:
            tl.atomic_add(record + 2, crowded.to(tl.int64))
        if tl.atomic_add(record + 4, 1) == tl.num_programs(0) - 1:
            most = tl.atomic_max(record, 0)
            largest = tl.atomic_max(record + 3, 0)
            tl.store(flags, (largest >= _INFINITY).to(tl.int8))
            tl.store(flags + 1, (largest > _INFINITY).to(tl.int8))
            tl.store(flags + 2, ((most == 0) & (largest > 0) & (largest < _INFINITY)).to(tl.int8))
            tl.store(record + 5, tl.cast(total, tl.int64))
            tl.store(record + 7, exponent.to(tl.int64))
    else:
        tl.store(record + 7, tl.load(otherwise).to(tl.int64))
