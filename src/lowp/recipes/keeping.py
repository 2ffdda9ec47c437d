"""Checkpoints of a training within an epoch, so that an interruption in its first hour loses less than a minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowp.recipes.training import Training

_SECONDS = 30.0  # between two checkpoints within an epoch
_LONG = 0.5  # seconds of an evaluation that is worth a checkpoint before it


class RunKeeper:
    """Writes the checkpoint of one training.

    It is written before the first evaluation (if `keeps_beginning`), within an epoch every 30 seconds, before an
    evaluation that will take long, and where the training is stopped. `extra` gives what is saved beside. `at` says in
    words what the file holds.
    """

    def __init__(self, path: Path, extra: Callable[[], dict[str, Any]] = dict, keeps_beginning: bool = True) -> None:
        self.path, self.at = path, ""
        self._extra = extra
        self._saved = time.monotonic()
        self._evaluation = math.inf if keeps_beginning else 0.0  # seconds of the latest one

    def save(self, training: Training) -> None:
        """Write the checkpoint."""
        self.path.parent.mkdir(exist_ok=True)
        training.save(self.path, **self._extra())
        self._saved = time.monotonic()
        self.at = f"step {training.step_of_epoch} of epoch {min(training.epoch + 1, training.epochs)}"

    def after_step(self, training: Training) -> None:
        """Write the checkpoint if the last one is old."""
        if time.monotonic() - self._saved > _SECONDS:
            self.save(training)

    def before_evaluation(self, training: Training) -> bool:
        """Return whether the evaluation may be stopped, because the state before it is kept."""
        if self._evaluation < _LONG:
            return False
        self.save(training)
        return True

    def evaluated(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self._evaluation = seconds
