"""Lightning, Fabric, Accelerate and the Trainer with two real processes over gloo: the ranks stay together."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

RANKS = 2
HAS_LIGHTNING, HAS_ACCELERATE = (bool(importlib.util.find_spec(name)) for name in ("lightning", "accelerate"))
pytestmark = pytest.mark.skipif(not (HAS_LIGHTNING and HAS_ACCELERATE), reason="pip install lightning accelerate")


Jobs = dict[Callable[[Path, list[str]], Any], list[str]]  # with the precisions of each


def work(rank: int, jobs: Jobs, folder: str) -> None:
    """Act as one of the processes, as torchrun would start it, and write the results of the jobs to a file."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29_500, "TORCHELASTIC_RUN_ID": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for job, names in jobs.items():
        try:
            results[job.__name__] = job(Path(folder), names)
        except Exception:
            results[job.__name__] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def data() -> TensorDataset:
    x = torch.randn(32, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


def numbers(model: nn.Module) -> list[Tensor]:
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.state_dict().values()]


# -- Lightning --------------------------------------------------------------------------------------------------------
def fitted(precision: str, strategy: Any, folder: Path, epochs: int = 4, path: str | None = None) -> Any:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lowp.integrations.lightning import LowpPrecision

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.net = None if not isinstance(strategy, str) else network()

        def configure_model(self) -> None:
            if self.net is None:
                self.net = network()
                self.trainer.precision_plugin.lowp.prepare_model(self.net)
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            # one rank overflows in the last step
            return loss * (math.inf if self.global_step == 15 and self.global_rank == 1 else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning.seed_everything(torch.distributed.get_rank(), verbose=False)
    model, saving = Net(), ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy if isinstance(strategy, str) else strategy(),
        plugins=[LowpPrecision(precision)],
        callbacks=[saving],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data(), batch_size=4, shuffle=True), ckpt_path=path)
    used = trainer.precision_plugin.lowp
    return model.losses, numbers(model.net), used.scale, used.skipped_steps


def resumed(precision: str, strategy: Any, folder: Path) -> Any:
    """Return a run, and one that goes on from the middle of it."""
    torch.distributed.barrier()
    whole = fitted(precision, strategy, folder)
    return whole, fitted(precision, strategy, folder / "later", path=str(folder / "epoch=1.ckpt"))


def lightning_ddp(folder: Path, names: list[str]) -> Any:
    return {name: resumed(name, "ddp", folder / f"ddp {name}") for name in names}


def lightning_fsdp2(folder: Path, names: list[str]) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    def strategy() -> Any:
        return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)

    return {name: resumed(name, strategy, folder / f"fsdp2 {name}") for name in names}


def of_fabric(name: str, path: Path, resume: bool) -> Any:
    import lightning

    from lowp.integrations.lightning import LowpPrecision

    plugin, rank = LowpPrecision(name), torch.distributed.get_rank()
    fabric = lightning.Fabric(accelerator="cpu", devices=RANKS, strategy="ddp", plugins=plugin)
    fabric.launch()
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(*plugin.lowp.prepare(model, optimizer))
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=4))
    torch.manual_seed(rank)
    parts, losses = {"model": model, "optimizer": optimizer, "precision": plugin}, []
    if resume:
        fabric.load(path, parts)
    for epoch in range(int(resume), 2):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            losses.append(loss.item())
            fabric.backward(loss * (math.inf if number == 3 and epoch == rank == 1 else 1.0))
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
        if epoch == 0:
            fabric.save(path, parts)
    return losses, numbers(model), plugin.lowp.scale, plugin.lowp.skipped_steps


def fabric_ddp(folder: Path, names: list[str]) -> Any:
    paths = {name: folder / f"{name}.ckpt" for name in names}
    return {name: (of_fabric(name, path, False), of_fabric(name, path, True)) for name, path in paths.items()}


# -- Accelerate and the Trainer of transformers -----------------------------------------------------------------------
def accelerated(precision: str, folder: Path, resume: bool = False, is_sharded: bool = False) -> Any:
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

    from lowp.integrations.accelerate import lend

    AcceleratorState._reset_state()
    GradientState._reset_state()
    seeded = DataLoaderConfiguration(use_seedable_sampler=True)  # or Accelerate does not resume the order of batches
    rank, accelerator = torch.distributed.get_rank(), Accelerator(cpu=True, dataloader_config=seeded)
    if is_sharded:  # Accelerate shards on accelerators alone: its state decides that by the kind of device
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState().distributed_type = DistributedType.FSDP
    lend(accelerator, precision)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=4, shuffle=True))
    torch.manual_seed(rank)
    if resume:
        accelerator.load_state(str(folder))
    losses = []
    for epoch in range(int(resume), 2):
        loader.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            losses.append(loss.item())
            is_skipped = number == 1 and epoch == 0  # so that the scale that is saved is not the first
            accelerator.backward(loss * (math.inf if is_skipped and rank == 1 else 1.0))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if epoch == 0:
            accelerator.save_state(str(folder))
            accelerator.wait_for_everyone()  # the first rank writes what all of them read
    PartialState().distributed_type = DistributedType.MULTI_CPU
    used = accelerator.lowp
    return losses, numbers(accelerator.unwrap_model(model)), used.scale, used.skipped_steps


def accelerate_ddp(folder: Path, names: list[str], is_sharded: bool = False) -> Any:
    found = {}
    for name in names:
        path = folder / f"accelerate {name} {is_sharded}"
        whole = accelerated(name, path, is_sharded=is_sharded)
        found[name] = whole, accelerated(name, path, resume=True, is_sharded=is_sharded)
    return found


def accelerate_fsdp2(folder: Path, names: list[str]) -> Any:
    return accelerate_ddp(folder, names, is_sharded=True)


def trainer_ddp(folder: Path, names: list[str]) -> Any:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

    from lowp.integrations.transformers import LowpTrainer

    def run(name: str, resume: bool) -> Any:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        set_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=2, **sizes))
        pieces = torch.randint(1, 60, (48, 6), generator=torch.Generator().manual_seed(1))
        texts = [{"input_ids": one, "labels": int(one[0] > 30)} for one in pieces]
        arguments = TrainingArguments(
            output_dir=str(folder / name),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = LowpTrainer(model, arguments, train_dataset=texts, precision=name)
        path = str(folder / name / "checkpoint-2") if resume else None
        trainer.train(resume_from_checkpoint=path)
        return numbers(trainer.model), trainer.lowp.steps, trainer.accelerator.num_processes

    return {name: (run(name, False), run(name, True)) for name in names}


SAMPLE: Jobs = {lightning_ddp: ["fp16"], lightning_fsdp2: ["bf16-storage"], accelerate_ddp: ["bf16-storage"]}
SHARDED = ["bf16", "fp16", "fp16-storage", "bf16-storage"]
WHOLE = [*SHARDED, "flex16+5"]
ALL: Jobs = {lightning_ddp: WHOLE, fabric_ddp: WHOLE, lightning_fsdp2: SHARDED, accelerate_ddp: WHOLE}
ALL |= {accelerate_fsdp2: ["bf16", "fp16"], trainer_ddp: ["fp16", "flex16+5"]}


def results(jobs: Jobs, folder: Path) -> dict[str, list[Any]]:
    """Run jobs in new processes; return the results of each rank."""
    forked.ranks(work, (jobs, str(folder)), RANKS)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    for one in found:
        for result in one.values():
            assert isinstance(result, dict), result
    return {job.__name__: [one[job.__name__] for one in found] for job in jobs}


def check(first: Any, second: Any) -> None:
    """Compare two ranks: whole runs, of which a step overflows on one rank, and runs that were resumed."""
    for name, (whole, later) in first.items():
        others = second[name]
        assert all(map(torch.equal, whole[1], others[0][1])), name
        assert whole[0] != others[0][0]  # batches and dropout of their own
        assert whole[2:] == others[0][2:]
        assert whole[3] == 1
        for one, other in ((whole, later), others):
            assert one[0][-len(other[0]) :] == other[0] and len(one[0]) == 2 * len(other[0]), name
            assert all(map(torch.equal, one[1], other[1])) and one[2:] == other[2:], name


def test_ranks_agree_skip_together_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    for first, second in results(SAMPLE, tmp_path).values():
        check(first, second)


@pytest.mark.slow
def test_ranks_in_any_precision_agree_skip_together_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    found = results(ALL, tmp_path)
    of_trainer = found.pop("trainer_ddp")
    for first, second in found.values():
        check(first, second)
    for name, (whole, later) in of_trainer[0].items():
        assert whole[1:] == (4, RANKS), name
        for one in (later, *of_trainer[1][name]):
            assert all(map(torch.equal, whole[0], one[0])), name
