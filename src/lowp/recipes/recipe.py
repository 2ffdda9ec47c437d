"""The type of recipes: a network, its data, loss and optimizer, in plain torch, without the precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowp.errors import UnknownName, unknown

__all__ = [
    "Data",
    "Examples",
    "Metric",
    "Recipe",
    "Size",
    "TensorExamples",
    "adam",
    "constant",
    "examples_of",
    "first_tensor",
    "linear_decay",
    "one_cycle",
    "sgd_with_momentum",
    "step_decay",
    "tokens_of",
]


class Examples(Protocol):
    """A set of examples that returns any selection of them as a batch."""

    def __len__(self) -> int:
        """The number of examples."""

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> Any:
        """Return the examples at `indices` (int64, 1-d) as a tensor, or a tuple, list or dict of them, on the CPU.

        Augmentation draws from `generator`, which is the same in every precision; without one there is none.
        """


class TensorExamples:
    """Examples as the rows of tensors of equal length."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the rows at `indices` of each tensor."""
        return tuple(tensor[indices] for tensor in self.tensors)


@dataclass(frozen=True)
class Data:
    """Training and validation examples; `description` states their content and source."""

    training: Examples
    validation: Examples
    description: str


@dataclass(frozen=True)
class Size:
    """One size of a recipe; a user can change `epochs`, `batch` (examples per step) and `learning_rate`.

    `parameters`: the number of the model's parameters. `options`: for the recipe itself (widths, image sizes …).
    `schedule`: replaces the recipe's if a run of few steps needs another one to end equally from every seed.
    """

    epochs: int
    batch: int
    learning_rate: float
    parameters: int
    options: Mapping[str, Any] = field(default_factory=dict)
    schedule: Callable[[torch.optim.Optimizer, float], None] | None = None


@dataclass(frozen=True)
class Metric:
    """The metric of the verdict. `share`: a share of the validation examples (0 to 1), printed in percent."""

    name: str
    higher_is_better: bool = True
    share: bool = True

    def resolution(self, examples: int) -> float:
        """Return the smallest difference that the validation set can show: one example for a share, otherwise 0."""
        return 1 / examples if self.share and examples else 0.0

    def worse_by(self, value: float, than: float) -> float:
        """Return how much worse `value` is than `than`; negative if it is better."""
        return than - value if self.higher_is_better else value - than


def first_tensor(batch: Any) -> Tensor:
    """Return the first tensor of a batch, in any nesting of tuples, lists and dictionaries."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return batch


def examples_of(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor."""
    return len(first_tensor(batch))


def tokens_of(batch: Any) -> int:
    """Return the number of positions in a batch's first tensor [N, length], including padding."""
    return first_tensor(batch).numel()


@dataclass(frozen=True)
class Recipe:
    """A network of the literature with everything for its training, as functions of a `Size`.

    `load(size, path)` gives the data, from the user's `path` where one is given. `loss(model, batch)` runs the model
    and is called inside the precision's region. `evaluate(model, batches)` returns numbers by name, over the whole
    validation set, ``loss`` and the metric's among them; the model is in eval mode, inside the region, without grad.
    `schedule(optimizer, progress)` is called before each step with the share of the training that is done (0 to below
    1) and sets the learning rate. Gradients are clipped to the norm `clip` where it is given. `threads`, where given,
    is the number of CPU threads that suits a step of it best: small steps are fastest on one. Throughput is counted in
    `unit`, of which `units(batch)` tells how many a batch has.
    """

    name: str
    summary: str
    source: str
    data: str
    sizes: Mapping[str, Size]
    metric: Metric
    load: Callable[[Size, Path | None], Data]
    make_model: Callable[[Size], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module, Iterable[Any]], dict[str, float]]
    make_optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer, float], None]
    default_size: str = "cpu"
    clip: float | None = None
    threads: int | None = None
    unit: str = "examples"
    units: Callable[[Any], int] = examples_of

    def size(self, name: str | None = None) -> Size:
        """One of the sizes by name, or the default one; raises UnknownName with the allowed ones."""
        chosen = self.default_size if name is None else name
        if chosen not in self.sizes:
            raise UnknownName(unknown(f"size of {self.name}", chosen, self.sizes))
        return self.sizes[chosen]


# -- optimizers -------------------------------------------------------------------------------------------------------
def adam(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Adam with torch's defaults; on CUDA torch's fused one."""
    return torch.optim.Adam(model.parameters(), lr=learning_rate, fused=_is_fused(model))


def adamw_where(
    decays: Callable[[str, nn.Parameter], bool],
    model: nn.Module,
    learning_rate: float,
    *,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """AdamW with weight decay for the parameters of which `decays(name, parameter)` holds, and none for the others.

    On CUDA it is torch's fused one.
    """
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if decays(name, one) == chosen], "weight_decay": decay}
        for chosen, decay in ((True, weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=_is_fused(model))


def sgd_with_momentum(
    model: nn.Module, learning_rate: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Return SGD with momentum, and with weight decay if given."""
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


def _is_fused(model: nn.Module) -> bool | None:
    """Whether torch's fused kernel takes the step: on CUDA, where it is the fastest and skips without a host read.

    SGD is left to torch's choice: if the first step with momentum is skipped, the fused one uses a momentum that was
    never written.
    """
    parameters = list(model.parameters())
    return True if parameters and all(one.is_cuda for one in parameters) else None


# -- schedules --------------------------------------------------------------------------------------------------------
def constant(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Keep the learning rate constant."""


def linear_decay(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """From the learning rate down to zero in a straight line."""
    _scale_learning_rate(optimizer, 1 - progress)


def one_cycle(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Up from 1/25 in 30 % of the steps and down to nearly zero, both along a cosine (Smith 2018, arXiv 1708.07120)."""
    if progress < 0.3:
        factor = _cosine(1 / 25, 1.0, progress / 0.3)
    else:
        factor = _cosine(1.0, 1 / 25e4, (progress - 0.3) / 0.7)
    _scale_learning_rate(optimizer, factor)


def step_decay(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """A tenth of the learning rate after half of the steps, a hundredth after three quarters (arXiv 1512.03385)."""
    _scale_learning_rate(optimizer, 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01)


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def _scale_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's rate to a share of the one that it began with, which the group remembers across checkpoints."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
