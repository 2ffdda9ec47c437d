"""Linear layers in products of bytes: under a rule of int8 without gradients, and training in int8.

The operands equal those of the rule, bit for bit. Their integers are summed exactly in int32, while the general path
sums fp32 products of scaled values; the sum is rounded once and scaled afterwards. Calls that record a graph take the
general path.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowp.casts import Cast, parse
from lowp.compat import applied_at_once, remembered_by_identity
from lowp.kernels.cpu import PLAIN
from lowp.kernels.int16.integer import NotFinite
from lowp.kernels.packed.byte_products import Panels, RowCodes, encoded, multiply_codes, weights_in_bytes
from lowp.kernels.packed.byte_rows import rows_in_bytes
from lowp.kernels.products import contract_packed, multiplies_int8, sum_of_rows
from lowp.kernels.products.programs import are_ordinary
from lowp.ops.call import Call, QuickRegion, RoleCasts
from lowp.ops.casting import draw_seed, end_of, functorch_is_active, rounded, shielded
from lowp.ops.products import gradients
from lowp.ops.trilinear import Form, Linear
from lowp.policy import Rule

__all__ = ["is_int8", "linear_in_bytes", "trained_in_bytes"]

_INT8 = parse("int8")
_panels: MutableMapping[Tensor, Panels] = WeakTensorKeyDictionary()  # by the cast weights that a region keeps


def linear_in_bytes(form: Form, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return a linear layer under a rule of int8; None if it must take the general path."""
    operands = [one for one in (x, weight, bias) if one is not None]
    if not isinstance(form, Linear) or not all(type(one) in PLAIN and one.dtype is torch.float32 for one in operands):
        return None
    if torch.is_grad_enabled() and any(one.requires_grad for one in operands):
        return None
    if weight.dim() != 2 or not multiplies_int8(x, weight):
        return None
    panels, rows = _packed(call, weight), rows_in_bytes(x.detach().reshape(-1, x.shape[-1]))
    if panels is None or rows is None:  # infinite or NaN values, which int8 cannot hold
        return None
    result = contract_packed((rows, panels), bias).reshape(*x.shape[:-1], weight.shape[0])
    return result if call.rule.output is None else rounded(result, call.rule.output, call.seed)


# -- training -----------------------------------------------------------------------------------------------------


def trained_in_bytes(
    rule: Rule, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: QuickRegion | None
) -> Tensor | None:
    """Return F.linear(input, weight, bias=None) under a rule that sums int8 in int32, forward and backward.

    As a `Quick` of a rule; None for the general path.
    """
    if kwargs or not 2 <= len(args) <= 3 or not are_ordinary(*args):
        return None
    x, weight, bias = args if len(args) == 3 else (*args, None)
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or 0 in (*x.shape, *weight.shape):
        return None
    try:
        return cast(Tensor, _apply(end_of(x), end_of(weight), bias, (x, weight), rule))
    except NotFinite:
        return None


class _InBytes(torch.autograd.Function):
    """Products of int8; saves the codes of its operands, and their scales. `x` and `weight` are their ends.

    Where the scales of an operand lie along the sum of a gradient, they multiply the incoming gradient before it is
    rounded, so that every sum is one of integers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operands: tuple[Tensor, Tensor], rule: Rule
    ) -> Tensor:
        rows, factor = _codes(operands[0].reshape(-1, x.shape[-1]), rule.input), _codes(operands[1], rule.weight)
        first, second, *_ = ctx.needs_input_grad
        ctx.save_for_backward(*(rows if second else (None, None)), *(factor if first else (None, None)))
        ctx.rule, ctx.shapes, ctx.edges = rule, (tuple(x.shape), tuple(weight.shape)), (x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        result = multiply_codes(rows, factor.payload, factor.scales, bias)
        return result.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_gradients, gradient, ctx)


_apply = applied_at_once(_InBytes)


def _gradients(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    numbers, scales, factors, factor_scales = ctx.saved_tensors
    needs, (first, second), to = ctx.needs_input_grad[:3], ctx.shapes, ctx.rule.grad
    rows = None if numbers is None else RowCodes(numbers, scales)
    factor = None if factors is None else RowCodes(factors, factor_scales)
    incoming = gradient.reshape(-1, second[0]).float()
    try:
        if torch.is_grad_enabled() or functorch_is_active():
            raise NotFinite
        of_x = of_weight = None
        if factor is not None:
            of_x = multiply_codes(_codes(incoming * factor.scales, to), factor.payload.t(), None).reshape(first)
        if rows is not None:
            turned = (incoming * rows.scales[:, None]).t()
            of_weight = multiply_codes(_codes(turned, to), rows.payload.t(), None)
        bias = sum_of_rows(incoming).to(ctx.bias_dtype) if needs[2] else None
        return of_x, of_weight, bias, None, None
    except NotFinite:
        values = None if rows is None else rows.values.reshape(first), None if factor is None else factor.values
        casts = RoleCasts(ctx.rule, None)
        found = gradients(Linear(first, second), casts, needs, ctx.bias_dtype, gradient, values, ctx.edges)
        return *found, None, None


def _codes(x: Tensor, to: Cast | None) -> RowCodes:
    """Return the rows of a matrix as int8. Raises NotFinite."""
    assert to is not None
    found = encoded(x.detach().float(), to, draw_seed() if to.is_stochastic else 0)
    if found is None:
        raise NotFinite
    return found


@remembered_by_identity
def is_int8(rule: Rule) -> bool:
    """Whether a rule rounds both operands to int8, one scale per row, and sums in fp32."""
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    return rule.input == _INT8 and rule.weight == _INT8 and sums_in_fp32


def _packed(call: Call, weight: Tensor) -> Panels | None:
    """Return the weight's bytes; those of a parameter are cached as long as the region keeps its cast."""
    if not (weight.is_leaf and weight.requires_grad):
        return weights_in_bytes(weight.detach())
    value = call.weight_cast(weight, cast(Cast, call.rule.weight))
    if value not in _panels:
        panels = weights_in_bytes(weight.detach())
        if panels is None:
            return None
        _panels[value] = panels
    return _panels[value]
