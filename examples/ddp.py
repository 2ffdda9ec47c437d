"""DistributedDataParallel with parameters stored in bf16, and a checkpoint that resumes with the same bits.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --resume
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowp

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(1024, 20)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))

precision = lowp.Precision("bf16-storage")
precision.prepare_model(model)  # before it is wrapped
parallel = DistributedDataParallel(model)
optimizer = precision.prepare_optimizer(torch.optim.AdamW(parallel.parameters(), lr=1e-2))

run = {"model": model, "optimizer": optimizer, "precision": precision}
first, path = 0, Path("ddp.pt")
if "--resume" in sys.argv:
    first = lowp.load(path, **run)["epoch"] + 1
for epoch in range(first, 4):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for batch in order[rank::world].split(32):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(parallel(x[batch]), y[batch])
        precision.backward(loss)
        precision.step(optimizer)  # on all ranks, or on none
    if rank == 0:
        lowp.save(path, **run, extra={"epoch": epoch})

with torch.no_grad(), precision.autocast():
    accuracy = (model(x).argmax(1) == y).float().mean()
if rank == 0:
    print(f"{world} ranks, weights in {model[0].weight.dtype}, accuracy {accuracy:.3f}")
del parallel  # before its group: as the last to hold that, it may wait for the threads of gloo for ever (torch 2.13)
dist.destroy_process_group()
