"""The losses of every step, of which a look judges those since the look before, and what they came from."""

import math
import statistics
import sys
from collections import deque

import torch
from torch import Tensor

from lowp.kernels.int16.late import at_once
from lowp.monitoring.look import Look, by_device
from lowp.monitoring.seen import Spike
from lowp.numerics.models import Models
from lowp.numerics.modes import numbers_of

_MOST = 4096  # between two looks
_LATEST, _ENOUGH, _RENEWED = 64, 16, 16  # losses that say what is usual, how many must, and when that is read anew
_SPIKE = 4.0  # times the largest of the latest losses


class Losses:
    """Losses without their scale, and the scales; those of a device as its tensors, which nothing waits for."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: deque[tuple[int, float | Tensor, float | Tensor | None]] = deque(maxlen=_MOST)
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._count, self._limit = 0, sys.float_info.max  # a loss that is not above this is as usual
        self.spikes: list[Spike] = []
        # weights that were not finite when the loss became so; None while it is finite
        self.suspects: list[str] | None = None

    def add(self, step: int, loss: Tensor, scale: Tensor | None = None, scaled: bool = False) -> bool:
        """Add the loss of a step; `scaled`: it carries the scale. Return whether it calls for a look."""
        if scale is None and not loss.dim():  # as in most steps
            value, factor = at_once(loss), None
        else:
            value, factor = _unscaled(loss, scale, scaled)
        self._seen.append((step, value, factor))
        return isinstance(value, float) and self.judge(step, value)

    def judge(self, step: int, loss: float) -> bool:
        """Take a loss in; return whether it is far above the latest ones, or the first that is not finite."""
        is_usual = loss <= self._limit
        if not is_usual and not math.isfinite(loss):
            is_first = self.suspects is None
            self.suspects = self._not_finite() if self.suspects is None else self.suspects
            return is_first
        spikes = not is_usual and self._spikes(step, loss)
        self.suspects = None
        self._latest.append(loss)
        self._count += 1
        if self._count % _RENEWED == 0 and (largest := max(self._latest)) > 0:
            self._limit = _SPIKE * largest
        return spikes

    def _spikes(self, step: int, loss: float) -> bool:
        usual, largest = statistics.median(self._latest), max(self._latest)
        if self._count < _ENOUGH or not loss > max(_SPIKE * largest, 2 * _SPIKE * usual):
            return False
        self.spikes.append(Spike(step, loss, largest, usual))
        return True

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

    def move_to(self, look: Look) -> list[tuple[int, float]]:
        """Return the losses with their steps; NaN for those of a device, which go to the look as ``loss``, by place.

        The scales go there, too.
        """
        found: list[tuple[int, float]] = []
        late = []
        for place, (step, loss, scale) in enumerate(self._seen):
            if isinstance(loss, Tensor):
                late.append((str(place), loss))
                loss = math.nan
            found.append((step, loss))
            if scale is not None:
                look.note("scales", str(place), scale)
        for some in by_device(late):
            look.add("loss", [place for place, _ in some], torch.stack([loss for _, loss in some]))
        self._seen.clear()
        return found


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
