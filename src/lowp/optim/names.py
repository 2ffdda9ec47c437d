"""The names of an optimizer's parameters, under which observers are told of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lowp.ops.observing import Watch, everywhere, step


def given_names(optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the names that an optimizer was given, as by `AdamW(model.named_parameters())`; empty without."""
    names: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    return names


class ParameterNames:
    """What the parameters of an optimizer are called.

    The name that the optimizer was given, as by `AdamW(model.named_parameters())`; else that of the last model that
    holds the parameter and was told of; else ``parameter 3``, its place among all parameters.
    """

    def __init__(self) -> None:
        self._in_models: dict[Tensor, str] = {}

    def add(self, model: nn.Module) -> None:
        """Take over the names that a model has for its parameters."""
        self._in_models.update({one: name for name, one in model.named_parameters()})

    def of(self, parameter: Tensor, optimizer: Optimizer) -> str:
        """Return the name of a parameter of an optimizer."""
        name = given_names(optimizer).get(parameter) or self._in_models.get(parameter)
        if name is None:
            every = (one for group in optimizer.param_groups for one in group["params"])
            name = next((f"parameter {number}" for number, one in enumerate(every) if one is parameter), "")
        return name

    def watches(self, parameters: Iterable[Tensor], optimizer: Optimizer) -> dict[Tensor, Watch]:
        """Return what tells observers of the step of each parameter; empty where nobody observes."""
        if not everywhere:
            return {}
        found = {parameter: step(self.of(parameter, optimizer)) for parameter in parameters}
        return {parameter: watch for parameter, watch in found.items() if watch is not None}
