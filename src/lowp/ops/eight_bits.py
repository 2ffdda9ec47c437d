"""Linear layers in fp8 on chips that multiply it: torch's own scaled product, and a quarter of the bytes kept.

The operands are those of the rule, to the bit; the product is summed in fp32 and scaled afterwards, where the long way
multiplies scaled values. Everything else, higher derivatives included, goes the long way.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.kernels.eight_bits import Eight, encoded, is_eight_bits, multiplied, multiplies_fp8
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import functorch_is_active, shield
from lowp.ops.products import gradients_of_linear
from lowp.ops.trilinear import Linear
from lowp.policy import Rule

__all__ = ["is_fp8", "linear_in_fp8"]

_E5M2 = "e5m2"


def linear_in_fp8(call: Call) -> Tensor | None:
    """Return F.linear(input, weight, bias) under a rule of fp8; None where it has to go the long way."""
    if call.kwargs or not 2 <= len(call.args) <= 3 or functorch_is_active():
        return None
    if not isinstance(call.args[0], Tensor) or not multiplies_fp8(call.args[0]):
        return None
    if call.writer is not None or call.watch is not None or call.roles is not None:
        return None
    x, weight, *rest = call.args
    bias = rest[0] if rest else None
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not all(type(one) in (Tensor, nn.Parameter) and one.dtype is torch.float32 for one in operands):
        return None
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or not x.numel():
        return None
    if not torch.is_grad_enabled():
        return _product(_rows(x, call.rule), encoded(weight, cast(Any, call.rule.weight)), bias, x.shape[:-1])
    return cast(Tensor, _EightBits.apply(x, weight, bias, call.rule))  # type: ignore[no-untyped-call]


def is_fp8(rule: Rule) -> bool:
    """Whether a rule casts all operands to fp8 and writes fp32; products of two e5m2 are none of torch's."""
    operands = (rule.input, rule.weight, rule.grad)
    if rule.output is not None or not all(is_eight_bits(one) for one in operands):
        return False
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    forward = [str(one.element) for one in operands[:2] if one is not None]
    return sums_in_fp32 and all(_E5M2 not in name for name in forward)


def _rows(x: Tensor, rule: Rule) -> Eight:
    return encoded(x.reshape(-1, x.shape[-1]), cast(Any, rule.input))


def _product(rows: Eight, weight: Eight, bias: Tensor | None, shape: torch.Size) -> Tensor:
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
            rows = Eight(numbers, scale) if needs_weight else None
            weight = Eight(factors, factor_scale) if needs_x else None
            if torch.is_grad_enabled():
                values = None if rows is None else rows.values.reshape(first), None if weight is None else weight.values
                needs = needs_x, needs_weight, needs_bias
                casts = RoleCasts(ctx.rule, ctx.rule.accumulate)
                return *gradients_of_linear(Linear(first, second), casts, needs, torch.float32, gradient, values), None
            incoming = encoded(gradient.reshape(math.prod(first[:-1]), second[0]), ctx.rule.grad)
            turned = Eight(incoming.numbers.t(), incoming.scale)
            return (
                None if weight is None else multiplied(incoming, _turned(weight)).reshape(first),
                None if rows is None else multiplied(turned, _turned(rows)),
                incoming.values.sum(0) if needs_bias else None,
                None,
            )


def _turned(matrix: Eight) -> Eight:
    return Eight(matrix.numbers.t(), matrix.scale)
