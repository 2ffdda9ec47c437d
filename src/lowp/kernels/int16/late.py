"""Numbers of a device on the host, available once their copy has arrived; nothing waits for it."""

from typing import Any

import torch
from torch import Tensor


def at_once(value: Tensor) -> float | Tensor:
    """Return a number if it can be read without waiting, else a copy on its device. `value`: 0-d."""
    return value.item() if value.is_cpu else value.detach().clone()


class LateNumber:
    """A tensor of the device, read on the host when its copy has arrived, without waiting for it."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrived: torch.Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state; a copy has no transfer in progress."""
        return {"_copy": None, "_arrived": None}

    def send(self, value: Tensor) -> None:
        """Begin to copy numbers to the host, in the place of what was sent before; not while a graph is captured."""
        if value.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        if value.device.type == "cpu":
            self._copy, self._arrived = value.clone(), None
            return
        self._copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.device.type == "cuda")
        self._copy.copy_(value, non_blocking=True)
        self._arrived = torch.Event(value.device)
        self._arrived.record()

    def read(self) -> Any:
        """Return what was sent, a number or a list, None if there is none or it is still under way."""
        if self._copy is None:
            return None
        if (event := self._arrived) is not None:
            is_captured = event.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if is_captured or not event.query():  # no event may be queried while a graph is captured
                return None
        return self._copy.tolist()

    def wait(self) -> None:
        """Wait until what was sent can be read."""
        if self._arrived is not None:
            self._arrived.synchronize()

    @property
    def is_under_way(self) -> bool:
        """Whether a number was sent that cannot be read yet."""
        return self._copy is not None and self.read() is None
