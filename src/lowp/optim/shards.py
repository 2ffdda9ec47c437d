"""Tensors sharded over ranks (DTensor): updates are element-wise, so each rank works on its local part."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, as parameters of FSDP2 (fully_shard) and tensor parallelism are."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 (fully_shard) gathers a module's parameters before its forward and backward pass."""
    return hasattr(module, "reshard") and hasattr(module, "unshard")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    return cast(Tensor, cast(Any, tensor).detach().to_local())


def shard_like(values: Tensor, like: Tensor) -> Tensor:
    """Return a rank's `values`, of the local shape of `like`, as a tensor sharded as `like` is."""
    if not is_sharded(like):
        return values
    from torch.distributed.tensor import DTensor

    sharded = cast(Any, like)
    return DTensor.from_local(
        values, sharded.device_mesh, sharded.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a whole tensor that every rank has, sharded as `like`; the tensor itself if plain."""
    if not is_sharded(like) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded = cast(Any, like)
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
