"""Tensors sharded over ranks (DTensor): updates are element-wise, so each rank works on its local part."""

import gc
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp import distributed, kernels
from lowp.casts import Cast
from lowp.compat import part_of
from lowp.errors import InvalidInput
from lowp.kernels.tracing import is_sharded as is_sharded  # of this room, too


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 (fully_shard) gathers a module's parameters before its forward and backward pass."""
    return hasattr(module, "reshard") and hasattr(module, "unshard")


def holder_of(parameters: Iterable[Tensor]) -> str | None:
    """Return the kind of the wrapper that reduces or shards the gradients of any of these very tensors, or None.

    Nothing leads from a parameter, or from the module within a DistributedDataParallel, to the wrapper. So all objects
    are looked through, where there are ranks.
    """
    wanted = {id(one) for one in parameters}
    if not distributed.is_running() or _find_holder(wanted) is None:
        return None
    gc.collect()  # a wrapper that the script has dropped is part of a cycle
    return _find_holder(wanted)


def sharing(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the first tensor that has an element in common with another one before it, or None.

    Tensors that lie side by side in one allocation, as the weights of an LSTM on a GPU, share nothing.
    """
    allocations: defaultdict[tuple[int, torch.dtype], dict[int, Tensor]] = defaultdict(dict)
    for one in tensors:
        is_own = type(one).__torch_dispatch__ is Tensor.__torch_dispatch__  # neither sharded nor fake
        if is_own and one.layout is torch.strided and not one.is_meta and one.numel():
            if address := one.untyped_storage().data_ptr():  # 0: freed
                allocations[address, one.dtype].setdefault(id(one), one)
    for group in (list(each.values()) for each in allocations.values() if len(each) > 1):
        size = group[0].untyped_storage().nbytes() // group[0].element_size()
        taken = torch.zeros(size, dtype=torch.bool, device="cpu")
        for one in group:
            mine = taken.as_strided(one.shape, one.stride(), one.storage_offset())
            if mine.any():
                return one
            mine.fill_(True)
    return None


def _find_holder(wanted: set[int]) -> str | None:
    replicated = nn.parallel.DistributedDataParallel
    wrappers = replicated, getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", replicated)
    found = _living(wrappers)
    return next((type(one).__name__ for one in found if any(id(each) in wanted for each in one.parameters())), None)


def _living(classes: type | tuple[type, ...]) -> list[Any]:
    """Return all objects of these classes."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, classes)}  # faster than each by itself
    return [one for one in objects if type(one) in kinds]


def modules_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the modules that have any of these very tensors themselves, for which all objects are looked through."""
    wanted = {id(one) for one in parameters}
    own = [(one, one.__dict__.get("_parameters", {})) for one in (_living(nn.Module) if wanted else ())]
    return [one for one, held in own if any(id(each) in wanted for each in held.values())]


def is_split_twice(parameter: Tensor) -> bool:
    """Whether a sharded parameter is a shard of a shard: FSDP2's of a layer that tensor parallelism has split."""
    placements: Any = getattr(parameter, "placements", ())
    return len([one for one in placements if one.is_shard()]) > 1


def places_of(tensor: Tensor) -> int | Tensor:
    """Return where this rank's numbers stand in the whole, in row-major order.

    That is the place of the first where they are a range of it, as where FSDP2 splits the first dimension; otherwise,
    as in the layers of `RowwiseParallel`, the place of each, in a sorted tensor on the host.
    """
    if not is_sharded(tensor):
        return 0
    begins, sizes = part_of(tensor)
    if 0 in sizes:
        return 0
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.ndim)]
    first = sum(begin * step for begin, step in zip(begins, steps, strict=True))
    own_steps = (math.prod(sizes[axis + 1 :]) for axis in range(tensor.ndim))
    if all(size == 1 or own == step for size, own, step in zip(sizes, own_steps, steps, strict=True)):
        return first
    places = torch.tensor([first], device="cpu")
    for size, step in zip(sizes, steps, strict=True):
        places = (places[:, None] + torch.arange(size, device="cpu") * step).reshape(-1)
    return places


def quantize_at(x: Tensor, cast: str | Cast, seed: int | Tensor, places: int | Tensor) -> Tensor:
    """Cast a rank's numbers, which stand at `places` of what shares a seed; as the whole, they take part in its draws.

    Numbers that are no range are cast among zeros that stand for those between.
    """
    if isinstance(places, int):
        return kernels.quantize(x, cast, seed=seed, offset=places)  # type: ignore[no-any-return]
    first, last = int(places[0]), int(places[-1])
    among, at = x.new_zeros(last + 1 - first), (places - first).to(x.device)
    among[at] = x.reshape(-1)
    return kernels.quantize(among, cast, seed=seed, offset=first)[at].view(x.shape)  # type: ignore[no-any-return]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, sharing its memory; a plain tensor itself."""
    if not hasattr(tensor, "device_mesh"):  # as `is_sharded`, in no function
        return tensor
    return cast(Tensor, cast(Any, tensor).detach().to_local())


def local_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's parts of what is kept of a parameter."""
    return {name: local(value) for name, value in state.items()}


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


def is_zero(optimizer: object) -> bool:
    """Whether an optimizer is torch's ZeroRedundancyOptimizer, which distributes the parameters over the ranks."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def refuse_to_convert(storage: str) -> None:
    """Raise InvalidInput if a ZeroRedundancyOptimizer is constructing an optimizer that converts its parameters.

    Each rank would convert only its own share, and the ranks would then send each other tensors of different sizes.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    frame: Any = sys._getframe(1)
    for _ in range(12):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return
        if is_zero(frame.f_locals.get("self")):
            raise InvalidInput(
                f"ZeroRedundancyOptimizer gives each rank a share of the parameters, which this rank alone would "
                f"convert to {storage}: convert the whole model on every rank first, "
                "lowp.Precision('bf16-storage').prepare_model(model), or give storage=None"
            )


def refuse_shards(cast: Cast, parameters: Iterable[Tensor]) -> None:
    """Raise InvalidInput if a parameter is sharded over ranks."""
    if any(is_sharded(parameter) for parameter in parameters):
        raise InvalidInput(
            "a parameter that is sharded over ranks (a DTensor, by FSDP2 or tensor parallelism) cannot be stored in "
            f"{cast}: an exponent belongs to the whole tensor. Call precision.prepare_model(model) before "
            "fully_shard(model), or use DistributedDataParallel; for tensor parallelism use dfp16, or another "
            "precision whose exponents are not predicted"
        )
