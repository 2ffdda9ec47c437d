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


def work(rank: int, jobs: dict[str, Callable[[Path], Any]], folder: str) -> None:
    """Act as one of the processes, as torchrun would start it, and write the results of the jobs to a file."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29_500, "TORCHELASTIC_RUN_ID": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job(Path(folder))
        except Exception:
            results[name] = traceback.format_exc()
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


def lightning_ddp(folder: Path) -> Any:
    return {name: resumed(name, "ddp", folder / f"ddp {name}") for name in ("fp16", "bf16-storage")}


def lightning_fsdp2(folder: Path) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    def strategy() -> Any:
        return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)

    return {name: resumed(name, strategy, folder / f"fsdp2 {name}") for name in ("fp16", "bf16-storage")}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., Any]], list[Any]]:
    """Run all jobs once, and return the results of each rank."""
    folder, jobs = tmp_path_factory.mktemp("ranks"), (lightning_ddp, lightning_fsdp2)
    forked.ranks(work, ({job.__name__: job for job in jobs}, str(folder)), RANKS)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    return lambda job: [one[job.__name__] for one in found]


@pytest.mark.parametrize("job", [lightning_ddp, lightning_fsdp2])
def test_ranks_agree_skip_together_and_resume_with_the_same_bits(result: Any, job: Any) -> None:
    first, second = result(job)
    assert isinstance(first, dict) and isinstance(second, dict), f"{first}\n{second}"
    for name, (whole, later) in first.items():
        others = second[name]
        assert all(map(torch.equal, whole[1], others[0][1])), name
        assert whole[0] != others[0][0]  # batches and dropout of their own
        assert whole[2:] == others[0][2:]
        assert whole[3] == 1
        for one, other in ((whole, later), others):
            assert len(other[0]) == 8 and one[0][8:] == other[0], name
            assert all(map(torch.equal, one[1], other[1])), name
