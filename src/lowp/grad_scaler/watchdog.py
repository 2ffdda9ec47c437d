"""Notices that the scale cannot fall any further while gradients still overflow, without waiting for the device."""

from __future__ import annotations

from typing import cast

import torch


class Watchdog:
    """Counts skipped steps in a row at the floor of the scale; `patience` of them are too many.

    Where the host reads whether a step is skipped, it counts along. Where nothing is read, it looks at a copy of the
    device's own counter, begun `patience` steps before and long since arrived: it is then late, by up to twice that.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._counted = 0
        self._updates = 0
        self._copy: torch.Tensor | None = None
        self._arrived: torch.Event | None = None

    def read(self, skipped_at_floor: bool) -> None:
        """Take note of one step that the host knows about."""
        self._counted = self._counted + 1 if skipped_at_floor else 0

    def too_many(self, stuck: torch.Tensor) -> bool:
        """Return whether it is time to raise; `stuck` is the device's counter, once a step."""
        self._updates += 1
        if self._counted >= self._patience:
            self._counted = 0
            return True
        if self._updates % self._patience:
            return False
        late = 0
        if self._copy is not None and (self._arrived is None or self._arrived.query()):
            late = int(cast(int, self._copy.tolist()))
        self._send(stuck)
        return late >= self._patience

    def _send(self, stuck: torch.Tensor) -> None:
        if stuck.device.type == "cpu":
            self._copy, self._arrived = stuck.clone(), None
            return
        self._copy = torch.empty((), dtype=stuck.dtype, device="cpu", pin_memory=stuck.device.type == "cuda")
        self._copy.copy_(stuck, non_blocking=True)
        self._arrived = torch.Event(stuck.device)
        self._arrived.record()
