"""What tests share that have CPU tensors stand for those of a GPU."""

from __future__ import annotations

import pytest

from lowp.kernels import hardware
from lowp.ops import short


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numbers of the CPU be as far away as a device's: nothing takes the ways for small steps on a CPU."""
    for module in (hardware, short):
        monkeypatch.setattr(module, "is_on_host", lambda x: False)
