"""The losses of every step, of which a look judges those since the look before, and what they came from."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from lowp.kernels.int16.late import at_once
from lowp.monitoring.look import Look
from lowp.numerics.models import Models
from lowp.numerics.modes import numbers_of

_MOST = 256  # between two looks


class Losses:
    """Losses without their scale, and the scales; as tensors of a device, which nothing waits for."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: deque[tuple[int, float | Tensor, float | Tensor | None]] = deque(maxlen=_MOST)
        # weights that were not finite when the loss became so; None while it is finite
        self.suspects: list[str] | None = None

    def add(self, step: int, loss: Tensor, scale: Tensor | None, scaled: bool) -> None:
        """Add the loss of a step; `scaled`: it carries the scale."""
        value, factor = _unscaled(loss, scale, scaled)
        self._seen.append((step, value, factor))
        if isinstance(value, float):
            if math.isfinite(value):
                self.suspects = None
            elif self.suspects is None:
                self.suspects = self._not_finite()

    def _not_finite(self) -> list[str]:
        """Return the weights that are infinite or NaN, before a step spreads this to all."""
        return [
            name
            for name, one in self._models.named_parameters()
            if one.is_floating_point() and at_once(numbers_of(one.detach()).isfinite().all()) is False
        ]

    def unscale(self, scale: Tensor) -> None:
        """Divide the losses by the scale that were added before the scaler was found."""
        known = ((step, loss, factor) for step, loss, factor in self._seen)
        self._seen = deque(
            (
                (step, loss, factor) if factor is not None else (step, *_unscaled(torch.as_tensor(loss), scale, True))
                for step, loss, factor in known
            ),
            _MOST,
        )

    def move_to(self, look: Look) -> list[int]:
        """Give the losses to a look, and return their steps."""
        for place, (_, loss, scale) in enumerate(self._seen):
            look.note("loss", f"{place}", loss)
            if scale is not None:
                look.note("scales", f"{place}", scale)
        steps = [step for step, _, _ in self._seen]
        self._seen.clear()
        return steps


def _unscaled(loss: Tensor, scale: Tensor | None, scaled: bool) -> tuple[float | Tensor, float | Tensor | None]:
    """Return a loss without the scale that it may carry, and the scale."""
    found = at_once(loss.reshape(()) if loss.dim() else loss)
    if scale is None:
        return found, None
    factor = at_once(scale.reshape(()))
    if not scaled:
        return found, factor
    if isinstance(factor, Tensor):
        device = found.device if isinstance(found, Tensor) else factor.device
        return found / factor.to(device, non_blocking=True), factor
    return found / (factor or 1.0), factor
