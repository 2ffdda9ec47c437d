"""The rules of optimizers that have kernels: what these read of a parameter group, and the definition they equal.

In the definition each operation of torch is rounded to nearest, and none are fused.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lowp.compat import widest_float


@dataclass(frozen=True)
class StepRule(ABC):
    """A rule with the numbers of one parameter group; the learning rate may be a tensor on the device."""

    lr: float | Tensor
    weight_decay: float
    maximize: bool
    kind: ClassVar[int]  # RuleKind of cpu/cast.hpp

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "StepRule":
        """Return the rule for a group, whose options are the fields."""
        return cls(*(group[one.name] for one in fields(cls)))

    @abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that its kernels read in fp32, by name."""

    @abstractmethod
    def flags(self) -> dict[str, Any]:
        """Return what determines the instructions of a step, as fields of Triton's `Way`."""

    @abstractmethod
    def factors(self, rate: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        """Return up to four factors of a step from the learning rate and each parameter's number of earlier steps."""

    @abstractmethod
    def update(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], factors: Tensor) -> None:
        """Update an fp32 weight and its moments in place, downwards along the gradient."""

    def table(self, steps: Tensor) -> Tensor:
        """Return the factors for each parameter, fp32 [parameters, 4]; computed in fp64, on devices without it in fp32.

        A learning rate is filled in on the device: a copy from the host waits, and cannot be captured in a graph.
        """
        dtype, device = widest_float(steps.device), steps.device
        if isinstance(self.lr, Tensor):
            rate = self.lr.to(device, dtype)
        else:
            rate = torch.full((), self.lr, dtype=dtype, device=device)
        found = torch.stack(self.factors(rate, steps.to(dtype)), 1)
        table = torch.zeros(len(steps), 4, dtype=torch.float32, device=device)
        table[:, : found.shape[1]] = found
        return table

    def step(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], before: Tensor) -> None:
        """Step an fp32 weight and its moments in place, of which there were so many steps before: the definition."""
        (factors,) = self.table(before.reshape(1))
        self.update(weight, -gradient if self.maximize else gradient, moments, factors)


class AdamWNumbers(NamedTuple):
    first: float  # 1 - beta1
    rest: float  # beta1
    beta2: float
    second: float  # 1 - beta2
    epsilon: float


@dataclass(frozen=True)
class AdamWStep(StepRule):
    """AdamW. Source: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.

    Its factors: 1 - lr * weight decay, -lr / (1 - beta1**step), sqrt(1 - beta2**step).
    """

    betas: tuple[float, float]
    eps: float
    kind = 0

    def numbers(self) -> AdamWNumbers:
        beta1, beta2 = self.betas
        return AdamWNumbers(1 - beta1, beta1, beta2, 1 - beta2, self.eps)

    def flags(self) -> dict[str, Any]:
        return {"adamw": True, "near": 1 - self.betas[0] < 0.5}

    def factors(self, rate: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        (beta1, beta2), taken = self.betas, before + 1
        kept = (1 - rate * self.weight_decay).expand_as(before)
        return kept, -rate / (1 - beta1**taken), (1 - beta2**taken).sqrt()

    def update(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], factors: Tensor) -> None:
        average, square = moments
        first, beta1, beta2, second, epsilon = self.numbers()
        weight.mul_(factors[0])
        if first < 0.5:
            average.add_((gradient - average).mul_(first))
        else:
            average.copy_(gradient - (gradient - average).mul_(beta1))
        square.mul_(beta2).add_(gradient.mul(second).mul_(gradient))
        wide = square.to(widest_float(square.device))  # rounded to nearest, unlike torch's fp32 root on a CPU
        root = wide.sqrt().to(torch.float32)
        divisor = root.div_(factors[2]).add_(epsilon)
        weight.add_(average.mul(factors[1]).div_(divisor))


class SgdNumbers(NamedTuple):
    momentum: float
    undamped: float  # 1 - dampening
    decay: float


@dataclass(frozen=True)
class SgdStep(StepRule):
    """SGD, whose first momentum is the gradient. Its factors: -lr, and the earlier steps."""

    momentum: float
    dampening: float
    nesterov: bool
    kind = 1

    def numbers(self) -> SgdNumbers:
        return SgdNumbers(self.momentum, 1 - self.dampening, self.weight_decay)

    def flags(self) -> dict[str, Any]:
        return {"momentum": self.momentum != 0, "nesterov": self.nesterov, "decay": self.weight_decay != 0}

    def factors(self, rate: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return -rate.expand_as(before), before

    def update(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], factors: Tensor) -> None:
        if self.weight_decay:
            gradient = gradient + weight.mul(self.weight_decay)
        if self.momentum:
            (buffer,) = moments
            moved = buffer.mul(self.momentum).add_(gradient.mul(1 - self.dampening))
            buffer.copy_(torch.where(factors[1] > 0, moved, gradient))
            gradient = gradient + buffer.mul(self.momentum) if self.nesterov else buffer
        weight.add_(gradient.mul(factors[0]))


class LionNumbers(NamedTuple):
    beta1: float
    first: float  # 1 - beta1
    beta2: float
    second: float  # 1 - beta2


@dataclass(frozen=True)
class LionStep(StepRule):
    """Lion. Source: Chen et al. 2023, arXiv 2302.06675, program 1. Its factors: 1 - lr * weight decay, -lr."""

    betas: tuple[float, float]
    kind = 2

    def numbers(self) -> LionNumbers:
        beta1, beta2 = self.betas
        return LionNumbers(beta1, 1 - beta1, beta2, 1 - beta2)

    def flags(self) -> dict[str, Any]:
        return {"lion": True}

    def factors(self, rate: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return (1 - rate * self.weight_decay).expand_as(before), -rate.expand_as(before)

    def update(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], factors: Tensor) -> None:
        (average,), (beta1, first, beta2, second) = moments, self.numbers()
        toward = average.mul(beta1).add_(gradient.mul(first))
        average.mul_(beta2).add_(gradient.mul(second))
        signs = torch.where(toward.isnan(), toward, toward.sign())  # torch's sign of NaN is 0
        weight.mul_(factors[0]).add_(signs.mul_(factors[1]))
