"""A small model for the tests of regions, and its comparisons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRECISIONS = ("fp16", "bf16-trunc", "e4m3fn")


class Net(nn.Module):
    """Two linear layers, a norm and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x)))).softmax(-1)


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.float().pow(2).sum(), list(model.parameters())))


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
