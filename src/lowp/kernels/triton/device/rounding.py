"""A cast in integers: magnitudes rounded to a form and its numbers (`plans`), with the bits of `bitwise`."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.binary import binary
from lowp.kernels.triton.device.bits import infinity_bits, quiet_bit
from lowp.kernels.triton.device.stochastic import drawn_away, noisy


@triton.jit
def cast(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return magnitude and sign of COUNT numbers after a cast; the first has the logical index `first`."""
    if FORM.binary:
        rounded, sign = binary(magnitude, sign, first, seed, numbers, FORM, COUNT)
    else:
        rounded = _rounded(magnitude, sign, first, seed, numbers, FORM, COUNT)
        if FORM.flush:
            if FORM.has_zero:
                rounded = tl.where(magnitude < numbers.flush_below, 0, rounded)
            else:
                rounded = tl.maximum(rounded, numbers.flush_below)
        if not (FORM.by_product and FORM.nan_beyond):  # else it is in `noisy`
            rounded = _overflowed(rounded, magnitude, sign, numbers, FORM)
        if not FORM.signed:
            if FORM.has_zero:
                refused = (sign < 0) & (magnitude != 0)
            else:
                refused = (sign < 0) | (magnitude == 0)
            rounded = tl.where(refused, numbers.refused, rounded)
    if not FORM.nan_beyond:
        nan = infinity_bits(FORM.wide) + quiet_bit(FORM.wide)
        rounded = tl.where(magnitude > infinity_bits(FORM.wide), nan, rounded)
    if not FORM.signed:
        sign = tl.where(rounded > infinity_bits(FORM.wide), sign, 0)
    elif not FORM.minus_zero:
        sign = tl.where(rounded == 0, 0, sign)
    return rounded, sign


@triton.jit
def _rounded(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return magnitudes rounded as if the exponent had no upper limit.

    In the format's normal range the last `dropped` bits are cut:   eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    A carry out of the mantissa increments the exponent. Below that range the place of the cut moves up by one bit per
    exponent, finally past the hidden bit.
    """
    one = (magnitude & 0) + 1
    if not FORM.cuts:
        rounded = magnitude
    elif FORM.by_addition:
        rounded = (magnitude + raised(magnitude, sign, numbers, FORM)) & ~((one << numbers.dropped) - 1)
    elif FORM.by_noise:
        rounded = noisy(magnitude, first, seed, numbers, FORM, COUNT)
    else:
        rounded = _stepped(magnitude, sign, first, seed, numbers, FORM, COUNT)
    if FORM.by_addition and FORM.varying:
        small, _count = in_quanta(magnitude, sign, numbers, FORM)
        rounded = tl.where(magnitude < numbers.smallest_normal, small.to(tl.int32, bitcast=True), rounded)
    return rounded


@triton.jit
def directed(magnitude, sign, numbers, FORM: tl.constexpr):
    """Return the bits of sums of numbers and powers of two that have the ulp of their neighbours, and binades.

    The sums are rounded up, and so are numbers that have been given the sign that makes theirs this direction. Numbers
    beyond the largest one become it, or the number after it.
    """
    if FORM.overflow == "saturate":
        size = tl.minimum(magnitude, numbers.maximum)
    else:
        size = tl.minimum(magnitude, numbers.maximum + numbers.below_half)
    if FORM.rounding == "up":
        side = sign
    elif FORM.rounding == "down":
        side = sign ^ -0x80000000
    else:
        side = sign | -0x80000000
    binade = tl.maximum(size & 0x7F800000, numbers.smallest_normal)
    bits = binade + (numbers.dropped << 23)
    value, power = (size | side).to(tl.float32, bitcast=True), (bits | side).to(tl.float32, bitcast=True)
    sum = value + power
    rest = (sum - power) - value  # zero is not -0
    ulp = (bits - (23 << 23)) & (rest.to(tl.int32, bitcast=True) >> 31)
    return (sum + ulp.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True), binade


@triton.jit
def raised(magnitude, sign, numbers, FORM: tl.constexpr):
    """Return what is added to a normal number's bits before the extra bits are cut."""
    one = (magnitude & 0) + 1
    if FORM.rounding == "nearest-even":
        # half a unit minus one, plus one if the last kept bit is odd
        more = numbers.below_half + ((magnitude >> numbers.dropped) & 1)
    elif FORM.rounding == "nearest-away":
        more = (one << numbers.dropped) >> 1
    elif FORM.rounding == "up":
        more = tl.where(sign == 0, (one << numbers.dropped) - 1, 0)
    elif FORM.rounding == "down":
        more = tl.where(sign != 0, (one << numbers.dropped) - 1, 0)
    else:
        more = magnitude & 0
    return more


@triton.jit
def in_quanta(magnitude, sign, numbers, FORM: tl.constexpr):
    """Return numbers below the normal ones as multiples of the quantum, in fp32, and their number of quanta.

    The adder rounds a sum with a number whose ulp is the quantum to nearest even; for another rounding, a comparison
    shows the direction and the step is corrected.
    """
    anchor = tl.cast(numbers.anchor, tl.float32, bitcast=True)
    quantum = tl.cast(numbers.quantum, tl.float32, bitcast=True)
    value = magnitude.to(tl.float32, bitcast=True)
    anchored = value + anchor
    near = anchored - anchor
    count = anchored.to(tl.int32, bitcast=True) - numbers.anchor
    if FORM.rounding == "nearest-away":
        more = value - near == 0.5 * quantum
        near = tl.where(more, near + quantum, near)
        count = count + more.to(tl.int32)
    elif FORM.rounding == "toward-zero":
        less = near > value
        near = tl.where(less, near - quantum, near)
        count = count - less.to(tl.int32)
    elif FORM.rounding != "nearest-even":
        outward = (sign == 0) if FORM.rounding == "up" else (sign != 0)
        less, more = (near > value) & (outward == 0), (near < value) & outward
        near = tl.where(more, near + quantum, tl.where(less, near - quantum, near))
        count = count + more.to(tl.int32) - less.to(tl.int32)
    return near, count


@triton.jit
def _stepped(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Implement `_rounded` for any rounding: cut, and decide whether to add a step."""
    MANTISSA: tl.constexpr = 52 if FORM.wide else 23
    HIDDEN: tl.constexpr = 1 << MANTISSA
    one = (magnitude & 0) + 1
    field = magnitude >> MANTISSA
    significand = (magnitude & (HIDDEN - 1)) | tl.where(field > 0, HIDDEN, 0)
    shift = (magnitude & 0) + numbers.dropped
    if FORM.varying:
        shift = shift + tl.maximum(numbers.low_field - tl.maximum(field, 1), 0)
    # with more than MANTISSA + 2 cut places a number is below half of the quantum, but not zero
    places = tl.minimum(shift, MANTISSA + 2)
    rest = significand & ((one << places) - 1)
    if FORM.rounding == "toward-zero":
        away = rest < 0
    elif FORM.rounding == "up":
        away = (rest != 0) & (sign == 0)
    elif FORM.rounding == "down":
        away = (rest != 0) & (sign != 0)
    elif FORM.random_bits == 0:
        half = (one << places) >> 1
        if FORM.rounding == "nearest-away":
            away = (rest != 0) & (rest >= half)
        else:
            lower = significand >> places
            odd = lower & 1
            if FORM.by_code:
                odd = tl.where(lower == 0, 0, (field + numbers.parity_offset) & 1)
            if FORM.rounding == "to-odd":
                away = (rest != 0) & (odd == 0)
            else:
                away = (rest != 0) & (rest + odd > half)
    else:
        away = drawn_away(rest, shift, first, seed, FORM, COUNT)
    step = one << tl.minimum(shift, MANTISSA)
    rounded = (magnitude & ~(step - 1)) + tl.where(away, step, 0)
    if FORM.varying:
        rounded = tl.where(shift > MANTISSA, tl.where(away, numbers.quantum, 0), rounded)
    return rounded


@triton.jit
def _overflowed(rounded, magnitude, sign, numbers, FORM: tl.constexpr):
    largest = numbers.maximum
    if FORM.two_ends:
        largest = tl.where(sign != 0, numbers.minimum, numbers.maximum)
    if FORM.overflow == "saturate":
        rounded = tl.minimum(rounded, largest)  # infinity, too
    elif FORM.nan_beyond:  # a NaN that was rounded up may have overflowed int32 into uint32
        beyond = rounded.to(tl.uint32) > tl.cast(largest, tl.uint32)
        rounded = tl.where(beyond, infinity_bits(False) + quiet_bit(False), rounded)
    else:
        beyond = infinity_bits(FORM.wide)
        if FORM.overflow == "nan":
            beyond = infinity_bits(FORM.wide) + quiet_bit(FORM.wide)
        if FORM.rounding == "toward-zero" or FORM.rounding == "to-odd":
            replaced = largest
        elif FORM.rounding == "up":
            replaced = tl.where(sign == 0, beyond, largest)
        elif FORM.rounding == "down":
            replaced = tl.where(sign != 0, beyond, largest)
        else:
            replaced = beyond
        rounded = tl.where(rounded > largest, replaced, rounded)
        if FORM.is_directed:
            rounded = tl.where(magnitude == infinity_bits(FORM.wide), beyond, rounded)
    return rounded
