"""Copies and training steps for the tests of optimizers and of whole precisions."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lowp


def _through_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": _through_torch,
}


def step_on_drawn_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take one step of the optimizer on gradients drawn from the seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def train_step(precision: lowp.Precision, model: nn.Module, optimizer: Any, x: Tensor) -> float:
    """Take a step of classifying x [N, 3 or more] by the largest of its first three values; return the loss."""
    optimizer.zero_grad()
    with precision.autocast():
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    precision.backward(loss)
    precision.step(optimizer)
    return float(loss.detach())
