"""What tests share that have CPU tensors stand for those of a GPU."""

from __future__ import annotations

import pytest
import torch

from lowp.kernels.choose import hardware
from lowp.ops import direct


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numbers of the CPU be as far away as a device's: nothing takes the ways for small steps on a CPU."""
    monkeypatch.setattr(hardware, "is_on_host", lambda x: False)
    monkeypatch.setattr(direct, "chosen", lambda: "triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that a body runs on: the same body runs on the CPU in every run of the tests."""
    name: str = request.param
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return name
