"""Checks that tests of regions leave no state behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from region.small_model import Net


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    yield
    after = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cpu", False)  # for the tests after one that fails here
    torch.set_autocast_dtype("cpu", before[1])
    torch.set_autocast_dtype("cuda", before[2])
    assert after == (False, *before[1:])
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()
