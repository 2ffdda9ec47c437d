"""One cast, in integers: magnitudes rounded to a form and its numbers (`plans`), the same bits as `bitwise`."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.binary import binary
from lowp.kernels.triton.device.bits import infinity_bits, quiet_bit
from lowp.kernels.triton.device.stochastic import drawn_away, noisy


@triton.jit
def cast(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return magnitude and sign of what a cast makes of COUNT numbers from the logical index `first` on."""
    if FORM.binary:
        rounded, sign = binary(magnitude, sign, first, seed, numbers, FORM, COUNT)
    else:
        rounded = _rounded(magnitude, sign, first, seed, numbers, FORM, COUNT)
        if FORM.flush:
            if FORM.has_zero:
                rounded = tl.where(magnitude < numbers.flush_below, 0, rounded)
            else:
                rounded = tl.where(magnitude < numbers.flush_below, numbers.flush_below, rounded)
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

    Of a number in the format's normal range the last `dropped` bits go:   eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
    A carry out of the mantissa raises the exponent by itself. Below that range the place moves up by as many bits as
    the exponent is lower, at last past the hidden bit.
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
def raised(magnitude, sign, numbers, FORM: tl.constexpr):
    """Return what is added to a normal number's bits before those that the format lacks are cut off."""
    one = (magnitude & 0) + 1
    if FORM.rounding == "nearest-even":
        # half a unit less one, and one more where the last kept bit is odd
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
    """Return numbers below the normal ones as multiples of the quantum, in fp32, and how many quanta they are.

    A sum with a number whose unit is the quantum is rounded to it by the adder, to nearest even; what that did, seen by
    comparison, is what another rounding has to undo.
    """
    anchor = (magnitude & 0) + numbers.anchor
    value = magnitude.to(tl.float32, bitcast=True)
    anchored = value + anchor.to(tl.float32, bitcast=True)
    near = anchored - anchor.to(tl.float32, bitcast=True)
    count = anchored.to(tl.int32, bitcast=True) - anchor
    quantum = ((magnitude & 0) + numbers.quantum).to(tl.float32, bitcast=True)
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
    """Do `_rounded` in any rounding: cut, and decide whether a step is added."""
    MANTISSA: tl.constexpr = 52 if FORM.wide else 23
    one = (magnitude & 0) + 1
    field = magnitude >> MANTISSA
    hidden = tl.where(field > 0, one << MANTISSA, 0)
    significand = (magnitude & ((one << MANTISSA) - 1)) | hidden
    shift = (magnitude & 0) + numbers.dropped
    if FORM.varying:
        shift = shift + tl.maximum(numbers.low_field - tl.maximum(field, 1), 0)
    # beyond MANTISSA + 2 places nothing but the smallest distance is left to choose: below half, not zero
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
        rounded = tl.where(rounded > largest, largest, rounded)  # infinity, too
    elif FORM.nan_beyond:  # a NaN that was rounded up may have left int32 for uint32
        beyond = rounded.to(tl.uint32, bitcast=True) > tl.cast(largest, tl.uint32)
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
