"""The agreement between ranks: one small all-reduce. torch.distributed, DDP and FSDP2 do everything else."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed

from lowp.compat import rendezvous_store
from lowp.errors import InvalidInput, Misuse

_PATIENCE = 30.0  # seconds in which all ranks should have prepared a model

# None: this rank alone.
Group: TypeAlias = "torch.distributed.ProcessGroup | None"


def is_running() -> bool:
    """Return whether torch.distributed is initialised in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Return this process's rank; 0 if torch.distributed is not initialised."""
    return torch.distributed.get_rank() if is_running() else 0


def count() -> int:
    """Return how many ranks there are; 1 if torch.distributed is not initialised."""
    return torch.distributed.get_world_size() if is_running() else 1


def world() -> Group:
    """Return the group of all ranks; None if torch.distributed is not initialised."""
    return torch.distributed.group.WORLD if is_running() else None


def has_other_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    group = torch.distributed.group.WORLD if torch.distributed.is_available() else None  # `world`, in no function
    return group is not None and group.size() > 1


def resolve(group: object) -> Group:
    """Return the process group that a user's argument means: a group itself, "auto" for `world()`, None for none."""
    if group is None or (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        return group
    if group == "auto":
        return world()
    raise InvalidInput(
        f"process_group cannot be {group!r}: allowed are 'auto' (all ranks, once torch.distributed is initialised), "
        "None (this rank decides alone) and a torch.distributed.ProcessGroup"
    )


def mesh_groups(tensors: Iterable[torch.Tensor]) -> list[torch.distributed.ProcessGroup]:
    """Return the groups, each once, over which the DTensors among `tensors` are distributed."""
    meshes = {id(mesh): mesh for tensor in tensors if (mesh := getattr(tensor, "device_mesh", None)) is not None}
    groups = {id(group): group for mesh in meshes.values() for group in mesh.get_all_groups()}
    return list(groups.values())


def agree_on_maximum_(value: torch.Tensor, group: Group) -> None:
    """Replace `value` by its maximum over the ranks of `group`, in place; every rank of the group must call this.

    `value` is a flag or a small vector of flags, 0 or larger, never NaN. Nothing waits for an accelerator.
    """
    _reduce_(value, torch.distributed.ReduceOp.MAX, group)


def sum_over_(counts: torch.Tensor, group: Group) -> None:
    """Replace integer `counts` by their sum over the ranks of `group`, in place; every rank of it must call this."""
    _reduce_(counts, torch.distributed.ReduceOp.SUM, group)


def gather(value: object, group: Group) -> list[Any]:
    """Return every rank's `value` (plain picklable data), in the order of ranks; every rank must call this."""
    if group is None or group.size() == 1:
        return [value]
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def require_same_precision(name: str, lines: Sequence[str]) -> None:
    """Raise Misuse, on all ranks, if one describes its precision by other lines; the n-th calls of all belong together.

    Ranks meet in the store by which they found each other, not in a collective: that would hang, or be taken for
    another one, if a rank never calls this. Here it is a warning after 30 s, and the end of all such comparisons.
    """
    if (whole := rendezvous_store()) is None:
        return
    from torch.distributed.distributed_c10d import PrefixStore  # no build without ranks has it

    store, own = PrefixStore("lowp", whole), "\n".join([str(rank()), name, *lines])
    try:
        if store.check(["given up"]):
            return
        here = PrefixStore(str(store.add(f"calls of rank {rank()}", 1)), store)
        first = here.compare_set("first", "", own).decode()
        if _lines(first) != list(lines):
            here.compare_set("other", "", own)
        if _lines(first) != list(lines) or here.add("equal", 1) == torch.distributed.get_world_size():
            here.set("is known", "")
    except RuntimeError:  # the store of torch's fake backend has no methods
        return
    try:
        here.wait(["is known"], timedelta(seconds=_PATIENCE))
    except RuntimeError:
        store.set("given up", "")
        warnings.warn(
            f"rank {rank()} has waited {_PATIENCE:g} s for other ranks to prepare a model: whether all ranks train in "
            "one precision is not compared",
            UserWarning,
            stacklevel=5,
        )
        return
    if here.check(["other"]):
        raise Misuse(_difference(first, here.get("other").decode()))


def _lines(text: str) -> list[str]:
    return text.split("\n")[2:]


def _difference(*texts: str) -> str:
    said = []
    for text, other in sorted(zip(texts, reversed(texts), strict=True), key=lambda pair: int(pair[0].split("\n")[0])):
        alone = [line.strip() for line in _lines(text) if line not in _lines(other)]
        at, name, *_ = text.split("\n")
        said.append(f"{name} with {alone[0] if alone else 'other rules'} on rank {at}")
    return (
        f"the ranks differ in precision: {' and '.join(said)}. Give all ranks the same precision, policy, loss scale, "
        "masters and seed"
    )


def own_device(kind: str) -> torch.device:
    """Return this rank's device of a type: for ``cuda``, the current device."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _reduce_(value: torch.Tensor, operation: torch.distributed.ReduceOp.RedOpType, group: Group) -> None:
    if group is None or group.size() == 1:
        return
    shared = value.to(_device_for(value, group))
    torch.distributed.all_reduce(shared, op=operation, group=group)
    if shared is not value:
        value.copy_(shared)


def _device_for(value: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.device:
    """Return a device on which the group can reduce: NCCL takes no CPU tensors, such as flags of offloaded ones."""
    configuration = torch.distributed.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    kinds = [torch.device(part.partition(":")[0]).type for part in configuration.split(",")]
    return value.device if value.device.type in kinds else own_device(kinds[0])
