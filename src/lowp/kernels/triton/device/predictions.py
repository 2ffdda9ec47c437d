"""The kernel that observes the writes of a step and predicts the exponents of the next ones: Autoflex, all in fp64."""

import triton
import triton.language as tl


@triton.jit
def _power(exponent):
    """Return 2**exponent in fp64, for exponents of normal numbers."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _halved(rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows [ROWS, COLUMNS] with the second half of each added to the first."""
    return tl.reduce(tl.reshape(rows, (ROWS, 2, COLUMNS // 2)), 1, tl.standard._sum_combine)


@triton.jit
def _folded(rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Return the sums of rows by halves, as `lowp.scaling.powers.sum_by_halves` does. WIDTH is 2**STEPS."""
    sums = rows
    for step in tl.static_range(STEPS):
        sums = _halved(sums, ROWS, WIDTH >> step)
    return tl.reshape(sums, (ROWS,))


@triton.jit(do_not_specialize=["count", "limit", "unit", "form"])
def observe(
    places, writtens, rows, results, faulty, exponents, histories, seens, starteds, writes, saturateds,
    moves, bads, befores, needed, in_time, headroom, measured, count, limit, unit, form, BETA: tl.constexpr,
    GAMMA: tl.constexpr, WRITTEN: tl.constexpr, ADAPT: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `ExponentTable._count` and `Autoflex.observe` for entries that were written, in place.

    places: int32 [count], the entries. writtens: int8 [count], whether each counts (read if WRITTEN). rows: int64, what
    was seen, as `write` in `mantissas` records it, which is forgotten. results: int8, where infinities are ordinary
    values. faulty: int8, raised where anything was not finite. limit: the largest mantissa. unit: bits - 2. form:
    headroom, warm headroom, the smallest and the largest exponent. The others: the columns of the table.
    """
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = numbers < count
    place = tl.load(places + numbers, mask=here)
    row = rows + place.to(tl.int64) * 8
    mantissa = tl.load(row, mask=here).to(tl.int32)
    flags = tl.load(row + 6, mask=here).to(tl.int32)
    for word in tl.static_range(8):
        tl.store(row + word, place.to(tl.int64) * 0, mask=here)
    told = tl.load(faulty + place, mask=here)
    tl.store(faulty + place, told | (flags & 1).to(tl.int8), mask=here)
    is_result = tl.load(results + place, mask=here) != 0
    writes_now = here
    if WRITTEN:
        writes_now = here & (tl.load(writtens + numbers, mask=here) != 0)
    bad = writes_now & (tl.where(is_result, flags >> 8, flags) & 1 != 0)
    good = writes_now & (bad == 0)
    saturated = good & (mantissa >= limit)
    remembered = good & (mantissa > 0)
    size = mantissa.to(tl.float64)

    exponent = tl.load(exponents + place, mask=here)
    kappa = _power(exponent)
    before = tl.load(befores + place, mask=here)
    raised = remembered & (saturated | (size * kappa > limit.to(tl.float64) * _power(before)))
    free = tl.log2(32768.0 / tl.maximum(mantissa, 1).to(tl.float64))
    _add(measured + place, remembered.to(tl.float64), here)
    _add(needed + place, raised.to(tl.float64), here)
    _add(in_time + place, (raised & (saturated == 0)).to(tl.float64), here)
    _add(headroom + place, tl.where(remembered, free, 0.0), here)
    tl.store(befores + place, tl.where(writes_now, exponent, before), mask=here)

    value = tl.where(saturated, 2 * mantissa, mantissa).to(tl.float64) * kappa
    seen = tl.where(saturated, 0, tl.load(seens + place, mask=here))
    slots = tl.arange(0, WIDTH)
    inside = here[:, None] & (slots < WINDOW)[None, :]
    ring = place.to(tl.int64)[:, None] * WINDOW + slots[None, :]
    history = tl.load(histories + ring, mask=inside, other=0.0)
    history = tl.where(saturated[:, None], 0.0, history)
    history = tl.where((slots[None, :] == (seen % WINDOW)[:, None]) & remembered[:, None], value[:, None], history)
    tl.store(histories + ring, history, mask=inside)
    known = seen + remembered.to(tl.int32)
    tl.store(seens + place, known, mask=here)

    number = tl.minimum(tl.maximum(known, 1), WINDOW).to(tl.float64)
    mean = _folded(history, BLOCK, WIDTH, STEPS) / number
    apart = history - mean[:, None]
    squares = tl.where(slots[None, :] < tl.minimum(known, WINDOW)[:, None], apart * apart, 0.0)
    deviation = tl.sqrt(_folded(squares, BLOCK, WIDTH, STEPS) / number)
    chi = tl.reduce(history, 1, tl.standard._elementwise_max) + deviation * BETA + kappa * GAMMA
    wanted = (chi.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023 - unit + form.headroom
    wanted += tl.where(known < WINDOW, form.warm_headroom, 0)
    wanted = tl.minimum(tl.maximum(wanted, form.lowest), form.highest)
    predicted = tl.where(good & (known > 0), wanted, exponent) if ADAPT else exponent
    tl.store(exponents + place, predicted, mask=here)
    if ADAPT:
        gone = good & (flags >> 16 & 1 != 0)
        begun = tl.load(starteds + place, mask=here)
        tl.store(starteds + place, tl.where(gone, 0, begun).to(tl.int8), mask=here)
    _add(writes + place, writes_now.to(tl.int64), here)
    _add(saturateds + place, saturated.to(tl.int64), here)
    _add(moves + place, (predicted != exponent).to(tl.int64), here)
    _add(bads + place, bad.to(tl.int64), here)


@triton.jit
def _add(places, more, mask):
    """Add to the numbers at places that no other program touches."""
    tl.store(places, tl.load(places, mask=mask) + more, mask=mask)
