"""The protocol of all objects that choose a scale."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

State = TypeVar("State")
Observations = TypeVar("Observations", contravariant=True)


class Scaling(Protocol[State, Observations]):
    """Chooses a scale from observed values. `observe` returns a new state and never changes its argument.

    Scalings differ in the order of calls: a current scaling observes a tensor and then scales it; a delayed scaling,
    such as a loss scale, scales by earlier observations and then observes.
    """

    def init(self, device: torch.device | str | None = None) -> State:
        """Return the state before any observation, as tensors on `device`."""
        ...

    def observe(self, state: State, seen: Observations) -> State:
        """Return the state after the observation `seen`, computed on the state's device without waiting for it."""
        ...

    def scale(self, state: State) -> torch.Tensor:
        """Return the scale of a state."""
        ...
