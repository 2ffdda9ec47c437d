"""Steps of optimizers over all parameters in one launch; weight, moments and gradient are read and written once.

Each operation is rounded to nearest in fp32 and none are fused, so that every device gives the same bits.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import pointer, read, write
from lowp.kernels.triton.device.codes import decoded, store
from lowp.kernels.triton.device.rounding import cast
from lowp.kernels.triton.device.scaled import codes_under_powers, each_of
from lowp.kernels.triton.device.scales import power_bits, power_of_two
from lowp.kernels.triton.device.stochastic import is_undecided

SHARE = tl.constexpr(1 << 16)  # numbers of a parameter that draw by one seed: BLOCK of optim/storage.py
# what `seed_of` of optim/storage.py multiplies its counters by, as signed words
SEED_OF_STEP = tl.constexpr(0x9E37_79B9_7F4A_7C15 - (1 << 64))
SEED_OF_TENSOR = tl.constexpr(0xC2B2_AE3D_27D4_EB4F - (1 << 64))
SEED_OF_SLOT = tl.constexpr(0x1656_67B1_9E37_79F9)


@triton.jit
def _values(numbers, places, mask, DTYPE: tl.constexpr):
    """Return numbers of a dtype in fp32."""
    magnitude, sign = read(numbers, places, mask, DTYPE, False)
    return (magnitude | sign).to(tl.float32, bitcast=True)


@triton.jit
def _joined(half, remainder, places, mask, REST: tl.constexpr):
    """Return fp32 weights, which are stored as a bf16 half and a remainder of REST bits.

    bits = half * 2**16 + remainder, with 16 bits in -32768 .. 32767; of 8 bits the other 8 are zeros. If other code has
    set the half to 0, a negative remainder counts as 0.
    """
    upper = tl.load(half + places, mask=mask, other=0).to(tl.int32)
    rest = tl.load(remainder + places, mask=mask, other=0).to(tl.int32)
    rest = tl.where((upper & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
    return ((upper << 16) + (rest << (16 - REST))).to(tl.float32, bitcast=True)


@triton.jit
def _split(half, remainder, places, mask, bits, REST: tl.constexpr):
    """Write bits of fp32 weights for `_joined`: the half is the nearest bf16, ties away from zero; a NaN stays one."""
    kept = bits if REST == 16 else (bits + 0x80) >> 8
    upper = (kept + (1 << (REST - 1))) >> REST
    rest = kept - (upper << REST)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    upper = tl.where(is_nan, (bits >> 16) | 0x40, upper)
    tl.store(half + places, upper.to(tl.int16), mask=mask)
    tl.store(remainder + places, tl.where(is_nan, 0, rest).to(remainder.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(gradients, inverse, places, mask, DTYPE: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr):
    gradient = _values(gradients, places, mask, DTYPE)
    if SCALED:
        gradient = gradient * tl.load(inverse)
    if MAXIMIZE:
        gradient = -gradient
    return gradient


# -- rules ------------------------------------------------------------------------------------------------------------
@triton.jit
def _adamw(weight, gradient, average, square, rates, form, NEAR: tl.constexpr):
    """Return the new weight and moments. rates: 1 - lr * weight decay, and two factors of the step."""
    weight = weight * tl.load(rates)
    if NEAR:
        average = average + form.first * (gradient - average)
    else:
        average = gradient - (gradient - average) * form.rest
    square = square * form.beta2 + (form.second * gradient) * gradient
    divisor = tl.div_rn(tl.sqrt_rn(square), tl.load(rates + 2)) + form.epsilon
    weight = weight + tl.div_rn(tl.load(rates + 1) * average, divisor)
    return weight, average, square


@triton.jit
def _sgd(weight, gradient, buffer, rates, form, WAY: tl.constexpr):
    """Return the new weight and momentum. rates: minus the learning rate, and the earlier steps."""
    if WAY.decay:
        gradient = gradient + weight * form.decay
    if WAY.momentum:
        moved = buffer * form.momentum + gradient * form.undamped
        buffer = tl.where(tl.load(rates + 1) > 0, moved, gradient)  # the first momentum is the gradient
        if WAY.nesterov:
            gradient = gradient + buffer * form.momentum
        else:
            gradient = buffer
    return weight + gradient * tl.load(rates), buffer


@triton.jit
def _lion(weight, gradient, average, rates, form):
    """Return the new weight and moment. rates: 1 - lr * weight decay, and minus the learning rate."""
    toward = average * form.beta1 + gradient * form.first
    average = average * form.beta2 + gradient * form.second
    sign = tl.where(toward > 0, 1.0, tl.where(toward < 0, -1.0, toward))  # of NaN: NaN
    return weight * tl.load(rates) + sign * tl.load(rates + 1), average


@triton.jit
def _updated(weight, gradient, average, square, rates, form, WAY: tl.constexpr):
    """Return the new weight and moments; a moment that the rule does not have is returned as given."""
    if WAY.adamw:
        weight, average, square = _adamw(weight, gradient, average, square, rates, form, WAY.near)
    elif WAY.lion:
        weight, average = _lion(weight, gradient, average, rates, form)
    else:
        weight, average = _sgd(weight, gradient, average, rates, form, WAY)
    return weight, average, square


# -- moments and weights in any format --------------------------------------------------------------------------------
@triton.jit
def _cast(magnitude, sign, first, key, numbers, FORM: tl.constexpr, EXACT: tl.constexpr, COUNT: tl.constexpr):
    """Return magnitude and sign of fp32 values after a cast."""
    if FORM.by_more:
        if is_undecided(magnitude, first, key, numbers, FORM, COUNT):
            magnitude, sign = cast(magnitude, sign, first, key, numbers, EXACT, COUNT)
        else:
            magnitude, sign = cast(magnitude, sign, first, key, numbers, FORM, COUNT)
    else:
        magnitude, sign = cast(magnitude, sign, first, key, numbers, FORM, COUNT)
    return magnitude, sign


@triton.jit
def _moment(
    kept, scales, start, count, codes, sharing, DTYPE: tl.constexpr, LAYOUT: tl.constexpr, SIZE: tl.constexpr,
    ROOT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return BLOCK numbers of a moment: of fp32 or bf16, or codes (DTYPE is "codes") of which SIZE share a scale."""
    places = start + tl.arange(0, BLOCK)
    if DTYPE == "codes":
        if LAYOUT.packed:
            byte = tl.load(kept + (places >> 1), mask=places < count, other=0).to(tl.int32)
            code = (byte >> ((places & 1) << 2).to(tl.int32)) & 15
            if LAYOUT.integer:
                code = (code ^ 8) - 8
        else:
            code = tl.load(kept + places, mask=places < count, other=0)
        magnitude, sign = decoded(code, codes, LAYOUT)
        groups = start // SIZE + tl.arange(0, BLOCK // SIZE)
        exponent = (tl.load(scales + groups, mask=groups * SIZE < count, other=0).to(tl.int32) & 0xFF) + sharing.lowest
        by = each_of(power_bits(exponent), SIZE).to(tl.float32, bitcast=True)
        value = (magnitude | sign).to(tl.float32, bitcast=True) * by
        if ROOT:
            value = value * value
    else:
        value = _values(kept, places, places < count, DTYPE)
    return value


@triton.jit
def _keep_moment(
    kept, scales, start, count, value, first, key, numbers, codes, sharing, DTYPE: tl.constexpr, FORM: tl.constexpr,
    EXACT: tl.constexpr, LAYOUT: tl.constexpr, SHARING: tl.constexpr, SIZE: tl.constexpr, ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK numbers of a moment for `_moment`; NaN becomes 0 and infinities the largest number.

    In fp32 they stay what they are. A root above zero has a code above zero.
    """
    places = start + tl.arange(0, BLOCK)
    if DTYPE == "fp32":
        tl.store(kept + places, value.to(tl.int32, bitcast=True), mask=places < count)
    else:
        value = tl.where(value != value, 0.0, value)
        bits = value.to(tl.int32, bitcast=True)
        sign = bits & -0x80000000
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F7FFFFF)
        if DTYPE == "bf16":
            magnitude, sign = _cast(magnitude, sign, first, key, numbers, FORM, EXACT, BLOCK)
            write(kept, places, places < count, magnitude, sign, "bf16", False)
        else:
            if ROOT:
                magnitude = tl.sqrt_rn(magnitude.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
            magnitude = tl.where(places < count, magnitude, 0)
            largest = tl.reduce(tl.reshape(magnitude, (BLOCK // SIZE, SIZE)), 1, tl.standard._elementwise_max)
            exponent = power_of_two(largest, sharing)
            groups = start // SIZE + tl.arange(0, BLOCK // SIZE)
            tl.store(scales + groups, (exponent - sharing.lowest).to(tl.int8), mask=groups * SIZE < count)
            by = each_of(power_bits(exponent), SIZE)
            code, _is_lost = codes_under_powers(
                magnitude, sign, by, 0, first, key, numbers, codes, FORM, EXACT, LAYOUT, SHARING, BLOCK
            )  # fmt: skip
            if ROOT:
                MASK: tl.constexpr = 15 if LAYOUT.packed else 255
                code = tl.where(((code & MASK) == 0) & (magnitude > 0), 1, code)
            store(kept, start, count + (count & 1) if LAYOUT.packed else count, code, LAYOUT)


@triton.jit
def _pointers(table, tensor, COLUMNS: tl.constexpr, WAY: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to weight, remainder, gradient and two moments, and to the scales of moments in codes."""
    MOMENT: tl.constexpr = tl.int8 if WAY.moments == "codes" else tl.int16 if WAY.moments == "bf16" else tl.int32
    weights = pointer(table, tensor, 0, COLUMNS, tl.int32 if WAY.stored == "fp32" else tl.int16, ALIGNED)
    rests = pointer(table, tensor, 1, COLUMNS, tl.int8 if WAY.rest == 8 else tl.int16, ALIGNED)
    grads = pointer(table, tensor, 2, COLUMNS, tl.int32 if WAY.dtype == "fp32" else tl.int16, ALIGNED)
    averages = pointer(table, tensor, 3, COLUMNS, MOMENT, ALIGNED)
    squares = pointer(table, tensor, 4, COLUMNS, MOMENT, ALIGNED)
    scales, square_scales = averages, squares  # not read
    if WAY.moments == "codes":
        scales = pointer(table, tensor, 5, COLUMNS, tl.int8, False)
        square_scales = pointer(table, tensor, 6, COLUMNS, tl.int8, False)
    return weights, rests, grads, averages, squares, scales, square_scales


@triton.jit
def _block(
    kept, start, count, place, inverse, rates, seed, form, weight_numbers, numbers, codes, sharing, WAY: tl.constexpr,
    CAST: tl.constexpr, CAST_EXACT: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr,
    SHARING: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    weights, rests, grads, averages, squares, scales, square_scales = kept
    places = start + tl.arange(0, BLOCK)
    mask = places < count
    DTYPE: tl.constexpr = WAY.dtype  # Triton 3.6 passes no string out of a tuple
    STORED: tl.constexpr = WAY.stored
    MOMENTS: tl.constexpr = WAY.moments
    if WAY.rest > 0:
        weight = _joined(weights, rests, places, mask, WAY.rest)
    else:
        weight = _values(weights, places, mask, STORED)
    gradient = _gradient(grads, inverse, places, mask, DTYPE, WAY.scaled, WAY.maximize)
    # numbers of a parameter draw by its seed, by the place of their block of SHARE, and by the moment
    key = seed + ((place + start) // SHARE) * SEED_OF_SLOT
    first = (place + start) % SHARE
    average, square = gradient, gradient  # not read
    if WAY.adamw or WAY.lion or WAY.momentum:
        average = _moment(averages, scales, start, count, codes, sharing, MOMENTS, LAYOUT, SIZE, False, BLOCK)
    if WAY.adamw:
        square = _moment(squares, square_scales, start, count, codes, sharing, MOMENTS, LAYOUT, SIZE, True, BLOCK)
    weight, average, square = _updated(weight, gradient, average, square, rates, form, WAY)
    if WAY.adamw:
        _keep_moment(
            squares, square_scales, start, count, square, first, key * SEED_OF_STEP + 2 * SEED_OF_TENSOR, numbers,
            codes, sharing, MOMENTS, FORM, EXACT, LAYOUT, SHARING, SIZE, True, BLOCK,
        )  # fmt: skip
    if WAY.adamw or WAY.lion or WAY.momentum:
        _keep_moment(
            averages, scales, start, count, average, first, key * SEED_OF_STEP + SEED_OF_TENSOR, numbers, codes,
            sharing, MOMENTS, FORM, EXACT, LAYOUT, SHARING, SIZE, False, BLOCK,
        )  # fmt: skip
    bits = weight.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = bits & -0x80000000
    if WAY.rounds:
        magnitude, sign = _cast(magnitude, sign, first, key, weight_numbers, CAST, CAST_EXACT, BLOCK)
    if WAY.rest > 0:
        _split(weights, rests, places, mask, magnitude | sign, WAY.rest)
    else:
        write(weights, places, mask, magnitude, sign, STORED, False)


@triton.jit
def step(
    table, chunks, rates, inverse, skip, form, weight_numbers, numbers, codes, sharing, WAY: tl.constexpr,
    CAST: tl.constexpr, CAST_EXACT: tl.constexpr, FORM: tl.constexpr, EXACT: tl.constexpr, LAYOUT: tl.constexpr,
    SHARING: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one chunk of one parameter, unless `skip` is above zero.

    table: int64 [parameters, 8 or 10], the addresses of weight, remainder, gradient and two moments, and those of the
    scales of moments in codes; the elements; the parameter's seed before any step, and the place of the first element
    in the whole, a multiple of BLOCK. chunks: int32 [programs, 2], parameter and chunk. rates: fp32 [parameters, 4],
    see `StepRule.table` of `lowp.kernels.steps.rules`; the fourth are the earlier steps, if numbers are drawn.
    """
    if tl.load(skip) <= 0:
        COLUMNS: tl.constexpr = 10 if WAY.moments == "codes" else 8
        tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
        begin = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        own = rates + 4 * tensor
        count = tl.load(table + tensor * COLUMNS + COLUMNS - 3)
        if WAY.moments == "fp32" and not WAY.rounds:  # nothing is drawn
            whole = count // 16 * 16
            kept = _pointers(table, tensor, COLUMNS, WAY, ALIGNED)
            for start in range(0, CHUNK, BLOCK):
                _block(
                    kept, begin + start, whole, 0, inverse, own, 0, form, weight_numbers, numbers, codes, sharing, WAY,
                    CAST, CAST_EXACT, FORM, EXACT, LAYOUT, SHARING, SIZE, BLOCK,
                )  # fmt: skip
            if begin + CHUNK >= count:  # the last chunk: the elements after the last vector of 16
                _block(
                    kept, whole, count, 0, inverse, own, 0, form, weight_numbers, numbers, codes, sharing, WAY, CAST,
                    CAST_EXACT, FORM, EXACT, LAYOUT, SHARING, SIZE, 16,
                )  # fmt: skip
        else:
            seed = tl.load(table + tensor * COLUMNS + COLUMNS - 2) + tl.load(own + 3).to(tl.int64) * SEED_OF_STEP
            place = tl.load(table + tensor * COLUMNS + COLUMNS - 1)
            for start in range(0, CHUNK, BLOCK):
                if begin + start < count:
                    kept = _pointers(table, tensor, COLUMNS, WAY, ALIGNED)  # here they need fewer registers
                    _block(
                        kept, begin + start, count, place, inverse, own, seed, form, weight_numbers, numbers, codes,
                        sharing, WAY, CAST, CAST_EXACT, FORM, EXACT, LAYOUT, SHARING, SIZE, BLOCK,
                    )  # fmt: skip
