"""Linear layers of int16 carried in fp32 on a CPU, run from their arguments only; see `lowp.ops.call.Quick`.

The result is that of `integer_contraction`, without the description of the call: decisions that depend only on the rule
are made once. Results are DFP-16's chains, or exact sums that are written at the site of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import applied_at_once
from lowp.kernels.choose.dispatch import has_integer_kernels
from lowp.kernels.int16 import linear as int16_linear
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.ops.call import Quick, QuickRegion, RoleCasts
from lowp.ops.casting import end_of, functorch_is_active, is_plain, shielded
from lowp.ops.int16.contraction import Contraction, IntegerProduct, Results, gradients_from, summed
from lowp.ops.int16.flexpoint import is_flexpoint
from lowp.ops.products import integer_gradients
from lowp.ops.trilinear import Form, Linear
from lowp.policy import Rule

__all__ = ["are_plain", "contracted", "quick", "sums_integers"]

_apply = applied_at_once(IntegerProduct)


def sums_integers(rule: Rule) -> bool:
    """Whether a rule multiplies int16 under one exponent per tensor, rounded to nearest, and sums integers.

    The sums are chains of int32 with fp32 results, or exact sums whose results are written at sites.
    """
    casts, sums = (rule.input, rule.weight, rule.grad), None if rule.accumulate is None else rule.accumulate.format
    if not all(one is not None and has_mantissas(one) and not one.is_stochastic for one in casts):
        return False
    return sums == "int32" if rule.output is None else sums == "exact" and is_flexpoint(rule.output)


def quick(rule: Rule) -> Quick:
    """Return the function that runs F.linear under such a rule with fp32 results."""
    to_input, to_weight, casts = cast(Cast, rule.input), cast(Cast, rule.weight), RoleCasts(rule, rule.accumulate)
    run_contraction = contracted(rule)
    at_once = all(map(int16_linear.serves, (to_input, to_weight, cast(Cast, rule.grad))))
    without_gradients = int16_linear.without_gradients((to_input, to_weight)) if at_once else None

    def run(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        if without_gradients is not None and len(args) == 3 and not kwargs and not torch.is_grad_enabled():
            if (result := without_gradients(*args)) is not None:
                return result
        if kwargs or not 2 <= len(args) <= 3 or not _are_matrices(args):
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        if at_once and (whole := _at_once(x, weight, bias, casts)) is not None:
            return whole
        return run_contraction(Linear(x.shape, weight.shape), "linear", (x, weight, bias), region)

    return run


Run = Callable[[Form, str, "tuple[Tensor, Tensor, Tensor | None]", QuickRegion], "Tensor | None"]


def contracted(rule: Rule) -> Run:
    """Return the function that runs a contraction of plain fp32 tensors on a CPU under such a rule.

    It takes the form, the op, the operands with the bias, and the region. It returns None, with nothing done, where the
    general path has to run.
    """
    to_input, to_weight, casts = cast(Cast, rule.input), cast(Cast, rule.weight), RoleCasts(rule, rule.accumulate)
    is_written = rule.output is not None

    def run(form: Form, op: str, tensors: tuple[Tensor, Tensor, Tensor | None], region: QuickRegion) -> Tensor | None:
        if is_written and region.spots is None:
            return None
        x, weight, bias = tensors
        a, b = payloads.rounded(x, to_input), payloads.rounded(weight, to_weight)
        if a is None or b is None:  # infinities, which no integer represents
            return None
        results = Results.of(region.writer(op, rule), x, weight) if is_written else None
        product = Contraction(form, casts, integer_gradients, op)
        if not torch.is_grad_enabled():
            return summed(product, a, b, bias, results)
        return cast(Tensor, _apply(end_of(x), end_of(weight), bias, a, b, product, results))

    return run


# -- layers whose calls would take longer than their arithmetic ---------------------------------------------------


def _at_once(x: Tensor, weight: Tensor, bias: Tensor | None, casts: RoleCasts) -> Tensor | None:
    """Return the output of a small layer from one call of the C++ library; None if the call is not possible."""
    is_followed = torch.is_grad_enabled()
    pair = cast(Cast, casts.rule.input), cast(Cast, casts.rule.weight)
    found = int16_linear.linear(x, weight, bias, pair, is_followed)
    if found is None or not is_followed:
        return None if found is None else found[0]
    product = Contraction(Linear(x.shape, weight.shape), casts, integer_gradients, "linear")
    return cast(Tensor, _apply_whole(end_of(x), end_of(weight), bias, found, product))


class _Whole(torch.autograd.Function):
    """The node of a small layer with a given output; saves the mantissas of both operands as one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        found: tuple[Tensor, Tensor],
        product: Contraction,
    ) -> Tensor:
        needs_first, needs_second, *_ = ctx.needs_input_grad
        ctx.edges = first if needs_first else None, second if needs_second else None
        ctx.product, ctx.results, ctx.bias_dtype = product, None, torch.float32
        y, kept = found
        ctx.save_for_backward(kept)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *shielded(_whole_gradients, gradient, ctx), None, None


_apply_whole = applied_at_once(_Whole)


def _whole_gradients(gradient: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    (kept,), form, rule = ctx.saved_tensors, ctx.product.form, ctx.product.casts.rule
    sizes = int16_linear.Sizes(form.first[0], form.second[0], form.first[1])
    if not (torch.is_grad_enabled() or functorch_is_active()):
        found = int16_linear.gradients(gradient, kept, sizes, rule.grad, ctx.needs_input_grad[:3])
        if found is not None:
            return found
    return gradients_from(gradient, ctx, list(int16_linear.parts(kept, sizes)))


def are_plain(*tensors: Tensor) -> bool:
    """Whether these are plain fp32 tensors where integer kernels answer at once."""
    if not (is_plain(*tensors) and has_integer_kernels(*tensors)):
        return False
    for one in tensors:  # a generator takes longer
        if one.dtype is not torch.float32:
            return False
    return True


def _are_matrices(args: tuple[Any, ...]) -> bool:
    """Whether the arguments are matrices x[m, k] and w[n, k] in fp32 and an optional bias [n]."""
    x, weight, *bias = args
    if not are_plain(*(args if bias and bias[0] is not None else args[:2])):
        return False
    if not (x.dim() == weight.dim() == 2) or x.size(1) != weight.size(1):
        return False
    if bias and bias[0] is not None and bias[0].shape != weight.shape[:1]:
        return False
    return bool(x.numel() > 0 and weight.numel() > 0)
