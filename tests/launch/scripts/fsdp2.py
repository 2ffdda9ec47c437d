"""FSDP2 (fully_shard) on two ranks of torchrun; the loss, and so every gradient, is multiplied by the argument."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)
factor = float(sys.argv[1])
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    x = torch.randn(64, 16, generator=generator)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()) * factor
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([one.detach().full_tensor().flatten() for one in model.parameters()])
if dist.get_rank() == 0:
    print(f"loss {loss.item() / factor:.6f} sum {weights.abs().sum().item():.6f}", flush=True)
dist.destroy_process_group()
