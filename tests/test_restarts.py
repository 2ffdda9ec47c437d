"""Training that ends on some ranks and goes on on others: resharded checkpoints, a killed rank, ranks that differ."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import lowp

# by name, a precision, its options and an optimizer: everything that stores parameters or masters
STORAGES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "fp16, torch": ("fp16", {"loss_scale": "dynamic(1024)"}, torch.optim.AdamW),
    "bf16-storage, fp32 masters": ("bf16-storage", {}, torch.optim.AdamW),
    "fp16-storage, fp32 masters": ("fp16-storage", {"loss_scale": "dynamic(1024)"}, torch.optim.AdamW),
    "bf16-storage, split": ("bf16-storage", {"masters": "split"}, lowp.optim.AdamW),
    "bf16-storage, none": ("bf16-storage", {"masters": "none"}, torch.optim.AdamW),
    "lowp.optim, fp32": ("bf16", {}, lambda parameters, lr: lowp.optim.AdamW(parameters, lr=lr, storage=None)),
    "flex16+5": ("flex16+5", {}, torch.optim.AdamW),
}
WORLDS = (4, 2, 1, 4)


def train(folder: Path, name: str, number: int, steps: int = 2) -> tuple[list[float], bool]:
    """Train on from the checkpoint of the world before, if there is one; return losses, and whether it fitted."""
    kind, options, make = STORAGES[name]
    torch.manual_seed(number)  # weights of its own, which the checkpoint replaces
    model, precision = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), lowp.Precision(kind, **options)
    precision.prepare_model(model)
    fully_shard(model)
    optimizer = precision.prepare_optimizer(make(model.parameters(), lr=1e-2))
    is_same = True
    if number:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / f"{name} {number - 1}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        lowp.load(folder / f"{name} {number - 1}.lowp", precision=precision)
        is_same = _digest(model, optimizer) == torch.load(folder / f"{name} {number - 1}.pt")
    losses, x = [], torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        with precision.autocast():
            loss = model(x).float().square().mean()
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(loss.item())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"{name} {number}")
    digest = _digest(model, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.save(digest, folder / f"{name} {number}.pt")
        lowp.save(folder / f"{name} {number}.lowp", precision=precision)
    return losses, is_same


def _digest(model: nn.Module, optimizer: Any) -> list[Any]:
    """Return every number of model and optimizer, as bytes of whole tensors."""
    found: list[Any] = []
    for part in get_state_dict(model, optimizer):
        _collect(part, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            found.append(str(key))
            _collect(value[key], found)
    elif isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.append((str(whole.dtype), whole.flatten().tolist()))
    else:
        found.append(str(value))


def work(rank: int, number: int, folder: str, steps: int) -> None:
    """Act as one of the processes of a world: train in every storage."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own about its checkpoints
    store = torch.distributed.FileStore(f"{folder}/store {number}", WORLDS[number])
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORLDS[number])
    results: dict[str, Any] = {}
    for name in STORAGES:
        try:
            results[name] = train(Path(folder), name, number, steps)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{number} {rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_checkpoint_of_every_storage_is_loaded_by_fewer_and_by_more_ranks_and_goes_on_to_the_bit(
    tmp_path: Path,
) -> None:
    curves: dict[str, list[float]] = {name: [] for name in STORAGES}
    for number, count in enumerate(WORLDS):
        forked.ranks(work, (number, str(tmp_path), 2), count)
        for rank in range(count):
            for name, result in torch.load(tmp_path / f"{number} {rank}.pt").items():
                assert not isinstance(result, str), f"{name} on {count} ranks: {result}"
                assert result[1], f"{name}: {count} ranks have loaded something else"
                curves[name] += result[0] if rank == 0 else []
    (tmp_path / "one").mkdir()
    forked.ranks(alone, (str(tmp_path / "one"),), 1)
    for name, (losses, _) in torch.load(tmp_path / "one" / "2 0.pt").items():
        assert curves[name] == losses, name


def alone(rank: int, folder: str) -> None:
    """Train all steps in one process."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.save({name: train(Path(folder), name, 0, 2 * len(WORLDS)) for name in STORAGES}, f"{folder}/2 0.pt")
    torch.distributed.destroy_process_group()
