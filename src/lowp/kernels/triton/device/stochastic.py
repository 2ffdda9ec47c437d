"""Stochastic rounding: the random words that are drawn, compared with what a cast cuts off."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import first_words, philox


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
def noisy(magnitude, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return fp32 magnitudes rounded stochastically, by comparing 32 bits of what is cut with the word drawn."""
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
    """Return whether more bits than `noisy` compares may decide on any number: one in 2**32, or in 2**(dropped - 1).

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
def drawn_away(rest, shift, first, seed, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return whether a uniform number is below rest / 2**shift, compared over 160 (or N) bits."""
    word = first_words(first, seed, COUNT)
    digit = digit_at(rest, shift, 0).to(tl.uint32)
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
def digit_at(rest, shift, PLACE: tl.constexpr):
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
        digit = digit_at(rest, shift, place + 1).to(tl.uint32)
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
