"""The one shape of everything that chooses a scale."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

State = TypeVar("State")
Seen = TypeVar("Seen", contravariant=True)


class Scaling(Protocol[State, Seen]):
    """What chooses a scale from what was seen; `observe` returns a new state and never changes the one it was given.

    What differs between scalings is when they are asked: a current scaling observes a tensor and then scales it, a
    delayed one (and a loss scale) scales by what was seen before and then observes.
    """

    def init(self, device: torch.device | str | None = None) -> State:
        """Return the state before anything was seen, as tensors on `device`."""
        ...

    def observe(self, state: State, seen: Seen) -> State:
        """Return the state after `seen`, computed on the device of the state and without waiting for it."""
        ...

    def scale(self, state: State) -> torch.Tensor:
        """Return the scale that the state stands for."""
        ...
