"""The short way of a linear layer on a CPU whose operands and result a rule rounds to one 16-bit dtype.

It computes what `products.contract` does, bit for bit, with no description of the product and no choice of a way: what
can be decided of a rule is decided once. Everything else, higher derivatives included, goes the long way.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp.kernels.products import is_in_fp32
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import functorch_is_active, native_dtype, shield
from lowp.ops.products import gradients_of_linear
from lowp.ops.trilinear import Linear
from lowp.policy import Rule

__all__ = ["one_dtype", "short_linear"]

_PLAIN = (Tensor, nn.Parameter)
_CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
_MOST_PLANS = 1024

_plans: dict[int, tuple[Rule, torch.dtype | None]] = {}  # by the identity of the rule, which is held as long


def short_linear(call: Call) -> Tensor | None:
    """Return F.linear(input, weight, bias) under a rule; None where it has to go the long way."""
    if functorch_is_active() or call.kwargs or not 2 <= len(call.args) <= 3:
        return None
    dtype = one_dtype(call.rule)
    if dtype is None or call.site is not None or call.watch is not None or call.roles is not None:
        return None
    x, weight, *rest = call.args
    bias = rest[0] if rest else None
    if not (_is_plain(x) and _is_plain(weight) and (bias is None or _is_plain(bias))) or not is_in_fp32(x):
        return None
    if not (x.dim() >= 1 and 1 <= weight.dim() <= 2 and x.shape[-1] == weight.shape[-1]):
        return None
    value, to = x.to(dtype), call.rule.weight
    assert to is not None
    factor = call.weight_cast(weight, to) if weight.is_leaf and weight.requires_grad else weight.to(dtype)
    if torch.is_grad_enabled():
        return cast(Tensor, _Short.apply(value, factor, bias, call.rule))  # type: ignore[no-untyped-call]
    return _product(value, factor, bias)


def one_dtype(rule: Rule) -> torch.dtype | None:
    """Return the one 16-bit dtype that a rule rounds a product to; None where it does something else."""
    found = _plans.get(id(rule))
    if found is None or found[0] is not rule:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        found = _plans[id(rule)] = (rule, _planned(rule))
    return found[1]


def _planned(rule: Rule) -> torch.dtype | None:
    casts = [rule.input, rule.weight, rule.output, rule.output if rule.grad is None else rule.grad]
    dtypes = {None if one is None else native_dtype(one) for one in casts}
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    one = dtypes.pop() if len(dtypes) == 1 else None
    return one if one in (torch.float16, torch.bfloat16) and sums_in_fp32 else None


def _is_plain(x: Any) -> bool:
    return type(x) in _PLAIN and x.dtype in _CASTABLE and x.layout is torch.strided and not x.is_nested


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in fp32, bias included, rounded once to the dtype of x."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class _Short(torch.autograd.Function):
    """The product of a rounded input and a rounded weight; saves both, as the long way does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
        first, second, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if second else None, weight if first else None)
        ctx.rule, ctx.shapes = rule, (x.shape, weight.shape)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with shield():
            x, weight = ctx.saved_tensors
            (first, second), (needs_x, needs_weight, needs_bias, _) = ctx.shapes, ctx.needs_input_grad
            if torch.is_grad_enabled() or functorch_is_active():
                form = Linear(tuple(first), tuple(second))
                casts = RoleCasts(ctx.rule, ctx.rule.accumulate)
                needs = needs_x, needs_weight, needs_bias
                return *gradients_of_linear(form, casts, needs, ctx.bias_dtype, gradient, (x, weight)), None
            outputs, rows, inputs = second[0] if len(second) == 2 else 1, math.prod(first[:-1]), second[-1]
            incoming, dtype = gradient.float().reshape(rows, outputs), gradient.dtype
            return (
                (incoming @ weight.float().reshape(outputs, inputs)).reshape(first).to(dtype) if needs_x else None,
                (incoming.t() @ x.float().reshape(rows, inputs)).reshape(second).to(dtype) if needs_weight else None,
                incoming.sum(0).to(dtype).to(ctx.bias_dtype) if needs_bias else None,
                None,
            )
