"""Which elements of a tensor share a scale: the groups of a scope, their shape, and their numbers for elements."""

import math

import torch
from torch import Tensor

from lowp.formats import Scope


def group_shape(shape: torch.Size, scope: Scope) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of this shape; a 0-d tensor counts as one of length 1."""
    if scope.kind == "tensor":
        return ()
    if scope.kind == "channel":
        return tuple(shape[:1]) or (1,)
    if scope.kind == "row":
        return tuple(shape[:-1])
    blocks = -(-math.prod(shape[-1:]) // scope.size)
    if scope.kind == "tile" and len(shape) > 1:
        return (*shape[:-2], -(-shape[-2] // scope.rows), blocks)
    return (*shape[:-1], blocks)


def fold(x: Tensor, scope: Scope) -> Tensor:
    """Return the elements with those of a group along the last dimension; partial blocks are padded with zeros."""
    if scope.kind == "tensor":
        return x.reshape(-1)
    if x.ndim == 0:
        x = x.reshape(1)
    if scope.kind == "row":
        return x
    if scope.kind == "channel":
        return x.reshape(x.shape[0], x[:1].numel())
    size = block_size(scope, x.shape[-1])
    if missing := -x.shape[-1] % size:
        x = torch.nn.functional.pad(x, (0, missing))
    if scope.kind != "tile" or x.ndim == 1:
        return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    rows = tile_rows(scope, x.shape)
    if missing := -x.shape[-2] % rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    tiles = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // size, size)
    return tiles.transpose(-3, -2).flatten(-2)


def unfold(folded: Tensor, shape: torch.Size, scope: Scope) -> Tensor:
    """Return a tensor of this shape from the elements that `fold` has ordered by their groups."""
    if scope.kind == "tile" and len(shape) > 1:
        rows = tile_rows(scope, shape)
        tiles = folded.reshape(*folded.shape[:-1], rows, folded.shape[-1] // rows).transpose(-3, -2)
        return tiles.flatten(-4, -3).flatten(-2)[..., : shape[-2], : shape[-1]]
    if scope.kind in ("block", "tile"):
        folded = folded.flatten(-2)[..., : math.prod(shape[-1:])]
    return folded.reshape(shape)


def tile_rows(scope: Scope, shape: torch.Size) -> int:
    """Return how many neighbouring rows share a scale in a tensor of at least two dimensions."""
    return min(scope.rows, max(shape[-2], 1))


def of_rows(scale: Tensor, shape: torch.Size, scope: Scope) -> Tensor:
    """Return the scales of the blocks of every row; those given but for tiles."""
    if scope.kind != "tile" or len(shape) < 2:
        return scale
    return scale.repeat_interleave(tile_rows(scope, shape), dim=-2)[..., : shape[-2], :]


def block_size(scope: Scope, length: int) -> int:
    """Return how many neighbours in a row share a scale: the block size, or the length of a shorter row."""
    return min(scope.size, max(length, 1))


def spread(scale: Tensor, shape: torch.Size, scope: Scope) -> Tensor:
    """Return the scale of every element, in a shape that broadcasts to the tensor's."""
    if scope.kind == "tensor" or not shape:
        return scale.reshape(())
    if scope.kind == "channel":
        return scale.reshape(-1, *(1,) * (len(shape) - 1))
    if scope.kind == "row":
        return scale.unsqueeze(-1)
    scale = of_rows(scale, shape, scope)
    return scale.repeat_interleave(block_size(scope, shape[-1]), dim=-1)[..., : shape[-1]]
