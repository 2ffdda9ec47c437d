"""Steps of optimizers over all parameters in one launch; weight, moments and gradient are read and written once.

Each operation is rounded to nearest in fp32 and none are fused, so that every device gives the same bits.
"""

import triton
import triton.language as tl

from lowp.kernels.triton.device.bits import read


@triton.jit
def _pointer(table, tensor, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the address in a column of a tensor's row as a pointer."""
    pointer = tl.load(table + tensor * COLUMNS + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _weight(half, remainder, places, mask, SPLIT: tl.constexpr):
    """Return an fp32 weight, which is stored as such or as a bf16 half and a remainder.

    bits = half * 2**16 + remainder, with the remainder in -32768 .. 32767. If other code has set the half to 0, a
    negative remainder counts as 0.
    """
    if SPLIT:
        upper = tl.load(half + places, mask=mask, other=0).to(tl.int32)
        rest = tl.load(remainder + places, mask=mask, other=0).to(tl.int32)
        rest = tl.where((upper & 0x7FFF) == 0, tl.maximum(rest, 0), rest)
        bits = (upper << 16) + rest
    else:
        bits = tl.load(half + places, mask=mask, other=0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store(half, remainder, places, mask, weight, SPLIT: tl.constexpr):
    """Write a weight for `_weight`: the half is the nearest bf16, ties away from zero; a NaN becomes some NaN."""
    bits = weight.to(tl.int32, bitcast=True)
    if SPLIT:
        upper = (bits + 0x8000) >> 16
        rest = bits - (upper << 16)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        upper = tl.where(is_nan, (bits >> 16) | 0x40, upper)
        tl.store(half + places, upper.to(tl.int16), mask=mask)
        tl.store(remainder + places, tl.where(is_nan, 0, rest).to(tl.int16), mask=mask)
    else:
        tl.store(half + places, bits, mask=mask)


@triton.jit
def _gradient(pointer, inverse, places, mask, DTYPE: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr):
    magnitude, sign = read(pointer, places, mask, DTYPE, False)
    gradient = (magnitude | sign).to(tl.float32, bitcast=True)
    if SCALED:
        gradient = gradient * tl.load(inverse)
    if MAXIMIZE:
        gradient = -gradient
    return gradient


@triton.jit
def _adamw(weight, gradient, averages, squares, places, mask, rates, form, NEAR: tl.constexpr):
    """Return the new weight; the moments are updated. rates: 1 - lr * weight decay, and two factors of the step."""
    average = tl.load(averages + places, mask=mask, other=0.0)
    square = tl.load(squares + places, mask=mask, other=0.0)
    weight = weight * tl.load(rates)
    if NEAR:
        average = average + form.first * (gradient - average)
    else:
        average = gradient - (gradient - average) * form.rest
    square = square * form.beta2 + (form.second * gradient) * gradient
    divisor = tl.div_rn(tl.sqrt_rn(square), tl.load(rates + 2)) + form.epsilon
    weight = weight + tl.div_rn(tl.load(rates + 1) * average, divisor)
    tl.store(averages + places, average, mask=mask)
    tl.store(squares + places, square, mask=mask)
    return weight


@triton.jit
def _sgd(weight, gradient, buffers, places, mask, rates, form, WAY: tl.constexpr):
    """Return the new weight; the momentum is updated. rates: minus the learning rate, and the earlier steps."""
    if WAY.decay:
        gradient = gradient + weight * form.decay
    if WAY.momentum:
        buffer = tl.load(buffers + places, mask=mask, other=0.0)
        moved = buffer * form.momentum + gradient * form.undamped
        buffer = tl.where(tl.load(rates + 1) > 0, moved, gradient)  # the first momentum is the gradient
        tl.store(buffers + places, buffer, mask=mask)
        if WAY.nesterov:
            gradient = gradient + buffer * form.momentum
        else:
            gradient = buffer
    return weight + gradient * tl.load(rates)


@triton.jit
def _block(
    weights, rests, grads, averages, squares, inverse, rates, places, mask, form, WAY: tl.constexpr
):  # fmt: skip
    weight = _weight(weights, rests, places, mask, WAY.split)
    DTYPE: tl.constexpr = WAY.dtype  # Triton 3.6 passes no string out of a tuple
    gradient = _gradient(grads, inverse, places, mask, DTYPE, WAY.scaled, WAY.maximize)
    if WAY.adamw:
        weight = _adamw(weight, gradient, averages, squares, places, mask, rates, form, WAY.near)
    else:
        weight = _sgd(weight, gradient, averages, places, mask, rates, form, WAY)
    _store(weights, rests, places, mask, weight, WAY.split)


@triton.jit
def step(
    table, chunks, rates, inverse, skip, form, WAY: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Step one chunk of one parameter, unless `skip` is above zero.

    table: int64 [parameters, 6], the addresses of weight, remainder, gradient and moments, and the elements;
    chunks: int32 [programs, 2], parameter and chunk; rates: fp32 [parameters, 4], see
    `lowp.kernels.steps.updates.rates`.
    """
    if tl.load(skip) <= 0:
        tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
        first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        NUMBER: tl.constexpr = tl.int16 if WAY.split else tl.int32
        GRADIENT: tl.constexpr = tl.int32 if WAY.dtype == "fp32" else tl.int16
        weights = _pointer(table, tensor, 0, 6, NUMBER, ALIGNED)
        rests = _pointer(table, tensor, 1, 6, tl.int16, ALIGNED)
        grads = _pointer(table, tensor, 2, 6, GRADIENT, ALIGNED)
        averages = _pointer(table, tensor, 3, 6, tl.float32, ALIGNED)
        squares = _pointer(table, tensor, 4, 6, tl.float32, ALIGNED)
        own = rates + 4 * tensor
        count = tl.load(table + tensor * 6 + 5)
        whole = count // 16 * 16
        for start in range(0, CHUNK, BLOCK):
            places = first + start + tl.arange(0, BLOCK)
            _block(weights, rests, grads, averages, squares, inverse, own, places, places < whole, form, WAY)
        if first + CHUNK >= count:  # the last chunk: the elements after the last vector of 16
            places = whole + tl.arange(0, 16)
            _block(weights, rests, grads, averages, squares, inverse, own, places, places < count, form, WAY)


# -- gradients --------------------------------------------------------------------------------------------------------
@triton.jit
def _check_block(grads, inverse, places, mask, DTYPE: tl.constexpr, UNSCALE: tl.constexpr):
    """Unscale a block; return its magnitudes before in fp32 bits, and its finite numbers after in fp64."""
    magnitude, sign = read(grads, places, mask, DTYPE, False)
    value = (magnitude | sign).to(tl.float32, bitcast=True)
    if UNSCALE:
        value = value * inverse
        bits = value.to(tl.int32, bitcast=True)
        if DTYPE == "fp32":
            tl.store(grads + places, bits, mask=mask)
        elif DTYPE == "fp16":
            tl.store(grads + places, value.to(tl.float16).to(tl.int16, bitcast=True), mask=mask)
        else:
            half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            half = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, half)
            tl.store(grads + places, half.to(tl.int16), mask=mask)
    return magnitude, tl.where(magnitude >= 0x7F800000, 0.0, value).to(tl.float64)


@triton.jit
def _exponents(magnitude, mask):
    field = tl.where((magnitude == 0) | (magnitude >= 0x7F800000), 255, magnitude >> 23)
    return tl.histogram(field, 256, mask=mask)


@triton.jit
def check(
    table, chunks, inverse, found, energies, largest, histogram, DTYPE: tl.constexpr, UNSCALE: tl.constexpr,
    COUNTS: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Unscale one chunk of one gradient; find infinities and NaNs, the largest magnitude, the energy and the exponents.

    table: int64 [gradients, 2], address and elements. found: fp32, set to 1 for infinities or NaNs. energies: fp64
    [programs], the sum of squares of the finite elements. largest: int32 [gradients], the bits of the largest magnitude
    before unscaling; NaN is larger than infinity. histogram: int32 [256], counts of finite nonzero elements before
    unscaling by the exponent field of fp32.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    NUMBER: tl.constexpr = tl.int32 if DTYPE == "fp32" else tl.int16
    grads = _pointer(table, tensor, 0, 2, NUMBER, ALIGNED)
    count = tl.load(table + tensor * 2 + 1)
    scale = tl.load(inverse) if UNSCALE else 1.0
    whole = count // 16 * 16
    most = tl.full((BLOCK,), 0, tl.int32)
    energy = tl.full((BLOCK,), 0, tl.float64)
    if COUNTS:
        bins = tl.full((256,), 0, tl.int32)
    for start in range(0, CHUNK, BLOCK):
        places = first + start + tl.arange(0, BLOCK)
        magnitude, value = _check_block(grads, scale, places, places < whole, DTYPE, UNSCALE)
        most = tl.maximum(most, magnitude)
        energy = tl.fma(value, value, energy)  # squares are exact in fp64: rounded like a sum
        if COUNTS:
            bins += _exponents(magnitude, places < whole)
    size = tl.reduce(most, 0, tl.standard._elementwise_max)
    squares = tl.reduce(energy, 0, tl.standard._sum_combine)
    if first + CHUNK >= count:  # the last chunk: the elements after the last vector of 16
        last = whole + tl.arange(0, 16)
        few, values = _check_block(grads, scale, last, last < count, DTYPE, UNSCALE)  # a name has one shape in Triton
        size = tl.maximum(size, tl.reduce(few, 0, tl.standard._elementwise_max))
        squares += tl.reduce(values * values, 0, tl.standard._sum_combine)
        if COUNTS:
            bins += _exponents(few, last < count)
    if size >= 0x7F800000:
        tl.store(found, 1.0)
    tl.atomic_max(largest + tensor, size)
    tl.store(energies + tl.program_id(0), squares)
    if COUNTS:
        field = tl.arange(0, 256)
        tl.atomic_add(histogram + field, tl.where(field == 255, 0, bins))
