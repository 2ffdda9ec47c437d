"""Products with one matrix in fp8 on chips that multiply fp8: torch's scaled product; a quarter of the bytes is saved.

For linear layers and for ``x @ matrix``. torch has no scaled product of batches and no scaled convolution.

The operands equal those of the rule, bit for bit. The product is summed in fp32 and scaled afterwards, while the
general path multiplies scaled values. All other calls, including higher derivatives, take the general path.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.compat import remembered_by_identity
from lowp.kernels.products.fp8_products import Fp8Matrix, encoded, is_eight_bits, multiplied, multiplies_fp8
from lowp.ops.call import RoleCasts
from lowp.ops.casting import shield
from lowp.ops.products import gradients
from lowp.ops.trilinear import Einsum, Form, Linear
from lowp.policy import Rule

__all__ = ["is_fp8", "product_in_fp8"]

_E5M2 = "e5m2"


def product_in_fp8(form: Form, rule: Rule, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return a linear layer, or x times a matrix, under a rule of fp8; None for what the general path runs."""
    if not multiplies_fp8(x):
        return None
    if isinstance(form, Linear):
        return _multiplied(rule, x, weight, bias)
    is_matrix = isinstance(form, Einsum) and form.call in (torch.matmul, torch.mm) and weight.dim() == 2
    return _multiplied(rule, x, weight, None, is_turned=True) if is_matrix and bias is None else None


def _multiplied(rule: Rule, x: Any, weight: Any, bias: Any, is_turned: bool = False) -> Tensor | None:
    """Return x [..., k] times the transpose of weight [n, k] ([k, n] where it `is_turned`), plus bias; or None."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not all(type(one) in (Tensor, nn.Parameter) and one.dtype is torch.float32 for one in operands):
        return None
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[0 if is_turned else 1]:
        return None
    if not x.numel() * weight.numel():
        return None
    weight = weight.t() if is_turned else weight
    if not torch.is_grad_enabled():
        return _product(_rows(x, rule), encoded(weight, cast(Any, rule.weight)), bias, x.shape[:-1])
    return cast(Tensor, _EightBits.apply(x, weight, bias, rule))  # type: ignore[no-untyped-call]


@remembered_by_identity
def is_fp8(rule: Rule) -> bool:
    """Whether a rule casts all operands to fp8 and writes fp32; torch has no product of two e5m2 tensors."""
    operands = (rule.input, rule.weight, rule.grad)
    if rule.output is not None or not all(is_eight_bits(one) for one in operands):
        return False
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    forward = [str(one.element) for one in operands[:2] if one is not None]
    return sums_in_fp32 and all(_E5M2 not in name for name in forward)


def _rows(x: Tensor, rule: Rule) -> Fp8Matrix:
    return encoded(x.reshape(-1, x.shape[-1]), cast(Any, rule.input))


def _product(rows: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None, shape: torch.Size) -> Tensor:
    return multiplied(rows, weight, bias).reshape(*shape, weight.numbers.shape[0])


class _EightBits(torch.autograd.Function):
    """The product; saves its operands in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
        rows, factor = _rows(x, rule), encoded(weight, cast(Any, rule.weight))
        first, second, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(*(rows if second else (None, None)), *(factor if first else (None, None)))
        ctx.rule, ctx.shapes = rule, (tuple(x.shape), tuple(weight.shape))
        return _product(rows, factor, bias, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with shield():
            (first, second), (needs_x, needs_weight, needs_bias, _) = ctx.shapes, ctx.needs_input_grad
            numbers, scale, factors, factor_scale = ctx.saved_tensors
            rows = Fp8Matrix(numbers, scale) if needs_weight else None
            weight = Fp8Matrix(factors, factor_scale) if needs_x else None
            if torch.is_grad_enabled():
                values = None if rows is None else rows.values.reshape(first), None if weight is None else weight.values
                needs = needs_x, needs_weight, needs_bias
                casts = RoleCasts(ctx.rule, ctx.rule.accumulate)
                return *gradients(Linear(first, second), casts, needs, torch.float32, gradient, values), None
            incoming = encoded(gradient.reshape(math.prod(first[:-1]), second[0]), ctx.rule.grad)
            turned = Fp8Matrix(incoming.numbers.t(), incoming.scale)
            return (
                None if weight is None else multiplied(incoming, _turned(weight)).reshape(first),
                None if rows is None else multiplied(turned, _turned(rows)),
                incoming.values.sum(0) if needs_bias else None,
                None,
            )


def _turned(matrix: Fp8Matrix) -> Fp8Matrix:
    return Fp8Matrix(matrix.numbers.t(), matrix.scale)
