"""Stochastic rounding: random words compared with the bits that a cast cuts."""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import first_words, infinity_bits, philox, quiet_bit


@triton.jit
def compared(word, FORM: tl.constexpr):
    """Return the number of 32 bits that the fraction must exceed: the drawn word, or its first N bits followed by the
    bound of the rest: ones if the fraction is cut (0.N11...), 011... if it is rounded half up.
    """
    if FORM.random_bits < 32:
        ONES: tl.constexpr = (1 << (32 - FORM.random_bits)) - 1
        word = word | ONES
        if FORM.rounding == "stochastic-b":
            word = word ^ (1 << (31 - FORM.random_bits))
    return word


@triton.jit
def split(magnitude, numbers, FORM: tl.constexpr):
    """Return the number of cut bits of fp32 numbers, the rest of the significand, and the first 32 cut bits.

    significand * 2**32 >> shift:   1mmmmm|mmmmmmmmmmmmmmmmmm0000...     64 bits: whole, and digit as uint32
    For a shift of 56 or more both words are zero.
    """
    field = magnitude >> 23
    hidden = 0x00800000
    if FORM.reaches_subnormals:
        hidden = tl.where(field > 0, hidden, 0)
        field = tl.maximum(field, 1)
    shift = tl.maximum(numbers.dropped + numbers.low_field - field, numbers.dropped)
    significand = ((magnitude & 0x007FFFFF) | hidden).to(tl.uint64) << 32
    halves = significand >> tl.minimum(shift, 63).to(tl.uint64)
    return shift, (halves >> 32).to(tl.int32), halves.to(tl.uint32)


@triton.jit
def noisy(magnitude, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return fp32 magnitudes rounded stochastically by a comparison of 32 cut bits with the drawn word."""
    word = compared(first_words(first, seed, COUNT), FORM)
    if FORM.by_product:
        cut = lifted(magnitude, word, numbers, FORM) & ((magnitude & 0) - 1 << numbers.dropped)
        grow = ((magnitude & 0) + numbers.grow).to(tl.float32, bitcast=True)
        rounded = (cut.to(tl.float32, bitcast=True) * grow).to(tl.int32, bitcast=True)
        if FORM.nan_beyond:  # a NaN may have overflowed int32 into uint32, and be no NaN any more
            largest = numbers.maximum - (numbers.grow - 0x3F800000)
            beyond = cut.to(tl.uint32) > largest.to(tl.uint32)
            rounded = tl.where(beyond, infinity_bits(False) + quiet_bit(False), rounded)
    elif FORM.varying:
        shift, _whole, digit = split(magnitude, numbers, FORM)
        away = digit > word
        unit = (magnitude & 0) - 1 << shift  # all bits from the cut upwards: minus a step
        rounded = (magnitude & unit) - tl.where(away, unit, 0)
        rounded = tl.where(shift > 23, tl.where(away, numbers.quantum, 0), rounded)
    else:
        rounded = drawn_up(magnitude, word, numbers) & ((magnitude & 0) - 1 << numbers.dropped)
    return rounded


@triton.jit
def drawn_up(magnitude, word, numbers):
    """Return numbers, all cut at one place, with noise added below the cut; the carry is the step.

    For the word w, rest > w >> (32 - dropped) is rest + (~w >> (32 - dropped)) >= 2**dropped.
    """
    noise = (word ^ 0xFFFFFFFF) >> tl.cast(32 - numbers.dropped, tl.uint32)
    return magnitude + noise.to(tl.int32)


@triton.jit
def lifted(magnitude, word, numbers, FORM: tl.constexpr):
    """Return numbers times a power of two with noise added below the cut, as `drawn_up` does.

    The power makes the format's smallest normal number that of fp32: all numbers are cut at one place, above which is
    the code. Products below fp32's normal numbers are rounded in fp32's last place, which matters to no comparison of
    N random bits: for these they are cut instead.
    """
    value = magnitude.to(tl.float32, bitcast=True)
    product = value * ((magnitude & 0) + numbers.shrink).to(tl.float32, bitcast=True)
    bits = product.to(tl.int32, bitcast=True)
    if not FORM.by_more:
        back = product * ((magnitude & 0) + numbers.grow).to(tl.float32, bitcast=True)
        bits = bits + ((value - back).to(tl.int32, bitcast=True) >> 31)  # no difference is -0
    return drawn_up(bits, word, numbers)


@triton.jit
def is_undecided(magnitude, first, seed, numbers, FORM: tl.constexpr, COUNT: tl.constexpr):
    """Return whether more bits than `noisy` compares may decide any number: one in 2**32, or in 2**(dropped - 1).

    `lifted` without the ones it adds to all bits below the cut has 0 there if the drawn word equals the cut bits, and 1
    if it is one less; 1 may also result from the rounding of the product.
    """
    word = first_words(first, seed, COUNT)
    if FORM.by_product:
        up = lifted(magnitude, word, numbers, FORM)
        below = (up * numbers.lift + numbers.lift).to(tl.uint32)
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
            undecided = word == digit
            if tl.reduce(undecided.to(tl.int32), 0, tl.standard._elementwise_max) > 0:  # at most one number in 2**32
                below = below | _below_later(rest.to(tl.int64), shift.to(tl.int64), undecided, first, seed, COUNT)
    else:
        below = _below_units(word, digit, rest, shift, FORM)
    return below


@triton.jit
def digit_at(rest, shift, PLACE: tl.constexpr):
    """Return the 32 bits at PLACE (0 is the first) after the binary point of rest / 2**shift, and others above them."""
    MOST: tl.constexpr = 31 if rest.dtype == tl.int32 else 63
    up = 32 * (PLACE + 1) - shift
    left, right = tl.minimum(tl.maximum(up, 0), MOST), tl.minimum(tl.maximum(-up, 0), MOST)
    return tl.where(up < 0, rest >> right, rest << left)  # one after the other takes 70 registers more


@triton.jit
def _below_later(rest, shift, undecided, first, seed, COUNT: tl.constexpr):
    """Return where the 128 bits after equal first words are below those of rest / 2**shift."""
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
    """Return whether the first N drawn bits are below the fraction in N bits: cut, or rounded half up or half to even.

    u < r + 1 is u <= r, so that a fraction rounded up to 2**N needs no 33rd bit.
    """
    CUT: tl.constexpr = 32 - FORM.random_bits
    drawn, units = word >> CUT, digit >> CUT
    below = drawn < units
    if FORM.rounding != "stochastic":
        # rest / 2**shift = units.h...: h is the bit after the N-th, if there is one
        place = shift - (FORM.random_bits + 1)
        inside = tl.minimum(tl.maximum(place, 0), 62 if FORM.wide else 30)
        one = (rest & 0) + 1
        up = (place >= 0) & (((rest >> inside) & 1) != 0)
        if FORM.rounding == "stochastic-c":
            up = up & (((rest & ((one << inside) - 1)) != 0) | ((units & 1) != 0))
        below = below | (up & (drawn == units))
    return below


@triton.jit
def signs(out, seed, COUNT: tl.constexpr):
    """Write COUNT signs of a Hadamard transform, fp32: -1 where bit 0 of a number's word is set."""
    word = first_words(0, tl.load(seed), COUNT)
    tl.store(out + tl.arange(0, COUNT), 1.0 - 2.0 * (word & 1).to(tl.float32))
