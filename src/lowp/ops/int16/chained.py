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
from lowp.kernels.mantissas import has_mantissas
from lowp.ops.call import Quick, QuickCasts, RoleCasts
from lowp.ops.casting import end_of, is_plain
from lowp.ops.int16.contraction import Contraction, IntegerProduct, summed
from lowp.ops.products import integer_gradients
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
    to_input, to_weight, casts = cast(Cast, rule.input), cast(Cast, rule.weight), RoleCasts(rule, rule.accumulate)

    def run(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weight_casts: QuickCasts) -> Tensor | None:
        if kwargs or not 2 <= len(args) <= 3 or not _are_matrices(args):
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        a, b = payloads.rounded(x, to_input), payloads.rounded(weight, to_weight)
        if a is None or b is None:  # infinities, for which no integer stands
            return None
        product = Contraction(Linear(x.shape, weight.shape), casts, integer_gradients, "linear")
        if not torch.is_grad_enabled():
            return summed(product, a, b, bias, None)
        return cast(Tensor, _apply(end_of(x), end_of(weight), bias, a, b, product, None))

    return run


_apply = applied_at_once(IntegerProduct)


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
