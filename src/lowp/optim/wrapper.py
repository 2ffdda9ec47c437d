"""An optimizer around another one: the common base of MasterWeights and FlexWeights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor


class Wrapper(torch.optim.Optimizer):
    """An optimizer whose parameter groups, defaults and state are those of `inner`. A subclass implements `step`.

    Raises TypeError for anything other than a torch optimizer.
    """

    inner: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(self).__name__} wraps a torch optimizer, not {type(optimizer).__name__}")
        self.inner = optimizer
        # groups, state and defaults ARE the inner optimizer's, so only the hooks of the base class are set up
        torch.optim.Optimizer.__setstate__(self, {"defaults": optimizer.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, with the model's parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.inner.state

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group; its parameters are converted to the storage format."""
        self.inner.add_param_group(group)
        self._adopt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of the model's parameters."""
        self.inner.zero_grad(set_to_none)

    @abstractmethod
    def _adopt(self) -> None:
        """Convert the parameters that have not been converted."""

    def __getstate__(self) -> dict[str, Any]:
        hooks = [name for name in self.__dict__ if name.startswith("_optimizer_")]  # not copied, as in torch
        return {name: value for name, value in self.__dict__.items() if name not in hooks}
