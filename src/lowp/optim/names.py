"""The names of an optimizer's parameters, for observers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from lowp.ops.observing import Watch, everywhere, step


def given_names(optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the names that an optimizer was given, as by `AdamW(model.named_parameters())`; empty if it has none."""
    names: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    return names


class ParameterNames:
    """The names of an optimizer's parameters.

    The first of these that exists: the name given to the optimizer, as by `AdamW(model.named_parameters())`; the name
    in the last model passed to `add`; ``parameter 3``, its position among all parameters.
    """

    def __init__(self) -> None:
        self._in_models: dict[Tensor, str] = {}

    def add(self, model: nn.Module) -> None:
        """Record the names that a model has for its parameters."""
        self._in_models.update({one: name for name, one in model.named_parameters()})

    def of(self, parameter: Tensor, optimizer: Optimizer) -> str:
        """Return the name of a parameter of an optimizer."""
        name = given_names(optimizer).get(parameter) or self._in_models.get(parameter)
        if name is None:
            every = (one for group in optimizer.param_groups for one in group["params"])
            name = next((f"parameter {number}" for number, one in enumerate(every) if one is parameter), "")
        return name

    def watches(self, parameters: Iterable[Tensor], optimizer: Optimizer) -> dict[Tensor, Watch]:
        """Return the observers' callback for the step of each parameter; empty if there are no observers."""
        if not everywhere:
            return {}
        found = {parameter: step(self.of(parameter, optimizer)) for parameter in parameters}
        return {parameter: watch for parameter, watch in found.items() if watch is not None}
