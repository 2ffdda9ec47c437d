"""Which steps are looked at: 0, 1, 2, 4, 8 … and then every fiftieth, as far as the time allows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from lowp.errors import InvalidInput

__all__ = ["Budget", "is_sampled", "parse_share"]

_EVERY = 50


def is_sampled(step: int) -> bool:
    """Whether a step is looked at where there is no budget: 0, the powers of two to 32, and every fiftieth."""
    return step == 0 or (step < _EVERY and step & (step - 1) == 0) or step % _EVERY == 0


def parse_share(text: str | float | None) -> float | None:
    """A budget: ``3%``, 0.03, or None (``none``) for no limit; raises InvalidInput for anything else."""
    if text is None or str(text).strip().lower() == "none":
        return None
    word = str(text).strip()
    try:
        share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 10:
        raise InvalidInput(f"max_overhead={text!r} is not valid: give a share of the time such as 3% or 0.03, or none")
    return share


@dataclass
class Budget:
    """The time that profiling itself takes, measured, and held to a share of the time of the training.

    `own` counts every second spent in the profiler's own code; a step that would be looked at waits until the share
    allows for what the latest one cost. The first step is always looked at.
    """

    share: float | None = 0.03
    own: float = 0.0
    always: float = 0.0  # of `own`, what every step costs, looked at or not
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    taken: int = 0
    _of_step: float = 0.0
    _latest: float = 0.0
    _due: bool = False

    def wants(self, step: int) -> bool:
        """Whether this step is looked at."""
        if self.share is None:
            return is_sampled(step)
        self._due = self._due or is_sampled(step)
        if not self._due or not (self.taken == 0 or self.own + self._latest <= self.share * self.training):
            return False
        self._due = False
        return True

    def spent(self, seconds: float, sampling: bool) -> None:
        """Count time that was spent in the profiler."""
        self.own += seconds
        if sampling:
            self._of_step += seconds
        else:
            self.always += seconds

    def took(self) -> None:
        """Count a step that was looked at."""
        self.taken += 1
        self._latest, self._of_step = self._of_step, 0.0

    def end(self) -> None:
        """Stop the clock."""
        self.ended = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.started

    @property
    def training(self) -> float:
        """Seconds of the training itself."""
        return max(self.total - self.own, 1e-9)

    @property
    def overhead(self) -> float:
        """The share that was added to the time of the training."""
        return self.own / self.training
