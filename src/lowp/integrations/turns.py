"""Optimizers that a library steps one at a time, though they share a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import lowp


class Turns:
    """The backward passes and steps of a precision, one optimizer a call; the scale moves after the last of them.

    The last is known when all `optimizers` have stepped, when one of them steps again, or when the next loss comes.
    """

    def __init__(self, precision: lowp.Precision) -> None:
        self.precision = precision
        self._stepped: list[torch.optim.Optimizer] = []
        self._unscaled: list[torch.optim.Optimizer] = []

    @property
    def has_scale(self) -> bool:
        """Whether the precision scales the loss."""
        return self.precision.scaler.is_enabled()

    def backward(self, loss: Any, **options: Any) -> None:
        """Run the backward pass of a loss."""
        self.end()
        self.precision.backward(loss, **options)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, if there is one; once a step."""
        if self.has_scale and not _is_in(self._unscaled, optimizer):
            self.precision.unscale_(optimizer)
            self._unscaled.append(optimizer)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizers: Sequence[torch.optim.Optimizer],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step one of the `optimizers` of the training; return what its step has returned."""
        self._unscaled = [one for one in self._unscaled if one is not optimizer]
        if closure is not None or not self.has_scale or len(optimizers) < 2:
            return self.precision.step(optimizer, closure=closure)
        if _is_in(self._stepped, optimizer):
            self.end()
        result = self.precision.step_one(optimizer)
        self._stepped.append(optimizer)
        if len(self._stepped) == len(optimizers):
            self.end()
        return result

    def end(self) -> None:
        """Let the scale move, if optimizers have stepped since it did."""
        if self._stepped:
            self._stepped.clear()
            self.precision.end_step()


def _is_in(optimizers: Sequence[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> bool:
    return any(one is optimizer for one in optimizers)
