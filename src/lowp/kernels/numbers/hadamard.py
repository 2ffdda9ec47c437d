"""The randomized Hadamard transform of both operands of a product, along the dimension that it sums.

Blocks of n numbers are multiplied by diag(signs) H / sqrt(n), an orthogonal matrix: the product in exact arithmetic
stays, while a large number is spread over its block before a cast to few bits. The signs are drawn once for a product.

Source: Tseng et al. 2024 (QuIP#, arXiv 2402.04396), Sylvester's matrix; the signs by bit 0 of Philox words.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowp.kernels.numbers.philox import words
from lowp.kernels.tracing import is_sharded


def signs(size: int, seed: Tensor | int, device: torch.device) -> Tensor:
    """Return the signs of a block, fp32[size]: -1 where the first bit of a number's word is set."""
    drawn = words(torch.empty(size, device=device), seed)
    return 1.0 - 2.0 * (drawn & 1).float()


def rotate(x: Tensor, signs: Tensor, axis: int = -1) -> Tensor:
    """Return x in fp32, with blocks along a dimension rotated; what is left at its end, less than a block, stays.

    The definition: log2(n) rounds of sums and differences in fp32 of numbers 1, 2, 4, ... places apart, and a product
    with 1 / sqrt(n), rounded to fp32. Infinities and NaN spread over their block. Part of the autograd graph. A DTensor
    is gathered along the dimension.
    """
    if is_sharded(x):
        x, signs = _on_ranks(x, signs, axis % x.ndim)
    size, length = signs.numel(), x.shape[axis]
    whole = length - length % size
    moved = x.float().movedim(axis, -1)
    head, tail = moved[..., :whole], moved[..., whole:]
    blocks = head.reshape(*head.shape[:-1], whole // size, size) * signs
    step = 1
    while step < size:
        pairs = blocks.reshape(*blocks.shape[:-1], size // (2 * step), 2, step)
        first, second = pairs.unbind(-2)
        blocks = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    turned = (blocks * (1 / math.sqrt(size))).reshape(head.shape)
    return (turned if whole == length else torch.cat((turned, tail), -1)).movedim(-1, axis)


def _on_ranks(x: Any, signs: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return a DTensor whose ranks have whole lines along a dimension, and the signs as one that each rank has."""
    from torch.distributed.tensor import DTensor, Replicate

    stays = [one.is_shard() and one.dim % x.ndim != axis for one in x.placements]
    placements = [one if is_kept else Replicate() for one, is_kept in zip(x.placements, stays, strict=True)]
    everywhere = [Replicate()] * len(placements)
    return x.redistribute(placements=placements), DTensor.from_local(signs, x.device_mesh, everywhere, run_check=False)
