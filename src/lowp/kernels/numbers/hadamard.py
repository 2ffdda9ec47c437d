"""The randomized Hadamard transform of both operands of a product, along the dimension that it sums.

Blocks of n numbers are multiplied by diag(signs) H / sqrt(n), an orthogonal matrix: the product in exact arithmetic
stays, while a large number is spread over its block before a cast to few bits. The signs are drawn once for a product.

Source: Tseng et al. 2024 (QuIP#, arXiv 2402.04396), Sylvester's matrix; the signs by bit 0 of Philox words.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowp.kernels.numbers.philox import draw_seed, words
from lowp.kernels.tracing import functorch_is_active, is_sharded


def signs(size: int, seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the signs of a block, fp32[size]: -1 where the first bit of a number's word is set."""
    drawn = words(torch.empty(size, device=device), seed)
    return 1.0 - 2.0 * (drawn & 1).float()


@torch.library.custom_op("lowp::hadamard_signs", mutates_args=())
def signs_traced(gradient: Tensor, size: int, product: int) -> Tensor:
    """Draw the signs of one of the products that read a gradient, where torch.compile traces the backward pass.

    What depends on no gradient, torch.compile may run in forward and once more in backward. Of an operand that forward
    can rotate and of the gradient, each would get signs of its own; the number tells products of one gradient apart.
    """
    return signs(size, draw_seed(gradient.device), gradient.device)


@signs_traced.register_fake
def _(gradient: Tensor, size: int, product: int) -> Tensor:
    return gradient.new_empty(size, dtype=torch.float32)


def rotate(x: Tensor, signs: Tensor, axis: int = -1) -> Tensor:
    """Return x in fp32, with blocks along a dimension rotated; what is left at its end, less than a block, stays.

    The definition: log2(n) rounds of sums and differences in fp32 of numbers 1, 2, 4, ... places apart, and a product
    with 1 / sqrt(n), rounded to fp32. Infinities and NaN spread over their block. Part of the autograd graph if x is.
    A DTensor is gathered along the dimension.
    """
    if is_sharded(x):
        return _rotated_by_ranks(x, signs, axis % x.ndim)
    size, length = signs.numel(), x.shape[axis]
    whole = length - length % size
    if not whole:
        return x.float()
    axis %= x.ndim
    head = x.narrow(axis, 0, whole).float()
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    shape = outer, whole // size, size, inner
    is_graph = functorch_is_active() or (torch.is_grad_enabled() and x.requires_grad)
    turned = (_differentiable if is_graph else _rotated)(head.reshape(shape), signs.reshape(-1, 1)).reshape(head.shape)
    return turned if whole == length else torch.cat((turned, x.narrow(axis, whole, length - whole).float()), axis)


def _rotated(blocks: Tensor, signs: Tensor) -> Tensor:
    """Return blocks [outer, block, number, inner] rotated; each round reads one of two buffers and writes the other."""
    found, other = (blocks.new_empty(blocks.shape) for _ in range(2))
    torch.mul(blocks, signs, out=found)
    outer, count, size, inner = blocks.shape
    step = 1
    while step < size:  # of an empty tensor, view could not tell how many pairs there are
        pairs, written = (one.view(outer, count * size // (2 * step), 2, step, inner) for one in (found, other))
        torch.add(pairs[:, :, 0], pairs[:, :, 1], out=written[:, :, 0])
        torch.sub(pairs[:, :, 0], pairs[:, :, 1], out=written[:, :, 1])
        found, other, step = other, found, 2 * step
    return found.mul_(1 / math.sqrt(size))


def _differentiable(blocks: Tensor, signs: Tensor) -> Tensor:
    """Return the same as part of the autograd graph, which takes many times as long."""
    found, (outer, count, size, inner) = blocks * signs, blocks.shape
    step = 1
    while step < size:
        first, second = found.reshape(outer, count * size // (2 * step), 2, step, inner).unbind(2)
        found, step = torch.stack((first + second, first - second), 2), 2 * step
    return found.reshape(blocks.shape) * (1 / math.sqrt(size))


def _rotated_by_ranks(x: Any, signs: Tensor, axis: int) -> Tensor:
    """Return a DTensor whose ranks have rotated whole lines along a dimension."""
    from torch.distributed.tensor import DTensor, Replicate

    stays = [one.is_shard() and one.dim % x.ndim != axis for one in x.placements]
    placements = [one if is_kept else Replicate() for one, is_kept in zip(x.placements, stays, strict=True)]
    turned = rotate(x.redistribute(placements=placements).to_local(), signs, axis).contiguous()
    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(turned, x.device_mesh, placements, run_check=False, shape=x.shape, stride=stride)
