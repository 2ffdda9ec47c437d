"""The products of a large linear layer in 16 bits, as fp32 products in lent memory, each rounded once.

The bits are those of ``F.linear(x.float(), weight.float(), bias).to(x.dtype)`` and of its gradients; what it takes
beyond the three fp32 products is a conversion for each operand and result, and no memory that outlives it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.kernels.scratch import Scratch

__all__ = ["linear", "linear_gradients"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x[..., k] weight[n, k]^T + bias[n] in x's dtype, fp16 or bf16; a one-dimensional weight gives [...]."""
    bias = None if bias is None else bias.float()
    with Scratch() as scratch:
        wide, factor = scratch.wide(x), scratch.wide(weight)
        if x.dim() < 2 or weight.dim() < 2 or not scratch.lends or not x.is_contiguous() or not weight.numel():
            return F.linear(wide, factor, bias).to(x.dtype)
        rows = wide.view(-1, wide.shape[-1])
        out = scratch.empty(rows.shape[0], factor.shape[0])
        if bias is None:
            torch.mm(rows, factor.t(), out=out)
        else:
            torch.addmm(bias, rows, factor.t(), out=out)
        result = out.to(x.dtype)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], factor.shape[0])


def linear_gradients(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    operands: tuple[Tensor | None, Tensor | None],
    gradient: Tensor,
    wants_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight in the dtype of the result's, and that of the bias in fp32.

    `shapes` are those of x, of two dimensions and more, and of the weight, of two. x is None where the gradient of the
    weight is not asked for, and the weight where that of x is not.
    """
    (first, second), (x, weight) = shapes, operands
    rows, dtype = math.prod(first[:-1]), gradient.dtype
    with Scratch() as scratch:
        wide = scratch.wide(gradient)
        wide = wide if wide.dim() == 2 else wide.reshape(rows, second[0])
        of_x = None if weight is None else _product(wide, weight, dtype).view(first)
        of_weight = None if x is None else _product(wide.t(), x.reshape(rows, second[1]), dtype)
        return of_x, of_weight, wide.sum(0) if wants_bias else None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix in fp32 times one in 16 bits, summed in fp32 and rounded to a dtype."""
    with Scratch() as scratch:
        out = scratch.empty(left.shape[0], right.shape[1])
        return torch.mm(left, scratch.wide(right), out=out).to(dtype)
