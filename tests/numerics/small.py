"""A small model and its training for the tests of the profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import lowp
from lowp.numerics.record import Record


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        y = torch.randint(4, (8,), generator=generator)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def recorded(steps: int) -> Record:
    """Return the record of the model's training with SGD, with every scheduled step recorded."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, steps)
    return profile.record
