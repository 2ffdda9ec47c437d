"""The gradients of a contraction as one program: how it is built, in the order of the definition, and run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.int16.low_words import FEATURES
from lowp.kernels.products.fp32_products import ones
from lowp.kernels.products.programs import (
    NOWHERE,
    CastStep,
    Memory,
    Program,
    RotationStep,
    SignsStep,
    Step,
    follows,
    is_reached,
    strides_of,
)
from lowp.kernels.products.scratch import Scratch
from lowp.ops.call import RoleCasts
from lowp.ops.casting import carrier_dtype, depends_on_axis, own_dtype, rounded
from lowp.ops.matrices import (
    FIRST_VALUE,
    GRADIENT,
    GRADIENT_ENTRY,
    ONES,
    SECOND_VALUE,
    Empty,
    Known,
    Matrices,
    entry_of,
    matrices,
    owned_place,
    rows_of,
)
from lowp.ops.trilinear import FIRST, SECOND, Finish, Linear

Found = list[Any]  # tensors, and None for those that are not there


class Turned(NamedTuple):
    """A copy of the gradient, in a shape, with an axis moved to its end."""

    shape: tuple[int, ...]
    axis: int


class Back(NamedTuple):
    """The gradients of a contraction as one program.

    `made`: the tensors that it writes, and copies of the gradient that it reads; `results`: the places of the gradients
    of x, the weight and the bias, and what gives them their shapes, or what makes them of all tensors. `copies`: as in
    `Read`. `may_lose`: the gradient may lose features under one scale, of which the definition warns.
    """

    program: Program
    copies: bool
    made: Sequence[Empty | Turned]
    results: Sequence[tuple[int | None, Finish | None]] | Callable[[Found, Scratch], Found]
    may_lose: bool

    def run(self, gradient: Tensor, values: Sequence[Tensor | None], memory: list[int]) -> Found | None:
        """Return the gradients of both operands and of the bias; None where the definition has to say what they are.

        `values`: what was saved, and the entry of a delayed scale. `memory`: the addresses of the gradient and of them.
        """
        results, tensors = self.results, Found((gradient, ones(), *values))
        memory.insert(ONES, tensors[ONES].data_ptr())
        if callable(results):  # none of the tensors that are made is returned
            with Scratch() as scratch:
                return results(tensors, scratch) if self._runs(tensors, memory, scratch.strided) else None
        if not self._runs(tensors, memory, torch.empty_strided):
            return None
        found: Found = []
        for place, finish in results:
            result = None if place is None else tensors[place]
            found.append(result if result is None or finish is None else finish(result))
        return found

    def _runs(self, tensors: Found, memory: list[int], empty: Callable[..., Tensor]) -> bool:
        """Make the tensors that the program writes, and run it; return whether it came to its end."""
        program, copies, made, *_ = self
        if copies:
            tensors[GRADIENT] = tensors[GRADIENT].contiguous()
            memory[GRADIENT] = tensors[GRADIENT].data_ptr()
        for what in made:
            moved = None
            if isinstance(what, Turned):
                moved = tensors[GRADIENT].view(what.shape).movedim(what.axis, -1)
                what = tuple(moved.shape), strides_of(tuple(moved.shape)), moved.dtype
            shape, strides, dtype = what
            one = empty(shape, strides, dtype=dtype, device=cpu.HOST)
            tensors.append(one if moved is None else one.copy_(moved))
            memory.append(one.data_ptr())
        return program.run(memory)


class Builder:
    """Builds the program of a contraction's gradients, in the order in which the definition casts and multiplies.

    `keeps`: values of casts are tensors that outlive the program, in fp32, as a bias apart from the product needs them.
    """

    def __init__(self, known: Known, gradient: Tensor, bias_dtype: torch.dtype | None, keeps: bool = False) -> None:
        self.known, self.bias_dtype, self.keeps = known, bias_dtype, keeps
        rule, form, shape = known.rule, known.form, tuple(gradient.shape)
        self.has_products = rule.has_products  # with casts of their own
        if self.has_products and isinstance(form, Linear) and len(form.second) == 2:
            rows = math.prod(form.first[:-1])
            form, shape = Linear((rows, form.first[-1]), form.second), (rows, form.second[0])
        self.form = form
        has_entry = rule.grad is not None and rule.grad.is_delayed
        self.given = FIRST_VALUE + (4 if known.has_scales else 3 if has_entry else 2)  # places of tensors given
        casts = RoleCasts(rule)
        self.products = casts.of_product(FIRST), casts.of_product(SECOND)
        grads = [one.grad or rule.grad for one in self.products] + [rule.grad]
        self.casts_gradient = any(self.is_cast(to, gradient.dtype) for to in grads)
        self.may_lose = any(to is not None and self._loses(to, shape) for to in grads)
        whole, strides = strides_of(shape), gradient.stride()
        is_read = not (self.casts_gradient or self.has_products) and len(shape) == 2 and is_reached(shape, strides)
        self.copies = strides != whole and not is_read
        self.gradient = Memory(GRADIENT, shape, strides if is_read else whole, gradient.dtype)
        self.steps: list[Step] = []
        self.made: list[Empty | Turned] = []
        self.owned: list[int] = []
        self.incoming: dict[tuple[int, Cast | None], Memory] = {}

    @staticmethod
    def is_cast(to: Cast | None, dtype: torch.dtype) -> bool:
        """Whether numbers in a dtype are rounded by a cast."""
        return to is not None and own_dtype(to) is not dtype

    @staticmethod
    def _loses(to: Cast, shape: tuple[int, ...]) -> bool:
        """Whether a gradient may lose columns under one scale, which the definition warns of."""
        return isinstance(to.format, ScaledFormat) and to.format.scope.kind == "tensor" and shape[-1:] >= (FEATURES,)

    def back(self, needs: tuple[bool, ...]) -> Back | None:
        """Return the gradients asked for; None if they are no products of matrices as they lie, or no step casts."""
        results: list[tuple[int | None, Finish | None]] = [(None, None)] * 3
        for slot in (FIRST, SECOND):
            if not needs[slot]:
                continue
            operands = self.operands(slot)
            found = None if operands is None else matrices(self.form, slot, *operands)
            if found is None or found.is_redrawn(self.known.rule.output):
                return None
            results[slot] = self._product(found, *self.known.shapes[slot])
        if self.keeps:
            results[2] = self.cast_along(-1, self.known.rule.grad).place, self._bias_gradient
        elif needs[2]:
            found = rows_of(self.cast_along(-1, self.known.rule.grad))
            if found is None or self.bias_dtype is None:
                return None
            results[2] = self._product(found, found.shape, self.bias_dtype)
        return self.finished(self.copies, results)

    def _bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of a bias that is apart, from the rounded gradient of the result."""
        found = rounded(self.form.bias_gradient(gradient), self.known.rule.output)
        return found.to(self.bias_dtype)

    def operands(self, slot: int) -> tuple[Memory, Memory] | None:
        """Return what the product for a slot multiplies: of the other operand, and of the gradient."""
        known, own, axes = self.known, self.products[slot], self.form.contracted[slot]
        place, read = (SECOND_VALUE, known.weight) if slot == FIRST else (FIRST_VALUE, known.x)
        value, to = Memory(place, *read.saved), own.grad or known.rule.grad
        if self.has_products and isinstance(self.form, Linear):
            shape = self.form.second if slot == FIRST else self.form.first
            if value.shape != shape and value.strides != strides_of(value.shape):
                return None
            value = value._replace(shape=shape, strides=value.strides if value.shape == shape else strides_of(shape))
        if read.repeats:
            value = self._cast(value, cast(Cast, read.cast), read.axis) or value
        if own.other is None:
            return value, self.cast_along(axes[1], to)
        if value.strides != strides_of(value.shape):
            return None
        if not own.hadamard:
            again = self._cast(value, own.other, axes[0])
            return None if again is None else (again, self.cast_along(axes[1], to))
        rotated = cast(tuple[int, int], self.form.rotated(slot, own.hadamard))
        signs = self.own((own.hadamard,), torch.float32)
        self.steps.append(SignsStep(own.hadamard, signs))
        pair = []
        for one, by, axis in ((value, own.other, rotated[0]), (self.gradient, to, rotated[1])):
            turned = self._place(one.shape, one.strides, torch.float32)
            self.steps.append(RotationStep(one, signs, turned.place, own.hadamard, axis))
            pair.append(turned if by is None else self._cast(turned, by, axis))
        return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])

    def cast_along(self, axis: int, to: Cast | None) -> Memory:
        """Return the gradient as an operand; scales of rows and blocks follow the contracted dimension."""
        if to is None or not self.is_cast(to, self.gradient.dtype):
            return self.gradient
        key = axis if depends_on_axis(to) else -1, to
        if key not in self.incoming:
            source = self.gradient
            self.incoming[key] = self._cast(source, to, key[0]) or self._cast_turned(source, to, key[0])
        return self.incoming[key]

    def _cast(self, source: Memory, to: Cast, axis: int) -> Memory | None:
        """Return the values of a cast, laid as their source; None where no step casts along the axis as that lies."""
        axis = axis if depends_on_axis(to) else -1
        if not self.is_cast(to, source.dtype):
            return source
        if not follows(source.shape, to, axis):
            return None
        made = self._place(source.shape, source.strides, torch.float32 if self.keeps else carrier_dtype(to))
        self.steps.append(CastStep(source, made.place, to, made.dtype, axis, entry_of(to, GRADIENT_ENTRY)))
        return made

    def _cast_turned(self, source: Memory, to: Cast, axis: int) -> Memory:
        """Return the values of a cast along the last dimension of a copy of the gradient, in which that is the axis."""
        shape = source.shape
        order = [index for index in range(len(shape)) if index != axis] + [axis]
        turned = tuple(shape[index] for index in order)
        source = Memory(self.make(Turned(shape, axis)), turned, strides_of(turned), source.dtype)
        lying = dict(zip(order, source.strides, strict=True))
        strides, dtype = tuple(lying[index] for index in range(len(shape))), carrier_dtype(to)
        made = self._place(shape, strides, torch.float32 if self.keeps else dtype)
        self.steps.append(CastStep(source, made.place, to, made.dtype))
        return made

    def _place(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Memory:
        """Return memory for what a product reads, or another step."""
        place = self.make((shape, strides, dtype)) if self.keeps else self.own(shape, dtype)
        return Memory(place, shape, strides, dtype)

    def make(self, one: Empty | Turned) -> int:
        """Return the place of one more tensor."""
        self.made.append(one)
        return self.given + len(self.made) - 1

    def own(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the place of numbers that only the program reads."""
        return owned_place(self.owned, shape, dtype)

    def finished(self, copies: bool, results: Any) -> Back:
        return Back(Program(self.steps, self.owned), copies, self.made, results, self.may_lose)

    def _product(self, found: Matrices, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Finish | None]:
        """Multiply into a tensor of this shape, in a dtype."""
        shape, output, finish = shape if found.finish is None else found.shape, self.known.rule.output, found.finish
        if finish is not None and getattr(self.form, "scale", 1) != 1:  # rounded after the factor
            finish, output, dtype = _rounding(finish, output, dtype), None, torch.float32
        to = self.make((shape, strides_of(shape), dtype))
        self.steps += found.steps(NOWHERE, to, dtype, output, self.owned)
        return to, finish


def _rounding(finish: Finish, output: Cast | None, dtype: torch.dtype) -> Finish:
    """Return a function that rounds, in a dtype, what another one makes of a product."""
    return lambda product: rounded(finish(product), output).to(dtype)
