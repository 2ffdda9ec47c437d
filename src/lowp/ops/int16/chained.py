"""Linear layers whose products are DFP-16's chains, run from their arguments alone; see `lowp.ops.call.Quick`.

They compute what `integer_contraction` does, bit for bit, for matrices in fp32 on a CPU whose gradients need one word.
Everything else, higher derivatives included, goes the long way. Source: Das et al. 2018, arXiv 1802.00930.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import applied_at_once
from lowp.kernels import payloads
from lowp.kernels.hardware import is_on_host
from lowp.kernels.integer import matmul_chained
from lowp.kernels.integer_run import Bias
from lowp.kernels.low_words import FEATURES
from lowp.kernels.mantissas import Mantissas, has_mantissas
from lowp.ops.call import Quick, QuickCasts, RoleCasts
from lowp.ops.casting import end_of, functorch_is_active, is_plain, shielded
from lowp.ops.int16.contraction import bias_gradient
from lowp.ops.products import gradients_of_linear
from lowp.ops.trilinear import Linear
from lowp.policy import Rule

__all__ = ["quick", "sums_chains"]


def sums_chains(rule: Rule) -> bool:
    """Whether a rule multiplies int16 under one exponent a tensor, rounded to nearest, in chains of int32."""
    if rule.output is not None or rule.accumulate is None or rule.accumulate.format != "int32":
        return False
    casts = (rule.input, rule.weight, rule.grad)
    return all(one is not None and has_mantissas(one) and not one.is_stochastic for one in casts)


def quick(rule: Rule) -> Quick:
    """Return what runs F.linear under such a rule."""
    to_input, to_weight = cast(Cast, rule.input), cast(Cast, rule.weight)

    def run(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], casts: QuickCasts) -> Tensor | None:
        if kwargs or not 2 <= len(args) <= 3 or not _are_matrices(args):
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        a, b = payloads.rounded(x, to_input), payloads.rounded(weight, to_weight)
        if a is None or b is None or isinstance(a.exponent, Tensor):  # infinities, or exponents of a device
            return None
        if not torch.is_grad_enabled():
            return _product(a, b, bias)
        return cast(Tensor, _apply(end_of(x), end_of(weight), bias, a, b, rule))

    return run


def _are_matrices(args: tuple[Any, ...]) -> bool:
    """Whether these are matrices x[m, k] and w[n, k] in fp32, n below `FEATURES`, and perhaps a bias [n]."""
    if not all(one is None or (is_plain(one) and one.dtype is torch.float32 and is_on_host(one)) for one in args):
        return False
    x, weight, *bias = args
    if x is None or weight is None or not (x.dim() == weight.dim() == 2) or x.size(1) != weight.size(1):
        return False
    if bias and bias[0] is not None and (bias[0].dim() != 1 or bias[0].size(0) != weight.size(0)):
        return False
    return bool(weight.size(0) < FEATURES and x.numel() > 0 and weight.numel() > 0)


def _product(a: Mantissas, b: Mantissas, bias: Tensor | None) -> Tensor:
    """Return a b^T + bias in fp32."""
    added = None if bias is None else Bias(bias.detach().contiguous())
    return matmul_chained(a.payload, b.payload, transpose_b=True, exponent=a.exponent + b.exponent, bias=added).values


class _Chained(torch.autograd.Function):
    """The product; saves int16 payloads. Gradients go to the operands as they are, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Mantissas, b: Mantissas, rule: Rule
    ) -> Tensor:
        first, second, *_ = ctx.needs_input_grad
        ctx.edges, ctx.rule, ctx.shapes = (
            (x if first else None, weight if second else None),
            rule,
            (x.shape, weight.shape),
        )
        # what a checkpoint computes again may have other exponents
        ctx.save_for_backward(a.payload, b.payload, torch.tensor((a.exponent, b.exponent), device="cpu"))
        return _product(a, b, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_gradients, gradient, ctx)


_apply = applied_at_once(_Chained)


def _gradients(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    *words, exponents = ctx.saved_tensors
    a, b = (Mantissas(*one) for one in zip(words, exponents.tolist(), strict=True))
    needs, form, rule = ctx.needs_input_grad[:3], Linear(*ctx.shapes), ctx.rule
    incoming = None
    if not (torch.is_grad_enabled() or functorch_is_active()):
        incoming = payloads.rounded(gradient, rule.grad)
    if incoming is None or isinstance(incoming.exponent, Tensor):  # of a graph, not finite: the same values in fp32
        values, casts = (a.values, b.values), RoleCasts(rule)
        return *gradients_of_linear(form, casts, needs, torch.float32, gradient, values, ctx.edges), None, None, None
    of_x = of_weight = None
    if needs[0]:
        exponent = incoming.exponent + b.exponent
        of_x = matmul_chained(incoming.payload, b.payload, exponent=exponent).values
    if needs[1]:
        exponent = incoming.exponent + a.exponent
        of_weight = matmul_chained(incoming.payload, a.payload, transpose_a=True, exponent=exponent).values
    of_bias = bias_gradient(form, [incoming]).float() if needs[2] else None
    return of_x, of_weight, of_bias, None, None, None
