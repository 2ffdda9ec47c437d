"""Underflow is measured and followed; a skipped step changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step.cases import INF, OPTIMIZERS, one_parameter, parameter_of, started
from torch import nn

from lowp.errors import InvalidInput
from lowp.step import GradScaler


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_underflow_rate_is_the_share_that_fp16_flushes_at_this_scale(name: str) -> None:
    scaler = started(init_scale=2.0)
    assert scaler.underflow is None
    optimizer = one_parameter([0.0, 1.0, 2.0**-26, -(2.0**-27), 2.0**-25, 1e-45], name)
    scaler.step(optimizer)
    assert scaler.underflow is not None and scaler.underflow.item() == pytest.approx(3 / 5)


def test_underflow_is_sampled_every_so_often() -> None:
    scaler = started(sample_interval=3)
    rates = []
    for number in range(5):
        scaler.step(one_parameter([1.0, 1e-30] if number < 3 else [1.0, 1.0]))
        scaler.update()
        assert scaler.underflow is not None
        rates.append(scaler.underflow.item())
    assert rates == [0.5, 0.5, 0.5, 0.0, 0.0]
    silent = started(sample_interval=0)
    silent.step(one_parameter([1e-30]))
    assert silent.underflow is None


def test_the_underflow_of_large_gradients_is_that_of_a_sample_of_them() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1000, 1024) * 2.0**-24
    scaler = started()
    scaler.step(one_parameter(gradient.clone()))
    flushed = ((gradient != 0) & (gradient.half() == 0)).float().mean().item()
    assert 0.2 < flushed < 0.5
    assert scaler.underflow is not None and scaler.underflow.item() == pytest.approx(flushed, abs=0.005)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scale_that_follows_underflow_ends_it(name: str) -> None:
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=1.0, target_underflow=1e-3, sample_interval=1)
    gradient = torch.randn(4096) * 1e-8
    optimizer = one_parameter(gradient, name)
    rates = []
    for _ in range(3):
        scaler.scale(torch.ones(()))
        parameter_of(optimizer).grad = gradient * scaler.get_scale()
        scaler.step(optimizer)
        assert scaler.underflow is not None
        rates.append(scaler.underflow.item())
        scaler.update()
    assert rates[0] > 0.9 and rates[1] <= 1e-3 and rates[2] <= 1e-3
    assert 2.0**10 < scaler.get_scale() < 2.0**18


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_norm_statistics_survive_a_skipped_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = GradScaler("cpu")
    scaler.protect(model)
    for overflowed in (False, True, False):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        scaler.scale(model(x * INF if overflowed else x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before) == overflowed


def test_scale_works_under_functional_transforms() -> None:
    scaler = started(init_scale=4.0)
    assert torch.func.grad(lambda x: scaler.scale(x * x))(torch.tensor(3.0)) == 24.0
    scaler.step(one_parameter([INF]))
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_scale_compiles_without_a_graph_break() -> None:
    scaler = started(init_scale=4.0)
    scaled = torch.compile(lambda x: scaler.scale((x * x).sum()), fullgraph=True, backend="eager")
    x = torch.ones(3, requires_grad=True)
    scaled(x).backward()
    assert x.grad is not None and x.grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("counts", [torch.zeros(255), torch.zeros(256, 1), [0] * 256], ids=["255", "two axes", "list"])
def test_counts_of_further_gradients_are_a_tensor_with_a_number_for_each_exponent(counts: Any) -> None:
    scaler = started(target_underflow=0.01)
    with pytest.raises(InvalidInput, match=r"takes a count for each of the 256 exponents of fp32, an int64 tensor"):
        scaler.add_exponents(counts)
    scaler.add_exponents(torch.zeros(256, dtype=torch.int64))
