"""Linear layers of int16 in fp32 on a CPU, run from their arguments alone; see `lowp.ops.call.Quick`.

They are `integer_contraction` without a description of the call: what can be decided of a rule is decided once. Results
are DFP-16's chains, or exact sums that are written at the site of the call.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import applied_at_once
from lowp.kernels import payloads
from lowp.kernels.hardware import is_on_host
from lowp.kernels.mantissas import has_mantissas
from lowp.ops.call import Quick, QuickRegion, RoleCasts
from lowp.ops.casting import end_of, is_plain
from lowp.ops.int16.contraction import Contraction, IntegerProduct, Results, summed
from lowp.ops.int16.flexpoint import is_flexpoint
from lowp.ops.products import integer_gradients
from lowp.ops.trilinear import Linear
from lowp.policy import Rule

__all__ = ["quick", "sums_integers"]

_apply = applied_at_once(IntegerProduct)


def sums_integers(rule: Rule) -> bool:
    """Whether a rule multiplies int16 under one exponent a tensor, rounded to nearest, and sums integers.

    The sums are chains of int32 whose results are fp32, or exact ones whose results are written at sites.
    """
    casts, sums = (rule.input, rule.weight, rule.grad), None if rule.accumulate is None else rule.accumulate.format
    if not all(one is not None and has_mantissas(one) and not one.is_stochastic for one in casts):
        return False
    return sums == "int32" if rule.output is None else sums == "exact" and is_flexpoint(rule.output)


def quick(rule: Rule) -> Quick:
    """Return what runs F.linear under such a rule."""
    to_input, to_weight, casts = cast(Cast, rule.input), cast(Cast, rule.weight), RoleCasts(rule, rule.accumulate)
    is_written = rule.output is not None

    def run(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        if kwargs or not 2 <= len(args) <= 3 or not _are_matrices(args) or (is_written and region.spots is None):
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        a, b = payloads.rounded(x, to_input), payloads.rounded(weight, to_weight)
        if a is None or b is None:  # infinities, for which no integer stands
            return None
        results = Results.of(region.writer("linear", rule), x, weight) if is_written else None
        product = Contraction(Linear(x.shape, weight.shape), casts, integer_gradients, "linear")
        if not torch.is_grad_enabled():
            return summed(product, a, b, bias, results)
        return cast(Tensor, _apply(end_of(x), end_of(weight), bias, a, b, product, results))

    return run


def _are_matrices(args: tuple[Any, ...]) -> bool:
    """Whether these are matrices x[m, k] and w[n, k] in fp32 and perhaps a bias [n]."""
    for one in args:
        if one is not None and not (is_plain(one) and one.dtype is torch.float32 and is_on_host(one)):
            return False
    x, weight, *bias = args
    if x is None or weight is None or not (x.dim() == weight.dim() == 2) or x.size(1) != weight.size(1):
        return False
    if bias and bias[0] is not None and bias[0].shape != weight.shape[:1]:
        return False
    return bool(x.numel() > 0 and weight.numel() > 0)
