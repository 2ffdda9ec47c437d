"""The short way of a linear layer whose operands and result a rule rounds to one 16-bit dtype.

It computes what `products.contract` does, bit for bit, with no description of the casts: what can be decided of a rule
is decided once, when a region plans the op, and `kernels.products.contract_sixteen_bits` chooses how the product runs.
Everything else, higher derivatives included, goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.compat import remembered_by_identity
from lowp.kernels.products import contract_sixteen_bits, gradients_sixteen_bits
from lowp.ops.bytes import is_int8, linear_in_bytes
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import functorch_is_active, native_dtype, shield
from lowp.ops.contraction import linear as long_linear
from lowp.ops.eight_bits import is_fp8, linear_in_fp8
from lowp.ops.products import gradients_of_linear
from lowp.ops.trilinear import OUTPUT, Linear
from lowp.policy import Rule

__all__ = ["linear", "one_dtype", "short_linear", "under"]

Runner = Callable[[Call], Any]

_PLAIN = (Tensor, nn.Parameter)
_CASTABLE = frozenset((torch.float32, torch.float16, torch.bfloat16))
_ANY = Linear((), ())  # the product of the output asks for no shapes


@remembered_by_identity
def under(rule: Rule) -> Runner | None:
    """Return the runner of F.linear that takes a short way under a rule, in 16 bits, fp8 or int8; None for others."""
    dtype = one_dtype(rule)
    in_bytes = linear_in_fp8 if is_fp8(rule) else linear_in_bytes if is_int8(rule) else None
    if dtype is None and in_bytes is None:
        return None

    def run(call: Call) -> Any:
        if torch.compiler.is_compiling():
            return long_linear(call)
        if in_bytes is not None:
            result = in_bytes(call)
        else:
            assert dtype is not None
            result = short_linear(dtype, call)
        return long_linear(call) if result is None else result

    return run


def linear(call: Call) -> Tensor:
    """F.linear(input, weight, bias=None) as a part of another op: the shortest way under the call's rule."""
    shortest = None if torch.compiler.is_compiling() else under(call.rule)
    return cast(Tensor, (shortest or long_linear)(call))


def short_linear(dtype: torch.dtype, call: Call) -> Tensor | None:
    """Return F.linear(input, weight, bias) in a 16-bit dtype; None where it has to go the long way."""
    if functorch_is_active() or call.kwargs or not 2 <= len(call.args) <= 3:
        return None
    if call.writer is not None or call.watch is not None or call.roles is not None:
        return None
    x, weight, *rest = call.args
    bias = rest[0] if rest else None
    if not (_is_plain(x) and _is_plain(weight) and (bias is None or _is_plain(bias))):
        return None
    if not (x.dim() >= 1 and 1 <= weight.dim() <= 2 and x.shape[-1] == weight.shape[-1]):
        return None
    value, to = x.to(dtype), call.rule.weight
    assert to is not None
    factor = call.weight_cast(weight, to) if weight.is_leaf and weight.requires_grad else weight.to(dtype)
    if torch.is_grad_enabled():
        return cast(Tensor, _Short.apply(value, factor, bias, call.rule))  # type: ignore[no-untyped-call]
    return contract_sixteen_bits(_ANY, OUTPUT, value, factor, bias)


def one_dtype(rule: Rule) -> torch.dtype | None:
    """Return the one 16-bit dtype that a rule rounds a product to; None where it does something else."""
    casts = [rule.input, rule.weight, rule.output, rule.output if rule.grad is None else rule.grad]
    dtypes = {None if one is None else native_dtype(one) for one in casts}
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    one = dtypes.pop() if len(dtypes) == 1 else None
    return one if one in (torch.float16, torch.bfloat16) and sums_in_fp32 else None


def _is_plain(x: Any) -> bool:
    return type(x) in _PLAIN and x.dtype in _CASTABLE and x.layout is torch.strided and not x.is_nested


class _Short(torch.autograd.Function):
    """The product of a rounded input and a rounded weight; saves both, as the long way does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
        first, second, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if second else None, weight if first else None)
        ctx.rule, ctx.bias_dtype = rule, None if bias is None else bias.dtype
        ctx.form = form = Linear(x.shape, weight.shape)
        return contract_sixteen_bits(form, OUTPUT, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with shield():
            (x, weight), (needs_x, needs_weight, needs_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
            form: Linear = ctx.form
            if torch.is_grad_enabled() or functorch_is_active():
                casts, needs = RoleCasts(ctx.rule, ctx.rule.accumulate), (needs_x, needs_weight, needs_bias)
                return *gradients_of_linear(form, casts, needs, ctx.bias_dtype, gradient, (x, weight)), None
            of_x, of_weight, of_bias = gradients_sixteen_bits(form, (x, weight), gradient, needs_bias)
            of_bias = None if of_bias is None else of_bias.to(gradient.dtype).to(ctx.bias_dtype)
            return of_x, of_weight, of_bias, None
