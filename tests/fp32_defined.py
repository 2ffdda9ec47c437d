"""The definition of fp32 products of matrices, `lowp.kernels.products.fp32_products`, in torch's operations."""

import torch
from torch import Tensor

from lowp.kernels.numbers.floats import moved_to_odd
from lowp.kernels.products.fp32_products import DEPTH


def defined(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product in fp32 by the definition, in torch's operations: each multiply-add is rounded once.

    A product of fp32 numbers is exact in fp64; its sum there is rounded to odd, which keeps what the rounding to fp32
    needs (Boldo and Melquiond 2008).
    """
    left, right = left.double(), right.double()
    total: Tensor | None = None
    for begin in range(0, max(left.shape[-1], 1), DEPTH):
        block = left.new_zeros(*left.shape[:-1], right.shape[-1])
        for k in range(begin, min(left.shape[-1], begin + DEPTH)):
            block = _added(left[..., k, None] * right[..., None, k, :], block).float().double()
        total = block.float() if total is None else total + block.float()
    assert total is not None
    total = total if bias is None else total + bias.float()
    return total.where(~total.isnan(), torch.nan)


def _added(x: Tensor, y: Tensor) -> Tensor:
    """The sum of fp64 numbers, rounded to odd."""
    total = x + y
    of_x = total - y
    error = (x - of_x) + (y - (total - of_x))  # exact (Knuth's TwoSum)
    return moved_to_odd(total, error)
