"""Linear layers whose rule rounds input and weight to int8, without gradients: products of bytes.

The operands equal those of the rule, bit for bit. Their integers are summed exactly in int32, while the general path
sums fp32 products of scaled values; the sum is rounded once and scaled afterwards. Calls that record a graph take the
general path.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowp.casts import Cast, parse
from lowp.compat import remembered_by_identity
from lowp.kernels.byte_products import Panels, weights_in_bytes
from lowp.kernels.byte_rows import rows_in_bytes
from lowp.kernels.cpu import PLAIN
from lowp.kernels.products import contract_packed, multiplies_int8
from lowp.ops.call import Call
from lowp.ops.casting import rounded
from lowp.ops.trilinear import Form, Linear
from lowp.policy import Rule

__all__ = ["is_int8", "linear_in_bytes"]

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
