"""Products of mantissas whose exponents stay on a device: the results of `integer`, without synchronization.

They run in Triton's kernel on int8 tensor cores if `integer` chooses it, and otherwise as torch's fp32 products of
digits:

    x = 256 h + l + 128, with h = x >> 8 and l = (x & 255) - 128, both in -128 .. 127

Every sum of 1024 products of digits is an integer of at most 2^24, which fp32 represents; TF32 and bf16 represent the
digits. No fp64 is needed on the device, and the sums are exact in int64. The functions are not recorded by autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowp.compat import widest_float
from lowp.kernels.int16 import integer_reference
from lowp.kernels.int16.device_exponents import power, times
from lowp.kernels.int16.integer import chosen_kernel
from lowp.kernels.int16.integer_reference import BLOCK, ConvolutionShape
from lowp.kernels.int16.integer_run import as_batches, sums_by_triton, told
from lowp.kernels.int16.low_words import LOW_BITS

_DEPTH = 1024  # the longest sum of products of digits that fp32 holds


def matmul(left: Tensor, right: Tensor, exponent: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return [..., m, k] @ [..., k, n] of int16 times 2**exponent: exact in a dtype, or, None, fp32 in chains of 256.

    The leading dimensions are the same. `exponent`: a 0-d int32 tensor, see `device_exponents`. An exact sum is
    rounded once to fp32 or fp64; in int64 it is not scaled.
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
    if dtype is torch.int64:
        return sums
    if dtype is torch.float32 and widest_float(sums.device) is torch.float32:
        return times(sums.to(torch.float32), exponent)
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


_GUARD = 8  # bits below the unit of a sum in which a bias is added


def summed_to_odd(sums: list[Tensor], exponents: list[Tensor], bias: Tensor | None = None) -> Tensor:
    """Return sums of integers, each times 2**its exponent, and bias, added exactly and rounded to odd, in fp32.

    To odd: what fp32 does not hold sets its last bit, so that rounding it to 22 bits or fewer is rounding the sum.
    Without fp64. `sums`: int64, below 2**54; the exponents of the second and later ones are the first's less
    `LOW_BITS`, or `NOTHING`.
    """
    total, exponent = sums[0], exponents[0]
    for sum, low in zip(sums[1:], exponents[1:], strict=True):
        exponent = exponent - LOW_BITS
        total = total * (1 << LOW_BITS) + torch.where(low == exponent, sum, 0)
    if bias is None:
        return times(_to_odd(total), exponent)
    exponent = exponent - _GUARD
    units = times(bias, -exponent)
    whole = units.floor()
    inside = whole.nan_to_num(nan=0.0).clamp(-(2.0**60), 2.0**60).to(torch.int64)
    exact = total * (1 << _GUARD) + (inside | (whole != units).to(torch.int64))
    found = times(_to_odd(exact), exponent)
    return torch.where(bias.isfinite() & (whole.abs() < 2.0**60), found, found + bias)


def _to_odd(sums: Tensor) -> Tensor:
    """Return integers in fp32, rounded to odd."""
    near = sums.to(torch.float32)
    missed = sums - near.to(torch.int64)
    bits = near.view(torch.int32)
    toward_zero = (missed < 0) == (sums > 0)
    moved = torch.where((missed != 0) & (bits & 1 == 0), bits + torch.where(toward_zero, -1, 1), bits)
    return moved.to(torch.int32).view(torch.float32)
