"""Convolutions of int16 with results written under given exponents: a product is one call of the C++ library.

It computes what `integer.convolution_exact` and `mantissas.values` do, bit for bit, with the same observations.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16.cpu_int16 import Seen
from lowp.kernels.int16.integer import LARGEST_DEPTH, LARGEST_EXPONENT
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import PRODUCTS, check_status, is_observed
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.int16.written import WrittenMantissas

__all__ = ["Product", "written"]

_NOT_FINITE = 3


class Product(NamedTuple):
    """One product of a convolution: its number in the library, the shapes of operands and result, and the sizes."""

    number: int
    first: tuple[int, ...]
    second: tuple[int, ...]
    result: tuple[int, ...]
    shape: ConvolutionShape

    @classmethod
    def of(cls, name: str, shape: ConvolutionShape) -> Product | None:
        """Return one of PRODUCTS; None for empty tensors, and for a depth that could overflow int64."""
        first, second, result = map(shape.of_operand, PRODUCTS[name])
        if shape.depth(name) > LARGEST_DEPTH or 0 in (*first, *second, *result):
            return None
        return cls(list(PRODUCTS).index(name), first, second, result, shape)


def written(
    product: Product, a: Mantissas, b: Mantissas, exponent: int, symmetric: bool, bias: Tensor | None
) -> WrittenMantissas | None:
    """Return a product of mantissas on a CPU, with a bias of one number a channel, rounded once under an exponent.

    `a` and `b` are the operands in the order of PRODUCTS. None where it is left to others: without the library, while
    products are observed, for exponents out of range, for a bias that is infinite or NaN, and for other operands.
    """
    if a.payload.shape != product.first or b.payload.shape != product.second:
        return None
    shift = a.exponent + b.exponent - exponent
    if abs(shift) > LARGEST_EXPONENT or is_observed() or not uses_library():
        return None
    first, second, kernel = a.payload.contiguous(), b.payload.contiguous(), cpu.asked()
    payload = torch.empty(product.result, dtype=torch.int16, device="cpu")
    result = torch.empty(product.result, dtype=torch.float32, device="cpu")
    numbers = None if bias is None else bias.detach().float().contiguous()
    given, seen = array("q", (shift, -32767 if symmetric else -32768, -exponent, exponent)), array("q", (0, 0, 0))
    status = cpu.loaded().lowp_written_convolution(
        kernel.encode() or None,
        product.number,
        first,
        second,
        payload,
        result,
        result.numel(),
        product.shape.numbers,
        given,
        numbers,
        torch.get_num_threads(),
        seen,
    )
    if status == _NOT_FINITE:
        return None
    check_status(status, kernel)
    saturated, largest, sums = seen
    counts = Seen(largest, False, largest == 0 and sums > 0, saturated, 0, payload.numel())
    return WrittenMantissas(result, payload, exponent, counts)
