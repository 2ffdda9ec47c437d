"""FSDP2: weights, gradients and masters sharded by fully_shard, in bf16 with fp32 masters.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowp

dist.init_process_group("gloo")  # "nccl" on GPUs, and "cuda" below
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
x = torch.randn(1024, 20)
y = x[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

precision = lowp.Precision("bf16-storage")
precision.prepare_model(model)  # before it is sharded
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = precision.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

for epoch in range(4):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    for batch in order[rank::world].split(32):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        precision.backward(loss)
        precision.step(optimizer)

with torch.no_grad(), precision.autocast():
    accuracy = (model(x).argmax(1) == y).float().mean()
mine = sum(one.to_local().numel() for one in model.parameters())
if rank == 0:
    whole = sum(one.numel() for one in model.parameters())
    print(f"{world} ranks, {mine} of {whole} weights on the first, accuracy {accuracy:.3f}")
dist.destroy_process_group()
