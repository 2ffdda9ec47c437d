"""Fixtures of the scaler's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from grad_scaler.cases import (
    OPTIMIZERS,
)


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


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    return OPTIMIZERS[request.param]
