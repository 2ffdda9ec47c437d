"""The loss scale of a watched training, seen from outside: a scaler of torch's, of lowp's, or none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class WatchedScale:
    """The loss scale of a run. `scaler` is an object with `is_enabled` and `get_scale`; None if nothing scales."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._before: float | None = None

    @property
    def is_used(self) -> bool:
        """Whether anything scales the loss."""
        return self._scaler is not None

    def value(self) -> float:
        """The present scale; 1 if there is none."""
        scaler = self._scaler
        return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())

    def begin_backward(self) -> float:
        """Note the scale at the start of a backward pass, and return it."""
        value = self.value()
        self._before = value if self.is_used else None
        return value

    def stepped(self) -> None:
        """Note that the step of that backward pass was taken."""
        self._before = None

    def has_skipped(self) -> bool:
        """Whether the step of the last backward pass was skipped: it was not taken, and the scale is lower now."""
        before, self._before = self._before, None
        return before is not None and self.value() < before

    def feed(self, counts: NDArray[np.int64]) -> None:
        """Pass counts of activation gradients, int64 [256] by octave without the scale, to a scaler of lowp's.

        They underflow like those of weights, which the scaler sees itself.
        """
        feed = getattr(self._scaler, "add_exponents", None)
        if feed is not None:
            power = round(math.log2(self.value()))
            scaled = np.zeros(256, np.int64)
            places = np.flatnonzero(counts)
            np.add.at(scaled, np.clip(places + power, 0, 254), counts[places])
            feed(torch.from_numpy(scaled))
