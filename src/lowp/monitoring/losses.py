"""The losses of every step, of which a look judges those since the look before, and what they came from."""

import math
import statistics
import sys
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lowp.kernels.int16.late import at_once
from lowp.monitoring.look import Look, by_device
from lowp.monitoring.places import Listener
from lowp.monitoring.seen import Spike
from lowp.numerics.models import Models
from lowp.numerics.modes import numbers_of

_MOST = 4096  # between two looks
_LATEST, _ENOUGH = 64, 16  # losses that say what is usual, and how many must
_SPIKE = 4.0  # times the largest of the latest losses


class Losses(Listener):
    """Losses without their scale, and the scales; those of a device as its tensors, which nothing waits for."""

    def __init__(self, models: Models, told: Callable[[Tensor, bool], bool]) -> None:
        super().__init__(told, _ENOUGH)
        self._models = models
        self._seen: deque[tuple[int, float | Tensor, float | Tensor | None]] = deque(maxlen=_MOST)
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._limit = sys.float_info.max  # a loss that is not above this is as usual
        self.spikes: list[Spike] = []
        # weights that were not finite when the loss became so; None while it is finite
        self.suspects: list[str] | None = None
        self._follows = False  # whether the loss of the step before was seen
        self.is_plain = False  # whether usual ones may be kept where they are heard

    def keep(self, is_plain: bool) -> None:
        """Say whether usual losses may be kept where they are heard, without `told`, as nothing else is to be done."""
        self.is_plain = is_plain
        self._set_limit()

    def wake(self) -> None:
        """Expect losses that do not follow those before."""
        self._follows = False
        self._set_limit()

    def add(self, step: int, loss: Tensor, scale: Tensor | None = None, scaled: bool = False) -> bool:
        """Add the loss of a step; `scaled`: it carries the scale. Return whether it calls for a look."""
        self._collect(step)
        value, factor = _unscaled(loss, scale, scaled)
        self._seen.append((step, value, factor))
        return isinstance(value, float) and self.judge(step, value)

    def judge(self, step: int, loss: float) -> bool:
        """Take a loss in; return whether it is far above the latest ones, or the first that is not finite."""
        follows, self._follows = self._follows, True
        if not math.isfinite(loss):
            is_first = self.suspects is None
            if self.suspects is None:
                self.suspects = self._not_finite() if follows else []
            self._set_limit()
            return is_first
        spikes = self._spikes(step, loss)
        self.suspects = None
        self._latest.append(loss)
        if len(self._latest) >= _ENOUGH and (largest := max(self._latest)) > 0:
            self._limit, self.most = _SPIKE * largest, _LATEST
        self._set_limit()
        return spikes

    def _collect(self, step: int) -> None:
        """Take in those that were kept where they were heard; as none of them is bad, their steps do not matter."""
        self._latest.extend(self.usual)
        self._seen.extend([(step, loss, None) for loss in self.usual])
        self.usual.clear()

    def _set_limit(self) -> None:
        is_usual = self.is_plain and self._follows and self.suspects is None
        self.limit = self._limit if is_usual else -math.inf

    def _spikes(self, step: int, loss: float) -> bool:
        if loss <= self._limit or len(self._latest) < _ENOUGH:
            return False
        usual, largest = statistics.median(self._latest), max(self._latest)
        if not loss > max(_SPIKE * largest, 2 * _SPIKE * usual):
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
        for place, (step, loss, factor) in enumerate(self._seen):
            if factor is None:
                self._seen[place] = (step, *_unscaled(torch.as_tensor(loss), scale, True))

    def move_to(self, look: Look) -> list[tuple[int, float]]:
        """Return the losses with their steps; NaN for those of a device, which go to the look as ``loss``, by place.

        The scales go there, too.
        """
        self._collect(look.step)
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
    factor = at_once(scale.reshape(()) if scale.dim() else scale)
    if not scaled:
        return found, factor
    if isinstance(factor, Tensor):
        device = found.device if isinstance(found, Tensor) else factor.device
        return found / factor.to(device, non_blocking=True), factor
    return found / (factor or 1.0), factor
