"""Copies of stored models and of their optimizers: deepcopy, pickle and torch.save give independent objects."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim.cases import COPIES, step_on_drawn_gradients
from torch import nn

import lowp
from lowp.optim import SGD, AdamW, MasterWeights

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2, moments="bf16", seed=3),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "masters": lambda p: MasterWeights(torch.optim.AdamW(p, lr=1e-2), seed=3),
    "split": lambda p: MasterWeights(torch.optim.SGD(p, lr=0.1, momentum=0.9), kind="split"),
    "stochastic": lambda p: MasterWeights(torch.optim.Adam(p, lr=1e-2, fused=True), kind="stochastic", seed=3),
}


def _training(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer: Any = OPTIMIZERS[name](model.parameters())
    optimizer.attach(model)
    return model, optimizer


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copied_training_goes_on_to_the_bit_and_leaves_the_original_alone(name: str, how: str) -> None:
    model, optimizer = _training(name)
    step_on_drawn_gradients(model, optimizer, 1)
    other, its_optimizer = COPIES[how]((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    step_on_drawn_gradients(other, its_optimizer, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step_on_drawn_gradients(model, optimizer, 2)
    assert _same(model, other)


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_a_copied_model_belongs_to_the_copy_of_its_optimizer(optimizer_first: bool) -> None:
    model, optimizer = _training("masters")
    if optimizer_first:
        its_optimizer, other = copy.deepcopy((optimizer, model))
    else:
        other, its_optimizer = copy.deepcopy((model, optimizer))
    assert _same(model, other)  # masters, not what is stored
    other.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert torch.equal(its_optimizer.master(other[0].bias), optimizer.master(model[0].bias) + 1)


@pytest.mark.parametrize("how", COPIES)
def test_a_model_that_is_copied_alone_gives_and_takes_its_own_weights(how: str) -> None:
    model, optimizer = _training("masters")
    step_on_drawn_gradients(model, optimizer, 1)
    target = COPIES[how](model)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(0.5)
    masters = copy.deepcopy(model.state_dict())
    for name, value in target.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, dict(target.named_parameters())[name].float())
    target.load_state_dict({name: torch.full_like(value, 1 / 3) for name, value in masters.items()})
    assert all(torch.equal(value, masters[name]) for name, value in model.state_dict().items())
    assert all(parameter.unique().tolist() == [torch.tensor(1 / 3).bfloat16()] for parameter in target.parameters())


def test_a_moving_average_of_a_stored_model_is_its_own() -> None:
    model, optimizer = _training("masters")
    with pytest.warns(UserWarning, match="averages in it, and rounds small changes away"):
        average = torch.optim.swa_utils.AveragedModel(model)
    before = copy.deepcopy(average.module.state_dict())
    step_on_drawn_gradients(model, optimizer, 1)
    assert all(torch.equal(value, before[name]) for name, value in average.module.state_dict().items())


def test_a_copy_of_a_model_in_a_format_that_fp32_carries_rounds_what_it_loads() -> None:
    precision = lowp.Precision(lowp.Policy((lowp.Rule.of("contraction", input="e5m7"),), "e5m7"), masters="fp32")
    model, _ = precision.prepare(nn.Linear(3, 3), None)
    other = copy.deepcopy(model)
    other.load_state_dict({"weight": torch.full((3, 3), 1 / 3), "bias": torch.zeros(3)})
    assert float(other.weight[0, 0].detach()) == float(lowp.quantize(torch.tensor(1 / 3), "e5m7"))
    torch.optim.swa_utils.AveragedModel(model)  # without a warning: it averages in fp32


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_left_for_the_garbage_collector(name: str) -> None:
    def train() -> None:
        model, optimizer = _training(name)
        step_on_drawn_gradients(model, optimizer, 1)
        model.state_dict()

    train()
    train()  # what torch imports at its second step is not the optimizers'
    gc.disable()
    gc.freeze()  # what earlier tests left is not looked at
    try:
        train()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_model_keeps_the_masters_of_an_optimizer_that_is_let_go() -> None:
    model, optimizer = _training("masters")
    step_on_drawn_gradients(model, optimizer, 1)
    masters = copy.deepcopy(model.state_dict())
    del optimizer
    gc.collect()
    assert all(torch.equal(value, masters[name]) for name, value in model.state_dict().items())
