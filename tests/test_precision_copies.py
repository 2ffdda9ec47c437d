"""Copies of model, optimizer and precision together continue to the same bits, independently."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from optim.cases import COPIES, train_step
from torch import nn

import lowp

PRECISIONS = ("fp16", "e5m7", "bf16", "bf16-storage", "fp16-storage", "flex16+5", "fp8")


def _training(name: str) -> tuple[nn.Module, Any, lowp.Precision]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    precision = lowp.Precision(name)
    model, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    return model, optimizer, precision


def _steps(training: tuple[nn.Module, Any, lowp.Precision], count: int, begin: int = 0) -> list[float]:
    model, optimizer, precision = training
    losses = []
    for step in range(begin, begin + count):
        x = torch.randn(32, 10, generator=torch.Generator().manual_seed(step))
        losses.append(train_step(precision, model, optimizer, x))
    return losses


def _values(training: tuple[nn.Module, Any, lowp.Precision]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in training[0].state_dict().items()}


WAYS = [
    pytest.param(name, how, marks=[pytest.mark.slow] * (how != "deepcopy" and name not in ("fp16", "flex16+5")))
    for name in PRECISIONS
    for how in COPIES
]


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_a_copied_training_goes_on_to_the_bit_and_leaves_the_original_alone(name: str, how: str) -> None:
    training = _training(name)
    _steps(training, 3)
    other = COPIES[how](training)
    before = _values(training)
    its = _steps(other, 3, begin=3)
    assert all(torch.equal(value, before[key]) for key, value in _values(training).items())
    assert its == _steps(training, 3, begin=3)
    after = _values(training)
    assert all(torch.equal(value, after[key]) for key, value in _values(other).items())


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_prepared_model_is_copied_alone(name: str, how: str) -> None:
    training = _training(name)
    model = training[0].eval()
    other = COPIES[how](model)
    x = torch.randn(4, 10)
    with training[2].autocast():
        assert torch.equal(model(x), other(x))


def test_a_copy_puts_the_statistics_of_its_own_model_back() -> None:
    training = _training("fp16")
    _steps(training, 1)
    model, optimizer, precision = copy.deepcopy(training)
    before = [value.clone() for value in model.buffers()]
    with precision.autocast():
        loss = model(torch.randn(8, 10)).sum() * torch.inf
    precision.backward(loss)
    precision.step(optimizer)
    assert all(torch.equal(value, kept) for value, kept in zip(model.buffers(), before, strict=True))
    assert precision.nonfinite is not None and precision.nonfinite.name == "3.weight"
    assert precision.skipped_steps == 1 and training[2].skipped_steps == 0


@pytest.mark.parametrize("name", ["fp16", "bf16-storage", "flex16+5"])
def test_nothing_of_a_training_waits_for_the_garbage_collector(name: str) -> None:
    gc.disable()
    try:
        training = _training(name)
        _steps(training, 1)
        alive = [weakref.ref(one) for one in training]
        del training
        assert [one() for one in alive] == [None] * 3
    finally:
        gc.enable()
