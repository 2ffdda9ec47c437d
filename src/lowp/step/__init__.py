"""Whether a step of a training counts: with a loss scale (`GradScaler`), or without one (`UnscaledSteps`).

Both look at the gradients once (`gradients`), skip a step that is not finite, remember where it was not (`provenance`),
and let one guard draw the consequences (`guard`): statistics are put back, skips are counted, hopeless runs end. How a
loss scale moves is decided in `lowp.scaling.loss_scale`; `searching` finds the first one, and `mistakes` are those of a
training loop.
"""

from lowp.step.guard import StepGuard, as_flag
from lowp.step.mistakes import FirstStep, Trained, expect_step, not_rounded, step_comes
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
    "not_rounded",
    "step_comes",
]
