"""Loss scales and tensor scales: objects that choose a scale from observed values.

A scaling is a frozen description with `init() -> state`, `observe(state, seen) -> state` and `scale(state)`. The state
is a tuple of tensors on the device and is saved in checkpoints. Nothing here waits for the device, except `observe_` of
a loss scale where the host knows the step.
"""

from typing import Protocol, TypeVar

import torch

from lowp.scaling.autoflex import Autoflex, AutoflexState, WritesSeen
from lowp.scaling.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    AdaptiveLossScale,
    DynamicLossScale,
    GradientsSeen,
    LossScaleState,
    LossScaling,
    StaticLossScale,
)
from lowp.scaling.reactive import Reactive, ReactiveState

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "AdaptiveLossScale",
    "Autoflex",
    "AutoflexState",
    "DynamicLossScale",
    "GradientsSeen",
    "LossScaleState",
    "LossScaling",
    "Reactive",
    "ReactiveState",
    "Scaling",
    "StaticLossScale",
    "WritesSeen",
]

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
