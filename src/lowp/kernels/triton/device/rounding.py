"""One cast, in integers: magnitudes rounded to a form and its numbers (`plans`), the same bits as `bitwise`."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import first_words, philox


@triton.jit
def cast(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return magnitude and sign of what a cast makes of COUNT numbers from the logical index `first` on."""
    if FORM.binary:
        rounded, sign = _binary(magnitude, sign, first, seed, numbers, FORM, COUNT)
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
def infinity_bits(WIDE: tl.constexpr):
    return 0x7FF0000000000000 if WIDE else 0x7F800000


@triton.jit
def quiet_bit(WIDE: tl.constexpr):
    return 0x0008000000000000 if WIDE else 0x00400000


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
        rounded = _noisy(magnitude, first, seed, numbers, FORM, COUNT)
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
        away = _drawn(rest, shift, first, seed, FORM, COUNT)
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


# -- stochastic -------------------------------------------------------------------------------------------------------
@triton.jit
def compared(word, FORM: tl.constexpr):
    """Return the number of 32 bits that the fraction has to exceed: the word drawn, or its first N bits and what
    stands for all that may follow them: ones where the fraction is cut (0.N11...), 011... where it is rounded half up.
    """
    if FORM.random_bits < 32:
        ONES: tl.constexpr = (1 << (32 - FORM.random_bits)) - 1
        word = word | ONES
        if FORM.rounding == "stochastic-b":
            word = word ^ (1 << (31 - FORM.random_bits))
    return word


@triton.jit
def split(magnitude, numbers, FORM: tl.constexpr):
    """Return how many bits of fp32 numbers are cut, what is left of the significand, and the first 32 bits that go.

    significand * 2**32 >> shift:   1mmmmm|mmmmmmmmmmmmmmmmmm0000...     64 bits: whole, and digit as uint32
    Of a shift of 56 and more nothing is in either word.
    """
    field = magnitude >> 23
    hidden = (magnitude & 0) + 0x00800000
    if FORM.reaches_subnormals:
        hidden = tl.where(field > 0, hidden, 0)
        field = tl.maximum(field, 1)
    shift = tl.maximum(numbers.dropped + numbers.low_field - field, numbers.dropped)
    significand = ((magnitude & 0x007FFFFF) | hidden).to(tl.uint64) << 32
    halves = significand >> tl.minimum(shift, 63).to(tl.uint64)
    return shift, (halves >> 32).to(tl.int32), halves.to(tl.uint32)


@triton.jit
def _noisy(magnitude, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Do `_rounded` of fp32 by comparing 32 bits of what is cut with the word drawn."""
    word = compared(first_words(first, seed, COUNT), FORM)
    if FORM.by_sum:
        less, anchor = summed(magnitude, word, numbers, FORM)
        most = (magnitude & 0) - 1 << numbers.dropped
        cut = (less + ~most & most).to(tl.float32, bitcast=True)
        rounded = (cut - anchor).to(tl.int32, bitcast=True)
    elif FORM.varying:
        shift, _whole, digit = split(magnitude, numbers, FORM)
        away = digit > word
        unit = (magnitude & 0) - 1 << shift  # all bits from the place on: minus a step
        rounded = (magnitude & unit) - tl.where(away, unit, 0)
        rounded = tl.where(shift > 23, tl.where(away, numbers.quantum, 0), rounded)
    else:
        rounded = drawn_up(magnitude, word, numbers) & ((magnitude & 0) - 1 << numbers.dropped)
    return rounded


@triton.jit
def drawn_up(magnitude, word, numbers):
    """Return numbers that are all cut at one place with noise added below it: the carry is the step.

    For the word w, rest > w >> (32 - dropped) is rest + (~w >> (32 - dropped)) >= 2**dropped.
    """
    noise = (word ^ 0xFFFFFFFF) >> tl.cast(32 - numbers.dropped, tl.uint32)
    return magnitude + noise.to(tl.int32, bitcast=True)


@triton.jit
def summed(magnitude, word, numbers, FORM: tl.constexpr):
    """Return numbers less the word drawn, below their cut, and what was added to those below the normal ones before.

    That is the smallest normal number, by which the quantum becomes the unit of normal numbers. With all ones below the
    cut added, what is left is `drawn_up`. The sum is rounded in fp32's last place, below which N random bits do not
    look: there it is cut instead.
    """
    smallest = (magnitude & 0) + numbers.smallest_normal
    anchor = tl.where(magnitude < numbers.smallest_normal, smallest, 0).to(tl.float32, bitcast=True)
    value = magnitude.to(tl.float32, bitcast=True)
    sum = value + anchor
    bits = sum.to(tl.int32, bitcast=True)
    if FORM.random_bits <= 32:
        bits = bits - (value - (sum - anchor) < 0.0).to(tl.int32)
    noise = word >> tl.cast(32 - numbers.dropped, tl.uint32)
    return bits - noise.to(tl.int32, bitcast=True), anchor


@triton.jit
def is_undecided(magnitude, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return whether more bits than `_noisy` compares may decide on any number: one in 2**32, or in 2**(dropped - 1).

    `summed` leaves 0 below the cut where the word drawn equals what is cut, and 1 where it is one less, which that may
    have been before it was rounded.
    """
    word = first_words(first, seed, COUNT)
    if FORM.by_sum:
        less, _anchor = summed(magnitude, word, numbers, FORM)
        below = (less * numbers.lift).to(tl.uint32, bitcast=True)
        found = tl.reduce(below, 0, tl.standard._elementwise_min) <= tl.cast(numbers.lift, tl.uint32)
    else:
        _shift, _whole, digit = split(magnitude, numbers, FORM)
        found = tl.reduce(digit ^ word, 0, tl.standard._elementwise_min) == 0
    return found


@triton.jit
def _drawn(rest, shift, first, seed, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return whether a uniform number is below rest / 2**shift, compared over 160 (or N) bits."""
    word = first_words(first, seed, COUNT)
    digit = _digit(rest, shift, 0).to(tl.uint32)
    if FORM.random_bits > 32:
        below = word < digit
        if FORM.varying or FORM.wide:
            left = rest & (((rest & 0) + 1 << tl.minimum(tl.maximum(shift - 32, 0), 62 if FORM.wide else 30)) - 1)
            undecided = (word == digit) & (left != 0)
            if tl.reduce(undecided.to(tl.int32), 0, tl.standard._elementwise_max) > 0:  # one number in 2**32 at most
                below = below | _below_later(rest.to(tl.int64), shift.to(tl.int64), undecided, first, seed, COUNT)
    else:
        below = _below_units(word, digit, rest, shift, FORM)
    return below


@triton.jit
def _digit(rest, shift, PLACE: tl.constexpr):
    """Return the 32 bits at PLACE (0 is the first) behind the binary point of rest / 2**shift."""
    MOST: tl.constexpr = 31 if rest.dtype == tl.int32 else 63
    up = 32 * (PLACE + 1) - shift
    left = tl.where(up < 32, rest << tl.minimum(tl.maximum(up, 0), 31), 0)
    return tl.where(up < 0, rest >> tl.minimum(tl.maximum(-up, 0), MOST), left)


@triton.jit
def _below_later(rest, shift, undecided, first, seed, COUNT: tl.constexpr):
    """Return where the 128 bits behind equal first words are below those of rest / 2**shift."""
    one, two, three, four = philox(first + tl.arange(0, COUNT), seed, 1)
    below = (rest & 0) != 0
    for place in tl.static_range(4):
        word = one if place == 0 else two if place == 1 else three if place == 2 else four
        digit = _digit(rest, shift, place + 1).to(tl.uint32)
        below = below | (undecided & (word < digit))
        undecided = undecided & (word == digit)
    return below


@triton.jit
def _below_units(word, digit, rest, shift, FORM: tl.constexpr):
    """Return whether the first N bits drawn are below the fraction in N bits: cut, or rounded half up or to even.

    u < r + 1 is u <= r, so that a fraction rounded up to 2**N needs no 33rd bit.
    """
    CUT: tl.constexpr = 32 - FORM.random_bits
    drawn, units = word >> CUT, digit >> CUT
    below = drawn < units
    if FORM.rounding != "stochastic":
        # rest / 2**shift = units.h...: h is the bit behind the N-th, where there is one
        place = shift - (FORM.random_bits + 1)
        inside = tl.minimum(tl.maximum(place, 0), 62 if FORM.wide else 30)
        one = (rest & 0) + 1
        up = (place >= 0) & (((rest >> inside) & 1) != 0)
        if FORM.rounding == "stochastic-c":
            up = up & (((rest & ((one << inside) - 1)) != 0) | ((units & 1) != 0))
        below = below | (up & (drawn == units))
    return below


# -- one bit ----------------------------------------------------------------------------------------------------------
@triton.jit
def _binary(magnitude, sign, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return -1 for negative numbers, else +1; stochastic: +1 with probability (x + 1) / 2."""
    minus = (sign != 0) & (magnitude != 0)
    if FORM.random_bits > 0:
        plus = _drawn_binary(magnitude, minus, first, seed, FORM, COUNT)
        minus = tl.where(magnitude < numbers.quantum, plus == 0, minus)  # from 1 on nothing is drawn
    is_nan = magnitude > infinity_bits(FORM.wide)
    lowest = -0x8000000000000000 if FORM.wide else -0x80000000
    return (magnitude & 0) + numbers.quantum, tl.where(is_nan, sign, tl.where(minus, lowest, 0))


@triton.jit
def _drawn_binary(magnitude, minus, first, seed, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return whether a uniform number is below (1 + x) / 2 = 1/2 +- |x| / 2, for fp64 |x| < 1, as 1 or 0.

    Digit by digit from the last, with the borrow that lies behind the 160 bits.
    """
    field = magnitude >> 52
    hidden = tl.where(field > 0, (magnitude & 0) + (1 << 52), 0)
    significand = (magnitude & 0xFFFFFFFFFFFFF) | hidden
    shift = tl.maximum(1076 - tl.maximum(field, 1), 1)  # |x| / 2 = significand / 2**shift
    one = (magnitude & 0) + 1
    behind = (significand & ((one << tl.minimum(tl.maximum(shift - 160, 0), 62)) - 1)) != 0
    word0 = first_words(first, seed, COUNT)
    word1, word2, word3, word4 = philox(first + tl.arange(0, COUNT), seed, 1)
    borrow = tl.where(behind, one, 0)
    # `later`: what the digits compared so far say of the words behind; from the last digit to the first
    later = magnitude & 0
    previous = later
    more = borrow
    for turn in tl.static_range(5):
        word = word4 if turn == 0 else word3 if turn == 1 else word2 if turn == 2 else word1 if turn == 3 else word0
        digit = _digit(significand, shift, 4 - turn) & 0xFFFFFFFF
        half = 0x80000000 if turn == 4 else 0
        less = half - digit - borrow
        borrow = tl.where(less < 0, one, 0)
        digit = tl.where(minus, less, digit + half) & 0xFFFFFFFF
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
    """Return 1 where the first N bits drawn are below two digits, which `more` follows, in N bits; else 0."""
    CUT: tl.constexpr = 32 - FORM.random_bits
    units = digit >> CUT
    rest = ((digit & ((1 << CUT) - 1)) << 32) | following
    half = (digit & 0) + (1 << (CUT + 31))
    if FORM.rounding == "stochastic-b":
        units = units + tl.where(rest >= half, 1, 0)
    elif FORM.rounding == "stochastic-c":
        up = (rest > half) | ((rest == half) & ((more != 0) | ((units & 1) != 0)))
        units = units + tl.where(up, 1, 0)
    return tl.where((drawn >> CUT) < units, (digit & 0) + 1, 0)
