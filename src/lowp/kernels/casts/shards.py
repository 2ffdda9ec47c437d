"""Casts of DTensors, as tensor parallelism makes them: each rank casts its shard as it would be cast in the whole.

A rank needs nothing from the others where groups of a shared scale lie within shards, and otherwise the extremes of
the whole tensor, by one small all-reduce. Stochastic casts draw by an element's index in the whole, and scales that are
means need all elements: such tensors are gathered first. Codes and statistics are those of the whole, on every rank.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowp.casts import Cast
from lowp.compat import constant_when_compiled, remembered_by_identity
from lowp.formats import Scope
from lowp.kernels.numbers import groups, scaled
from lowp.kernels.tracing import is_sharded

_taught: list[Any] = []


def whole(x: Any) -> Tensor:
    """Return the whole of a DTensor, which every rank then has; any other tensor itself."""
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[no-any-return]


def placed(x: Any, cast: Cast | None) -> Tensor:
    """Return a DTensor with shards that each rank can cast, None by given scales; others are gathered, sums reduced."""
    from torch.distributed.tensor import Replicate, Shard

    _teach_operators()
    free = [type(one) is Shard and _may_be_apart(x, one.dim % x.ndim, cast) for one in x.placements]
    wanted = [one if stays else Replicate() for one, stays in zip(x.placements, free, strict=True)]
    return x if wanted == list(x.placements) else x.redistribute(placements=wanted)  # type: ignore[no-any-return]


def _may_be_apart(x: Any, dim: int, cast: Cast | None) -> bool:
    """Whether a rank can cast a shard of a tensor along a dimension, given the extremes of the whole."""
    if cast is None or cast.is_stochastic:
        return False
    if cast.scaling is None or cast.scaling.kind == "static":
        return True
    format, last = scaled.scaled_format(cast), x.ndim - 1
    if format.scope.kind == "tensor":
        return not scaled.is_mean(format)
    if format.scope.kind == "channel":
        return dim == 0
    sizes = {last: format.scope.size, last - 1: format.scope.rows}
    if not sizes.get(dim, 0):
        return bool(dim < last)
    return bool(x.shape[dim] % (sizes[dim] * x.device_mesh.size()) == 0)


def extremes(x: Any, cast: Cast) -> Tensor | None:
    """Return the largest finite number of a whole DTensor, minus the smallest, and 1 if it is not finite, else 0.

    A DTensor that every rank has as a whole. None if the shards of x can be cast without.
    """
    if cast.scaling is None or cast.scaling.kind == "static" or not any(one.is_shard() for one in x.placements):
        return None
    format = scaled.scaled_format(cast)
    if format.scope.kind != "tensor" and format.outer is None:
        return None
    from torch.distributed.tensor import DTensor, Partial, Replicate

    own = x.to_local().detach()
    is_finite = own.isfinite()
    ends = pad(torch.where(is_finite, own, 0.0).flatten(), (0, 1))  # a shard may be empty
    flag = (~is_finite).any().to(own.dtype)
    mine = torch.stack([ends.amax(), -ends.amin(), flag])
    placements = [Partial("max") if one.is_shard() else Replicate() for one in x.placements]
    whole = DTensor.from_local(mine, x.device_mesh, placements, run_check=False)
    return whole.redistribute(placements=[Replicate()] * len(placements))


def in_whole(quantize: Callable[[Tensor, Cast], Tensor], x: Tensor, ends: Tensor, cast: Cast) -> Tensor:
    """Return x rounded as a part of a whole with these `extremes`, which stand in a group of their own.

    Under one scale for all, they stand in its group. `quantize` rounds a tensor by a cast.
    """
    largest, lowest, flag = ends.unbind()
    added = torch.stack([largest, -lowest, torch.where(flag > 0, torch.nan, 0.0).to(x.dtype)])
    scope = scaled.scaled_format(cast).scope
    if scope.kind == "tensor":
        return quantize(torch.cat([x.reshape(-1), added]), cast)[: x.numel()].reshape(x.shape)
    folded = groups.fold(x, scope)
    rows = folded.reshape(-1, folded.shape[-1])
    width = max(rows.shape[1], 3)
    rows = torch.cat([pad(rows, (0, width - rows.shape[1])), pad(added, (0, width - 3)).unsqueeze(0)])
    result = quantize(rows, _by_row(cast))[:-1, : folded.shape[-1]].reshape(folded.shape)
    return groups.unfold(result, x.shape, scope)


@remembered_by_identity
def _by_row(cast: Cast) -> Cast:
    """Return the cast with a scale for each row."""
    return replace(cast, format=replace(scaled.scaled_format(cast), scope=Scope("row")))


@constant_when_compiled
def _teach_operators() -> None:
    """Tell torch, once, that the operators that cast take all shards; `placed` has chosen them."""
    if _taught:
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def choices(x: Any, *others: Any) -> list[tuple[list[Any], list[Any]]]:
        rest = [Replicate() if hasattr(one, "placements") else None for one in others]
        return [([kind], [kind, *rest]) for kind in (Replicate(), *map(Shard, range(len(x.shape))))]

    _taught.extend([torch.ops.lowp.quantize.default, torch.ops.lowp.quantize_part.default])
    register_sharding(_taught)(choices)
