"""Fixtures of the scaler's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step.cases import (
    OPTIMIZERS,
)

from lowp.kernels.choose import hardware


@pytest.fixture
def to_list(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count Tensor.tolist, which reads without a dispatched call."""
    calls: list[int] = []
    original = torch.Tensor.tolist

    def counting(tensor: torch.Tensor) -> Any:
        calls.append(1)
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    return calls


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read nothing on the host, as with numbers on a device that needs synchronization."""
    monkeypatch.setattr(hardware, "is_on_host", lambda x: False)


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    return OPTIMIZERS[request.param]
