"""DDP on two processes by mp.spawn; by torchrun if RANK is set."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def main(rank, world, file):
    dist.init_process_group("gloo", init_method=f"file://{file}" if file else "env://", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        x = torch.randn(16, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    all_weights = [torch.empty_like(weights) for _ in range(world)]
    dist.all_gather(all_weights, weights)
    assert all(torch.equal(one, weights) for one in all_weights)
    if rank == 0:
        print(f"loss {loss.item():.6f} sum {weights.sum().item():.6f}", flush=True)
    dist.destroy_process_group()
    # torch waits here for gloo's threads while it holds the interpreter's lock, which they want if they still drop a
    # tensor: give it to them first.
    time.sleep(0.2)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "")
    else:
        mp.spawn(main, (2, os.path.abspath("rendezvous")), 2)
