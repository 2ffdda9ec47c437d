"""The class of recipes: a network, its data, loss and optimizer in plain PyTorch, without a precision."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowp.errors import check_name
from lowp.nested import tensors_of


class Examples(Protocol):
    """A set of examples that returns any selection of them as a batch."""

    def __len__(self) -> int:
        """The number of examples."""

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> Any:
        """Return the examples at `indices` (int64, 1-d) as a tensor, or a tuple, list or dict of them, on the CPU.

        With a `generator`, examples are augmented at random; it is seeded alike in every precision.
        """


class TensorExamples:
    """Examples as the rows of tensors of equal length: a batch is a tuple, or a dictionary of named tensors."""

    def __init__(self, *tensors: Tensor, **named: Tensor) -> None:
        self.tensors, self.named = tensors, named

    def __len__(self) -> int:
        return len(first_tensor(self.named or self.tensors))

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> Any:
        """Return the rows at `indices` of each tensor."""
        if self.named:
            return {name: tensor[indices] for name, tensor in self.named.items()}
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
    return tensors_of(batch)[0]


def examples_of(batch: Any) -> int:
    """Return the number of examples in a batch: the length of its first tensor."""
    return len(first_tensor(batch))


def tokens_of(batch: Any) -> int:
    """Return the number of positions in a batch's first tensor [N, length], including padding."""
    return first_tensor(batch).numel()


@dataclass(frozen=True)
class Recipe:
    """A network of the literature and its training, as functions of a `Size`.

    * `load(size, path)` returns the data, read from `path` if it is not None.
    * `loss(model, batch)` runs the model and returns the loss; it is called inside the precision's region.
    * `evaluate(model, batches)` returns metrics by name over the whole validation set, including ``loss`` and that of
      `metric`; the model is in eval mode, inside the region, and gradients are disabled.
    * `schedule(optimizer, progress)` sets the learning rate; it is called before each step with the completed share of
      the training, 0 to below 1.
    * `clip`: the norm to which gradients are clipped, or None.
    * `threads`: the number of CPU threads with which a step is fastest, or None for torch's; small steps need one.
    * `classes`: the dimension of the model's result along which scores of classes lie, None without.
    * `unit` and `units(batch)`: the unit of throughput, and the number of units in a batch.
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
    classes: int | None = -1

    def size(self, name: str | None = None) -> Size:
        """Return a size by name, or the default size; raise UnknownName for other names."""
        size_name = self.default_size if name is None else name
        check_name(f"size of {self.name}", size_name, self.sizes)
        return self.sizes[size_name]


def built(network: Callable[..., nn.Module], *options: str) -> Callable[[Size], nn.Module]:
    """Return a `make_model` that calls `network` with these options of the size, in this order."""
    return partial(_built, network, options)


def _built(network: Callable[..., nn.Module], options: Sequence[str], size: Size) -> nn.Module:
    return network(*(size.options[name] for name in options))


# -- optimizers -------------------------------------------------------------------------------------------------------
def adam(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Return Adam with torch's defaults, fused on CUDA."""
    return torch.optim.Adam(model.parameters(), lr=learning_rate, fused=_is_fused(model))


def adamw_where(
    decays: Callable[[str, nn.Parameter], bool],
    model: nn.Module,
    learning_rate: float,
    *,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for the parameters for which `decays(name, parameter)` is true, fused on CUDA."""
    named = list(model.named_parameters())
    groups = [
        {
            "params": [parameter for name, parameter in named if decays(name, parameter) == has_decay],
            "weight_decay": decay,
        }
        for has_decay, decay in ((True, weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=_is_fused(model))


def sgd_with_momentum(
    model: nn.Module, learning_rate: float, momentum: float = 0.9, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Return SGD with momentum and, if given, weight decay."""
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


def _is_fused(model: nn.Module) -> bool | None:
    """Return True if all parameters are on CUDA, where torch's fused kernel is the fastest, otherwise None.

    The fused kernel skips a step without a read on the host. It is not used for SGD: if the first step with momentum is
    skipped, it reads a momentum that was never written.
    """
    parameters = list(model.parameters())
    return True if parameters and all(parameter.is_cuda for parameter in parameters) else None


# -- schedules --------------------------------------------------------------------------------------------------------
def constant(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Keep the learning rate constant."""


def linear_decay(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Decrease the learning rate linearly to zero."""
    _scale_learning_rate(optimizer, 1 - progress)


def one_cycle(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Increase the learning rate from 1/25 of it in 30 % of the steps, then decrease it to 1/250,000.

    Both follow a cosine (Smith and Topin 2018, arXiv 1708.07120).
    """
    if progress < 0.3:
        factor = _cosine(1 / 25, 1.0, progress / 0.3)
    else:
        factor = _cosine(1.0, 1 / 25e4, (progress - 0.3) / 0.7)
    _scale_learning_rate(optimizer, factor)


def step_decay(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Divide the learning rate by 10 after half of the steps, and by 100 after three quarters (arXiv 1512.03385)."""
    _scale_learning_rate(optimizer, 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01)


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def _scale_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to `factor` times the initial one, which is saved in the group (initial_lr)."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
