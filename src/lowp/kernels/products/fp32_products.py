"""Matrix products whose sums in fp32 have one order on every processor, and with any number of threads.

An element of the result is ((block 0 + block 1) + block 2) ... + bias: a block is one chain of multiply-adds, each
rounded once, over `DEPTH` elements in order of depth, from +0 (cpu/product.hpp). Operands in fp16 and bf16 become fp32
while they are packed.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from lowp.compat import constant_when_compiled, real_tensors
from lowp.kernels.choose.dispatch import forced
from lowp.kernels.products import programs
from lowp.kernels.products.programs import Memory, ProductStep, Program, is_reached, strides_of

DEPTH = 192  # kDepth of cpu/product.hpp


def serves(*tensors: Tensor) -> bool:
    """Whether the library may multiply these: tensors that programs read, and no gradient is recorded for."""
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return not is_recorded and programs.serves(*tensors)


@constant_when_compiled
def serves_compiled() -> bool:
    """Whether the library multiplies what torch.compile traces."""
    return forced() in (None, "cpu") and programs.is_here()


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left [..., m, k] times right [..., k, n], plus bias [n], in fp32; NaN is the positive quiet NaN.

    All are tensors that `serves` answers for, with the same leading dimensions; the bias is contiguous.
    """
    about = left.shape, left.stride(), left.dtype, right.shape, right.stride(), right.dtype
    program, shape, copies = _planned(*about)
    left = left.contiguous() if copies[0] else left
    right = right.contiguous() if copies[1] else right
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    program([left, right, bias, out])
    return out


@functools.cache
def ones() -> Tensor:
    """Return a number that a product reads as a matrix of ones, with strides of 0."""
    with real_tensors():
        return torch.ones(1, device="cpu")


def sum_of_rows(x: Tensor) -> Tensor:
    """Return the sum of x[m, n] along m, as a product with ones, in fp32."""
    about = (1, x.shape[0]), (0, 0), torch.float32
    program, _, copies = _planned(*about, x.shape, x.stride(), x.dtype)
    x = x.contiguous() if copies[1] else x
    out = torch.empty(x.shape[1], dtype=torch.float32, device="cpu")
    program([ones(), x, None, out])
    return out


@torch.library.custom_op("lowp::multiply", mutates_args=(), device_types="cpu")
def multiply_traced(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """`multiply` as an operator that compilers see."""
    return multiply(left, right, bias)


@multiply_traced.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(*left.shape[:-1], right.shape[-1], dtype=torch.float32)


@functools.lru_cache(maxsize=4096)
def _planned(*about: Any) -> tuple[Program, tuple[int, ...], tuple[bool, bool]]:
    """Return a product of two operands, its shape, and which operands are copied first."""
    operands = []
    for place, (shape, strides, dtype) in enumerate((about[:3], about[3:])):
        copies = not is_reached(shape, strides)
        operands.append((Memory(place, shape, strides_of(shape) if copies else strides, dtype), copies))
    (left, of_left), (right, of_right) = operands
    program = Program([ProductStep(left, right, 2, 3, torch.float32)])
    return program, (*left.shape[:-1], right.shape[-1]), (of_left, of_right)
