"""torch.distributed.checkpoint saves and restores moments, steps and masters of lowp's optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim.cases import step_on_drawn_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from lowp.errors import InvalidInput
from lowp.optim import SGD, AdamW, MasterWeights

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: AdamW(p, lr=1e-2, moments="bf16"),
    "adamw with fp32 masters": lambda p: AdamW(p, lr=1e-2, split=False),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "masters": lambda p: MasterWeights(torch.optim.AdamW(p, lr=1e-2)),
    "split masters": lambda p: MasterWeights(torch.optim.Adam(p, lr=1e-2), kind="split"),
    "stochastic": lambda p: MasterWeights(torch.optim.Adam(p, lr=1e-2), kind="stochastic", seed=5),
    "plain sgd": lambda p: MasterWeights(torch.optim.SGD(p, lr=0.1)),
}


def _training(name: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer.attach(model)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    step_on_drawn_gradients(model, optimizer, seed)
    optimizer.zero_grad()


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_is_saved_and_loaded_goes_on_to_the_bit(name: str, flat: bool, tmp_path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = _training(name, 0)
    for step in range(3):
        _step(model, optimizer, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that one process saves alone
        weights, state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
        other, its_optimizer = _training(name, 1)
        weights, state = get_state_dict(other, its_optimizer, options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
        set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    for one, its in ((model, optimizer), (other, its_optimizer)):
        _step(one, its, 7)
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_flat_state_for_an_optimizer_without_any_is_refused_in_words() -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = _training("adamw", 0)
    weights, state = get_state_dict(model, optimizer, options=options)
    other, fresh = _training("adamw", 1)
    with pytest.raises(InvalidInput, match=r"masters but no step, .* call optimizer.state_dict\(\) before"):
        set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state, options=options)


def test_saving_before_the_first_step_changes_nothing() -> None:
    (model, optimizer), (other, its_optimizer) = (_training("sgd", 0) for _ in range(2))
    get_state_dict(model, optimizer)
    for one, its in ((model, optimizer), (other, its_optimizer)):
        _step(one, its, 0)
    assert float(optimizer.state[model[0].bias]["step"]) == 1
    assert torch.equal(optimizer.master(model[0].weight), its_optimizer.master(other[0].weight))
