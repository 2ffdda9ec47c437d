"""Training that ends on some ranks and goes on on others: resharded checkpoints, a killed rank, ranks that differ."""

from __future__ import annotations

import json
import os
import signal
import sys
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
from torch.nn.parallel import DistributedDataParallel

import lowp


def _drawing(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that rounds weights and moments stochastically."""
    return lowp.optim.AdamW(parameters, lr=lr, split=False, masters="stochastic", moments="bf16")


# by name, a precision, its options and an optimizer: everything that stores parameters or masters
STORAGES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "fp16, torch": ("fp16", {"loss_scale": "dynamic(1024)"}, torch.optim.AdamW),
    "bf16-storage, fp32 masters": ("bf16-storage", {}, torch.optim.AdamW),
    "fp16-storage, fp32 masters": ("fp16-storage", {"loss_scale": "dynamic(1024)"}, torch.optim.AdamW),
    "bf16-storage, split": ("bf16-storage", {"masters": "split"}, lowp.optim.AdamW),
    "bf16-storage, none": ("bf16-storage", {"masters": "none"}, torch.optim.AdamW),
    "bf16-storage, drawn": ("bf16-storage", {"masters": "stochastic"}, _drawing),
    "lowp.optim, fp32": ("bf16", {}, lambda parameters, lr: lowp.optim.AdamW(parameters, lr=lr, storage=None)),
    "flex16+5": ("flex16+5", {}, torch.optim.AdamW),
}
WORLDS = (4, 2, 1, 4)
SAMPLE = ["bf16-storage, fp32 masters", "bf16-storage, drawn", "flex16+5"]
SURVIVORS, STEPS = ("fp16-storage", "flex16+5"), 6


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
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    losses = [_step(model, precision, optimizer, x) for _ in range(steps)]
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


def work(rank: int, number: int, count: int, folder: str, names: list[str], steps: int) -> None:
    """Act as one of the processes of a world: train in some storages."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own about its checkpoints
    store = torch.distributed.FileStore(f"{folder}/store {number}", count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = train(Path(folder), name, number, steps)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{number} {rank}.pt")
    torch.distributed.destroy_process_group()


def goes_on(folder: Path, names: list[str], worlds: tuple[int, ...]) -> None:
    """Train in worlds of which each loads what the one before has saved; compare losses with those of one process."""
    curves: dict[str, list[float]] = {name: [] for name in names}
    for number, count in enumerate(worlds):
        forked.ranks(work, (number, count, str(folder), names, 2), count)
        for rank in range(count):
            for name, result in torch.load(folder / f"{number} {rank}.pt").items():
                assert not isinstance(result, str), f"{name} on {count} ranks: {result}"
                assert result[1], f"{name}: {count} ranks have loaded something else"
                curves[name] += result[0] if rank == 0 else []
    alone = folder / "one"
    alone.mkdir()
    forked.ranks(work, (0, 1, str(alone), names, 2 * len(worlds)), 1)
    assert curves == {name: losses for name, (losses, _) in torch.load(alone / "0 0.pt").items()}


def test_a_checkpoint_is_loaded_by_fewer_and_by_more_ranks_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    goes_on(tmp_path, SAMPLE, (1, 2))


@pytest.mark.slow
def test_a_checkpoint_of_every_storage_is_resharded_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    goes_on(tmp_path, list(STORAGES), WORLDS)


# -- a rank is killed -------------------------------------------------------------------------------------------------
def survive(folder: Path, is_killed: bool = False) -> None:
    """Train in each precision, saving after each step, from the latest checkpoint; `is_killed`: rank 1, in step 3."""
    rank, runs = torch.distributed.get_rank(), []
    for name in SURVIVORS:
        torch.manual_seed(0)
        model, precision = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), lowp.Precision(name)
        precision.prepare_model(model)
        wrapped = DistributedDataParallel(model)
        optimizer = precision.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        parts, path = {"model": model, "optimizer": optimizer, "precision": precision}, folder / f"{name}.lowp"
        losses = lowp.load(path, **parts)["losses"] if path.exists() else []
        runs.append((path, wrapped, parts, losses))
    if is_killed and rank == 1:
        model[0].weight.register_hook(lambda _: _kill(folder) if len(losses) == 2 else None)
    for step in range(STEPS):
        x = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))[rank]
        for path, wrapped, parts, losses in runs:
            if len(losses) == step:
                losses.append(_step(wrapped, parts["precision"], parts["optimizer"], x))
                if rank == 0:
                    lowp.save(path, **parts, extra={"losses": losses})
                torch.distributed.barrier()
    if rank == 0:
        (folder / "curves.json").write_text(json.dumps([losses for *_, losses in runs]))


def _kill(folder: Path) -> None:
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _step(model: nn.Module, precision: Any, optimizer: Any, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    with precision.autocast():
        loss = model(x).float().square().mean()
    precision.backward(loss)
    precision.step(optimizer)
    return loss.item()


def survivor(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    survive(Path(folder))
    torch.distributed.destroy_process_group()


def test_a_run_of_which_torchrun_restarts_a_killed_rank_has_the_curve_of_one_that_was_not_killed(
    tmp_path: Path,
) -> None:
    (tmp_path / "whole").mkdir()
    forked.ranks(survivor, (str(tmp_path / "whole"),), 2)
    given = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", __file__, str(tmp_path)]
    # a store for each attempt: in a shared one ranks find the addresses of killed ones (pytorch issue 135712)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found = forked.run("-m", "torch.distributed.run", *given, environment=environment)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "killed").exists()  # torchrun names the rank that it sees first, also the one left alone
    assert (tmp_path / "curves.json").read_text() == (tmp_path / "whole" / "curves.json").read_text()


if __name__ == "__main__":  # as torchrun starts it
    torch.distributed.init_process_group("gloo")
    survive(Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    torch.distributed.destroy_process_group()
