"""Models, optimizers and gradients of the scaler's tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.step import GradScaler

INF, NAN = math.inf, math.nan
SYNCS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")


class CountReads(TorchDispatchMode):
    """Counts the calls that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func.overloadpacket.__name__ in SYNCS
        return func(*args, **(kwargs or {}))


class OwnOptimizer(torch.optim.SGD):
    """An optimizer that unscales and skips by itself, like lowp's."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
                stepped = parameter.detach() - group["lr"] * gradient
                parameter.data.copy_(torch.where(self.found_inf > 0, parameter.detach(), stepped))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.5, foreach=True),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True),
    "own": lambda parameters: OwnOptimizer(parameters, lr=0.5),
}
UNREAD = ("fused", "own")


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def batches(count: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def one_parameter(gradient: Any, optimizer: str = "plain", dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """Return an optimizer over one parameter of ones with this gradient."""
    values = gradient if isinstance(gradient, torch.Tensor) else torch.tensor(gradient, dtype=dtype)
    parameter = nn.Parameter(torch.ones(values.shape, dtype=values.dtype))
    parameter.grad = values
    return OPTIMIZERS[optimizer]([parameter])


def parameter_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter


def started(**keywords: Any) -> GradScaler:
    """Return a scaler on the CPU that has scaled a loss."""
    scaler = GradScaler("cpu", **keywords)
    scaler.scale(torch.ones(()))
    return scaler
