"""Without triton its kernels raise an error, and a GPU uses bitwise."""

from __future__ import annotations

import pytest
import torch

from lowp import kernels
from lowp.errors import Unavailable
from lowp.kernels.choose import dispatch


def test_its_absence_is_said_and_who_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowp.kernels.triton.is_installed", lambda: False)
    with pytest.raises(Unavailable, match="need the package triton, which is not installed: pip install triton"):
        kernels.use("triton")
    assert "triton" not in kernels.available("cuda")
    assert dispatch.implementation(torch.device("cuda")).__name__ == "lowp.kernels.numbers.bitwise"
