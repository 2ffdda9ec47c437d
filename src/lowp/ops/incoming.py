"""The gradient of a contraction's result, as operand of the products of the backward pass."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import ScaledFormat
from lowp.kernels import triton
from lowp.kernels.choose.dispatch import implementation
from lowp.kernels.int16.low_words import has_low_word, warn_of_loss, with_low_word
from lowp.kernels.numbers import hadamard
from lowp.kernels.numbers.philox import draw_seed
from lowp.kernels.products import ready_operand
from lowp.kernels.products.scratch import Scratch
from lowp.ops.call import RoleCasts
from lowp.ops.casting import Operand, carrier_dtype, depends_on_axis, operand
from lowp.ops.trilinear import OTHERS, OUTPUT, Form, Linear


class Incoming(NamedTuple):
    """The gradient of a result as operand of the products of the backward pass, once for each way of rounding it."""

    form: Form
    casts: RoleCasts
    gradient: Tensor
    scratch: Scratch | None
    keeps: bool
    found: dict[tuple[int, Cast | None], Operand]
    told: list[Cast | None]

    def along(self, axis: int, to: Cast | None) -> Operand:
        """The gradient rounded by a cast; scales of rows and blocks follow the dimension that is summed."""
        key = axis if depends_on_axis(to) else -1, to
        if key not in self.found:
            dtype = None if to is None else carrier_dtype(to)
            role = "grad" if to == self.casts.rule.grad else "grad 2"
            if to not in self.told:
                self._tell(self.gradient, to)
            value = self.casts.operand(self.gradient, to, role, key[0], dtype)
            if self.scratch is None:
                self.found[key] = operand(self.gradient, value, self.casts.gradient_dtype)
            else:  # once for all the products and the bias
                if to is not None and isinstance(self.form, Linear):
                    value = _whole(self.gradient, value, to)
                self.found[key] = Operand(ready_operand(value, None if self.keeps else self.scratch))
        return self.found[key]

    def rotated(self, signs: Tensor, axis: int, to: Cast | None, role: str) -> Operand:
        """The gradient rotated along a dimension, and rounded by a cast."""
        rotated = hadamard.rotate(self.gradient, signs, axis)
        self._tell(rotated, to)
        return Operand(self.casts.operand(rotated, to, role, axis, torch.float32))

    def _tell(self, gradient: Tensor, to: Cast | None) -> None:
        """Tell observers of the gradient that a cast reads; `told` has those that they know."""
        self.told.append(to)
        self.casts.tell_as(gradient, "grad" if len(self.told) == 1 else "grad 2", to)

    def operands(self, target: int, other: Operand) -> dict[int, Operand]:
        """Return the two operands of a product of the backward pass, under a rule with casts by product."""
        form, casts = self.form, self.casts
        own, other_slot = casts.of_product(target), OTHERS[target][0]
        to, (axis, gradient_axis) = own.grad or casts.rule.grad, form.contracted[target]
        if own.other is None:
            return {other_slot: other, OUTPUT: self.along(gradient_axis, to)}
        x, signs = other.connected if self.scratch is None else other.plain, None
        if own.hadamard:
            axis, gradient_axis = cast("tuple[int, int]", form.rotated(target, own.hadamard))
            if torch.compiler.is_compiling():
                signs = hadamard.signs_traced(self.gradient, own.hadamard, target)
            else:
                seed = draw_seed(x.device) if casts.seed is draw_seed else casts.seed()
                signs = _signs(own.hadamard, seed, x.device)
            x = hadamard.rotate(x, signs, axis)
        casts.tell_as(x, casts.roles[other_slot], own.other)
        dtype = torch.float32 if self.scratch is None else carrier_dtype(own.other)
        product_of = f"of the {casts.roles[target]} gradient"
        again = Operand(casts.operand(x, own.other, f"{casts.roles[other_slot]} {product_of}", axis, dtype))
        if signs is None:
            return {other_slot: again, OUTPUT: self.along(gradient_axis, to)}
        return {other_slot: again, OUTPUT: self.rotated(signs, gradient_axis, to, f"grad {product_of}")}


def _signs(size: int, seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the signs of a rotation, on a device by one kernel in place of hundreds of torch's."""
    drawn = implementation(device)
    return triton.signs(size, seed, device) if drawn is triton and size >= 4 else hadamard.signs(size, seed, device)


def _whole(gradient: Tensor, value: Tensor, cast: Cast) -> Tensor:
    """Return the values of a gradient under one shared scale, with a second word where they would lose columns."""
    if has_low_word(cast):
        return with_low_word(gradient, value, cast)
    if isinstance(cast.format, ScaledFormat) and cast.format.scope.kind == "tensor" and not cast.is_stochastic:
        warn_of_loss(gradient, value, cast, f"the gradient of a linear layer, {list(gradient.shape)}")
    return value
