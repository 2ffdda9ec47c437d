"""Products of mantissas whose exponents stay on a device: what `integer` computes, and nothing waits for what was seen.

Triton's kernel on int8 tensor cores serves where `integer` chooses it. Elsewhere the digits meet as fp32 numbers, in
torch's own products:

    x = 256 h + l + 128, with h = x >> 8 and l = (x & 255) - 128, both in -128 .. 127

Every sum of 1024 products of digits is an integer of at most 2^24, which fp32 holds; TF32 and bf16 hold the digits. So
no fp64 is asked of a device, and the sums are exact in int64. All of it is forward only: autograd sees nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowp.kernels import integer_reference
from lowp.kernels.device_exponents import power, times
from lowp.kernels.integer import chosen_kernel
from lowp.kernels.integer_reference import BLOCK, ConvolutionShape
from lowp.kernels.integer_run import as_batches, sums_by_triton, told

__all__ = ["convolution", "digit_sums", "matmul"]

_DEPTH = 1024  # the longest sum of products of digits that fp32 holds


def matmul(left: Tensor, right: Tensor, exponent: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return [..., m, k] @ [..., k, n] of int16 times 2**exponent: exact in a dtype, or, None, fp32 in chains of 256.

    The leading dimensions are the same. `exponent`: a 0-d int32 tensor, see `device_exponents`. An exact sum is
    rounded once to fp32 or fp64.
    """
    with told(2 * math.prod(left.shape) * right.shape[-1]):
        if chosen_kernel(left) == "triton":
            from lowp.kernels.triton import products

            whole = torch.float32 if dtype is None else dtype
            a, b = as_batches(left), as_batches(right)
            values, _ = products.matmul(a, b, power(exponent), whole, dtype is None, -32768)
            return values.reshape(*left.shape[:-1], right.shape[-1])
        return _scaled(digit_sums(left, right, dtype is None), exponent, dtype)


def convolution(
    product: str, a: Tensor, b: Tensor, shape: ConvolutionShape, exponent: Tensor, dtype: torch.dtype | None
) -> Tensor:
    """Return one of the three products of a convolution, `integer.PRODUCTS`, written as `matmul` writes."""
    with told(2 * shape.output[0] * math.prod(shape.output[2:]) * math.prod(shape.weight)):
        multiply = sums_by_triton if chosen_kernel(a) == "triton" else digit_sums
        return _scaled(integer_reference.convolution(product, a, b, shape, dtype is None, multiply), exponent, dtype)


def _scaled(sums: Tensor, exponent: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return times(sums, exponent)
    return integer_reference.times(sums, power(exponent), dtype)


def digit_sums(left: Tensor, right: Tensor, chained: bool) -> Tensor:
    """Return the sums of [..., m, k] @ [..., k, n] as `integer_reference.matmul` does, with fp32 products of digits."""
    step = BLOCK if chained else _DEPTH
    dtype = torch.float32 if chained else torch.int64
    total = torch.zeros(*left.shape[:-1], right.shape[-1], dtype=dtype, device=left.device)
    for start in range(0, left.shape[-1], step):
        total += _block(left[..., start : start + step], right[..., start : start + step, :]).to(dtype)
    return total


def _block(left: Tensor, right: Tensor) -> Tensor:
    (high_a, low_a), (high_b, low_b) = _digits(left), _digits(right)
    high, low = (high_a @ high_b).to(torch.int64), (low_a @ low_b).to(torch.int64)
    middle = (high_a @ low_b).to(torch.int64) + (low_a @ high_b).to(torch.int64)
    sums = left.sum(-1, keepdim=True, dtype=torch.int64) + right.sum(-2, keepdim=True, dtype=torch.int64)
    return 65536 * high + 256 * middle + low + 128 * sums - 16384 * left.shape[-1]


def _digits(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x >> 8).to(torch.float32), ((x & 255) - 128).to(torch.float32)
