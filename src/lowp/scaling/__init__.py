"""Loss scales and tensor scales: objects that choose a scale from observed values.

A scaling is a frozen description with `init() -> state`, `observe(state, seen) -> state` and `scale(state)`. The state
is a tuple of tensors on the device and is saved in checkpoints. Nothing here waits for the device, except `observe_` of
a loss scale where the host knows the step.
"""

from __future__ import annotations

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
from lowp.scaling.protocol import Scaling
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
