"""The ways in which a contraction of given shapes, strides and dtypes runs.

As a program of casts and products of matrices (`prepared`); as one of codes of int8, whose sums are integers; or, where
torch's own product is faster (oneDNN's convolutions), with the casts as programs and torch's product in fp32 between
them.
"""

import math
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.casts.run import is_dense
from lowp.kernels.packed.byte_products import MOST_DEPTH, multiplies_bytes
from lowp.kernels.products.programs import (
    NOWHERE,
    BytesStep,
    CastStep,
    CodesStep,
    Memory,
    ProductStep,
    Program,
    Step,
    follows,
    own,
    strides_of,
)
from lowp.kernels.products.scratch import Scratch
from lowp.ops.backward import Back, Builder, Found
from lowp.ops.call import RoleCasts
from lowp.ops.casting import carrier_dtype, depends_on_axis, native_dtype, own_dtype, result_dtype, rounded
from lowp.ops.matrices import (
    BIAS,
    FACTOR,
    FACTOR_SCALES,
    FIRST_SCALES,
    FIRST_VALUE,
    GRADIENT,
    ONES,
    OUT,
    SECOND_SCALES,
    SECOND_VALUE,
    VALUE,
    VALUE_SCALES,
    WEIGHT,
    Empty,
    Made,
    Read,
    X,
    matrices,
)
from lowp.ops.prepared import ForwardProgram, Given, Prepared, is_read
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Finish, Form, Linear
from lowp.policy import Operands, Rule

# -- codes of int8 ------------------------------------------------------------------------------------------------


class InBytes(Prepared):
    """Linear layers in int8 under a scale a row: sums of integers, scaled afterwards; a byte a number is saved.

    Where the scales of an operand lie along the sum of a gradient, they multiply the incoming gradient before it is
    rounded, so that every sum is one of integers.
    """

    __slots__ = ("rows",)
    has_scales = True

    def __init__(self, rule: Rule, form: Linear, about: tuple[Any, ...]) -> None:
        whole = strides_of(form.first), strides_of(form.second)
        x = Read(rule.input, (form.first, whole[0], torch.int8), about[1] != whole[0])
        weight = Read(rule.weight, (form.second, whole[1], torch.int8), about[4] != whole[1])
        shape = (*form.first[:-1], form.second[0])
        finish = None if rule.output is None else partial(rounded, to=rule.output)
        super().__init__(rule, form, x, weight, Made((shape, strides_of(shape), torch.float32), finish), about)
        self.rows = math.prod(form.first[:-1])
        self.keeps_weight = False

    def _programmed(self, saves_value: bool, saves_factor: bool, makes_factor: bool) -> ForwardProgram:
        steps, made, owned, operands = list[Step](), [(OUT, self.out.empty)], list[int](), []
        depth = self.shapes[1][0][1]
        for place, rows, read, to, scales, is_saved in (
            (X, self.rows, self.x, VALUE, VALUE_SCALES, saves_value),
            (WEIGHT, self.shapes[1][0][0], self.weight, FACTOR, FACTOR_SCALES, saves_factor),
        ):
            if is_saved:
                made += [(to, read.empty), (scales, ((rows,), (1,), torch.float32))]
            else:
                to, scales = own(len(owned)), own(len(owned) + 1)
                owned += [rows * depth, rows * torch.float32.itemsize]
            assert read.cast is not None
            steps.append(CodesStep(_matrix(place, rows, depth), NOWHERE, to, scales, read.cast))
            operands.append((_codes(to, rows, depth), scales))
        (values, of_values), (factors, of_factors) = operands
        steps.append(BytesStep(values, factors, BIAS, OUT, of_values, of_factors))
        return ForwardProgram(Program(steps, owned), made, ())

    def _back(self, gradient: Tensor, needs: tuple[bool, ...], bias_dtype: torch.dtype | None) -> Back | None:
        builder, to = Builder(self, gradient, bias_dtype), self.rule.grad
        if to is None or gradient.dtype is not torch.float32:
            return None
        m, (n, k) = self.rows, self.shapes[1][0]
        incoming = _matrix(GRADIENT, m, n)
        results: list[tuple[int | None, Finish | None]] = [(None, None)] * 3
        saved = (FIRST, incoming, SECOND_VALUE, n), (SECOND, _turned(incoming), FIRST_VALUE, m)
        for slot, matrix, place, depth in saved:
            if not needs[slot]:
                continue
            rows = matrix.shape[0]
            codes, scales = builder.own((rows, depth), torch.int8), builder.own((rows,), torch.float32)
            shape = self.shapes[slot][0]
            out = builder.make((shape, strides_of(shape), torch.float32))
            scale = SECOND_SCALES if place == SECOND_VALUE else FIRST_SCALES
            builder.steps.append(CodesStep(matrix, scale, codes, scales, to))
            other = _turned(_codes(place, depth, k))
            builder.steps.append(BytesStep(_codes(codes, rows, depth), other, NOWHERE, out, scales))
            results[slot] = out, None
        if needs[2]:
            assert bias_dtype is not None
            ones_of = Memory(ONES, (1, m), (0, 0), torch.float32)
            out = builder.make(((n,), (1,), bias_dtype))
            builder.steps.append(ProductStep(ones_of, incoming, NOWHERE, out, bias_dtype))
            results[2] = out, None
        copies = gradient.stride() != strides_of(tuple(gradient.shape))
        return builder.finished(copies, results)


def _matrix(place: int, rows: int, columns: int) -> Memory:
    return Memory(place, (rows, columns), (columns, 1), torch.float32)


def _codes(place: int, rows: int, columns: int) -> Memory:
    return Memory(place, (rows, columns), (columns, 1), torch.int8)


def _turned(matrix: Memory) -> Memory:
    return matrix._replace(shape=matrix.shape[::-1], strides=matrix.strides[::-1])


# -- products by torch --------------------------------------------------------------------------------------------


class ByTorch(Prepared):
    """Contractions that torch multiplies in fp32, between programs that round their operands and their result."""

    __slots__ = ("is_contiguous", "is_torchs", "written")

    def __init__(self, rule: Rule, form: Form, x: Read, weight: Read, about: tuple[Any, ...]) -> None:
        if x.repeats:  # in memory that is lent
            x = x._replace(empty=(*x.empty[:2], torch.float32))
        super().__init__(rule, form, x, weight, Made(((), (), result_dtype(rule.output))), about)
        # in another layout torch gives the gradients, one by one, other strides than both at once
        self.is_contiguous = all(one.empty[1] == strides_of(one.empty[0]) for one in (x, weight))
        self.written: dict[Hashable, Program] = {}
        self.is_torchs = rule.output is None or native_dtype(rule.output) is self.out.empty[2]  # torch's own cast

    def run(self, given: Given, saves_value: bool, saves_factor: bool) -> Tensor:
        """As `Prepared.run`; values of x that nothing saves are lent."""
        if self.x.cast is None or (saves_value and self.x.raw is None):
            return super().run(given, saves_value, saves_factor)
        with Scratch() as scratch:
            given[0][VALUE] = lent = scratch.strided(*self.x.empty, "cpu")
            given[1][VALUE] = lent.data_ptr()
            return super().run(given, False, saves_factor)

    def _programmed(self, saves_value: bool, saves_factor: bool, makes_factor: bool) -> ForwardProgram:
        steps, made = list[Step](), list[tuple[int, Empty]]()
        self._operands((True, True, makes_factor), steps, made, [])
        made = [one for one in made if saves_value or one[0] != VALUE]
        return ForwardProgram(Program(steps), made, ())

    def _computed(self, given: Found) -> Tensor:
        x = given[X] if self.x.cast is None else given[VALUE]
        weight = given[WEIGHT] if self.weight.cast is None else given[FACTOR]
        with Scratch() as scratch:
            result = self.form.product(OUTPUT, scratch.wide(x), scratch.wide(weight), given[BIAS])
        dtype = self.out.empty[2]
        return result.to(dtype) if self.is_torchs else self.finished(result, dtype)

    def finished(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """Return fp32 numbers rounded by the rule's output, in `dtype`."""
        output = self.rule.output
        if output is None or (narrow := native_dtype(output)) is dtype:
            return result.to(dtype)
        if narrow is not None:
            return result.to(narrow).to(dtype)
        key, rounded_in = (tuple(result.shape), result.stride()), result_dtype(output)
        program = self.written.get(key)
        if program is None:
            source = Memory(0, (result.numel(),), (1,), torch.float32)
            program = self.written[key] = Program([CastStep(source, 1, output, rounded_in)])
        if not is_dense(*key[:2]) or (output.is_stochastic and not result.is_contiguous()):
            result = result.contiguous()
        out = torch.empty_strided(result.shape, result.stride(), dtype=rounded_in, device=cpu.HOST)
        program([result, out])
        return out.to(dtype)

    def _back(self, gradient: Tensor, needs: tuple[bool, ...], bias_dtype: torch.dtype | None) -> Back | None:
        builder = Builder(self, gradient, bias_dtype, keeps=True)
        copies = builder.copies and (builder.casts_gradient or builder.has_products)
        to = self.rule.grad
        if copies and not builder.has_products and to is not None and is_read(to):
            if is_dense(tuple(gradient.shape), gradient.stride()):
                copies = False  # each number alone: in the order of memory
                builder.gradient = builder.gradient._replace(strides=gradient.stride())
        if copies and not torch.empty_like(gradient, device="meta").is_contiguous():
            return None  # whose values have the strides of the gradient
        pairs: list[tuple[int, int] | None] = [None, None]
        for slot in (FIRST, SECOND):
            if needs[slot]:
                operands = builder.operands(slot)
                if operands is None:
                    return None
                pairs[slot] = operands[0].place, operands[1].place
        summed = builder.cast_along(-1, to).place if needs[2] and bias_dtype is not None else None
        return builder.finished(copies, partial(self._multiplied, pairs, summed, bias_dtype))

    def _multiplied(
        self,
        pairs: list[tuple[int, int] | None],
        summed: int | None,
        bias_dtype: torch.dtype | None,
        tensors: Found,
        scratch: Scratch,
    ) -> Found:
        """Return the gradients of x and the weight from the places of their operands; `summed`: that of the bias."""
        found: Found = [None] * 3
        first, second = pairs
        places = {place for pair in (*pairs, (summed,)) for place in pair or () if place is not None}
        wide = {place: scratch.wide(tensors[place]) for place in places}
        if self.is_contiguous and first is not None and second is not None:
            found[:2] = self.form.gradients(wide[second[0]], wide[first[0]], wide[first[1]], wide[second[1]])
        else:
            for slot, pair in enumerate(pairs):
                if pair is not None:
                    found[slot] = self.form.product(slot, wide[pair[0]], wide[pair[1]])
        for slot in (FIRST, SECOND):
            if (result := found[slot]) is not None:
                found[slot] = self.finished(result, self.shapes[slot][1])
        if summed is not None and bias_dtype is not None:
            found[2] = self.finished(self.form.bias_gradient(wide[summed]), bias_dtype)
        return found


# -- which way ----------------------------------------------------------------------------------------------------


def prepare(
    rule: Rule, form: Form | None, about: tuple[Any, ...], bias: Tensor | None, in_bytes: bool, is_saved: bool
) -> Prepared | None:
    """Return what is known of a call; None for one that the definition runs.

    `about`: shape, strides and dtype of x, and those of the weight. `in_bytes`: linear layers multiply bytes.
    `is_saved`: backward has x, since the op that made it reads it there.
    """
    shape, other = tuple(about[0]), tuple(about[3])
    if form is None or 0 in (*shape, *other) or not (form.are_matrices or form.fits(bias)):
        return None
    if in_bytes and isinstance(form, Linear) and len(other) == 2:
        is_served = about[2] is about[5] is torch.float32 and max(*other, math.prod(shape[:-1])) <= MOST_DEPTH
        return InBytes(rule, form, about) if is_served and not multiplies_bytes() else None  # in tiles, by torch
    casts = RoleCasts(rule)
    first, second = casts.of_product(FIRST), casts.of_product(SECOND)
    if not (_rotates(form, FIRST, first) and _rotates(form, SECOND, second)):
        return None  # the definition refuses it
    axes = form.contracted[OUTPUT]
    x, weight = _read(rule.input, about[:3], axes[0], second), _read(rule.weight, about[3:], axes[1], first)
    if x is None or weight is None:
        return None
    x = x if x.copies else _repeated(x, about[2], is_saved)
    if form.are_matrices:
        return _of_matrices(rule, form, (x, weight), about, not form.fits(bias) or getattr(form, "scale", 1) != 1)
    return None if x.copies or weight.copies else ByTorch(rule, form, x, weight, about)


def _repeated(x: Read, dtype: torch.dtype, is_saved: bool) -> Read:
    """Return how x is read: backward rounds it again where it is saved, or takes no more memory than its values.

    So memory that is in use serves for the values, forward and backward, and no new pages of the system are cleared.
    """
    (shape, strides, carrier), to = x.empty, x.cast
    if to is None or x.raw is not None or to.is_stochastic or to.is_delayed:
        return x
    if not is_saved and dtype.itemsize > carrier.itemsize:
        return x
    return x._replace(raw=(shape, strides, dtype), repeats=True)


def _of_matrices(
    rule: Rule, form: Form, operands: tuple[Read, Read], about: tuple[Any, ...], is_apart: bool
) -> Prepared | None:
    """Return what is known of a product of matrices, see `Prepared`; None where no program reads or rounds it."""
    for x, weight in (operands, tuple(map(_copied, operands))):
        found = matrices(form, OUTPUT, Memory(X, *x.empty), Memory(WEIGHT, *weight.empty))
        if found is not None:
            break
    is_drawn = rule.output is not None and rule.output.is_stochastic
    if found is None or found.is_redrawn(rule.output) or (is_apart and is_drawn):
        return None
    made = Made.of(found, torch.float32 if is_apart else result_dtype(rule.output))
    return Prepared(rule, form, x, weight, made, about, is_apart)


def _copied(read: Read) -> Read:
    """Return how an operand is read whose rounded values have to be contiguous."""
    shape, strides, dtype = read.empty
    whole = strides_of(shape)
    copies = read.copies or strides != whole
    return read if read.cast is None else read._replace(empty=(shape, whole, dtype), copies=copies)


def _rotates(form: Form, slot: int, own: Operands) -> bool:
    """Whether the operands of a product are rotated as its casts say, if they say so."""
    return not own.hadamard or form.rotated(slot, own.hadamard) is not None


def _read(to: Cast | None, about: tuple[Any, ...], axis: int, again: Operands) -> Read | None:
    """Return how an operand is read; None where no program does it. `again`: of the product that reads it backward."""
    shape, strides, dtype = tuple(about[0]), about[1], about[2]
    raw = None if again.other is None else (shape, strides, dtype)
    if to is None or own_dtype(to) is dtype:
        return Read(None, (shape, strides, dtype), raw=raw)
    axis = axis if depends_on_axis(to) else -1
    is_shared = isinstance(to.format, ScaledFormat)
    if is_shared and not follows(shape, to, axis):
        return None
    whole = strides_of(shape)
    if not is_shared and not to.is_stochastic and is_dense(shape, strides):
        return Read(to, (shape, strides, carrier_dtype(to)), raw=raw)
    return Read(to, (shape, whole, carrier_dtype(to)), strides != whole, axis, raw)
