"""Whether a step of a training counts: with a loss scale (`GradScaler`), or without one (`UnscaledSteps`).

Both look at the gradients once, skip a step that is not finite, and let one guard draw the consequences.
"""

from __future__ import annotations

from lowp.step.guard import StepGuard, as_flag
from lowp.step.mistakes import FirstStep, Trained, expect_step, step_comes
from lowp.step.provenance import NonFinite, NonFiniteGradients
from lowp.step.scaler import GradScaler
from lowp.step.searching import first_scale
from lowp.step.unscaled import UnscaledSteps

__all__ = [
    "FirstStep",
    "GradScaler",
    "NonFinite",
    "NonFiniteGradients",
    "StepGuard",
    "Trained",
    "UnscaledSteps",
    "as_flag",
    "expect_step",
    "first_scale",
    "step_comes",
]
