"""Optimizers that do not train the models of a precision, or not as they were prepared."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput, Misuse

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
STORED = ("bf16-storage", "fp16-storage", "flex16+5")
NAMES = ("bf16", "fp16", "fp8", *STORED)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def backward(precision: lowp.Precision, *models: nn.Module) -> None:
    for model in models:
        model.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(X).float(), X[:, :3].argmax(1))
        precision.backward(loss)


def started(name: str, steps: int = 1) -> tuple[lowp.Precision, nn.Sequential, torch.optim.Optimizer]:
    precision, model = lowp.Precision(name), network()
    optimizer = precision.prepare(model, sgd(model.parameters()))[1]
    for _ in range(steps):
        backward(precision, model)
        precision.step(optimizer)
    return precision, model, optimizer


def _not_prepared(precision: lowp.Precision, model: nn.Module) -> torch.optim.Optimizer:
    precision.prepare_model(model)
    return sgd(model.parameters())


def _result_not_taken(precision: lowp.Precision, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model.parameters())
    precision.prepare(model, optimizer)
    return optimizer


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("make", [_not_prepared, _result_not_taken])
def test_stored_parameters_are_stepped_only_by_what_prepare_returned(
    name: str, make: Callable[[lowp.Precision, nn.Module], torch.optim.Optimizer]
) -> None:
    precision, model = lowp.Precision(name), network()
    optimizer = make(precision, model)
    before = copy.deepcopy(model.state_dict())
    backward(precision, model)
    with pytest.raises(Misuse, match=r"stores 0.weight in .*, and this optimizer is not what prepare returned"):
        precision.step(optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_optimizers_that_keep_masters_by_themselves_need_no_preparation() -> None:
    for make in (lowp.optim.AdamW, lambda parameters: lowp.MasterWeights(sgd(parameters))):
        precision, model = lowp.Precision("bf16-storage"), network()
        precision.prepare_model(model)
        optimizer: Any = make(model.parameters())
        backward(precision, model)
        precision.step(optimizer)


def test_an_optimizer_that_comes_later_is_looked_at_too() -> None:
    precision, model, optimizer = started("bf16-storage")
    other = precision.prepare_model(network())
    backward(precision, model, other)
    with pytest.raises(Misuse, match="is not what prepare returned"):
        precision.step(optimizer, sgd(other.parameters()))


def _flat(model: nn.Module) -> list[Tensor]:
    parameters = list(model.parameters())
    flat = nn.Parameter(torch.cat([one.detach().flatten() for one in parameters]))
    for one, part in zip(parameters, flat.detach().split([one.numel() for one in parameters]), strict=True):
        one.data = part.view(one.shape)
    return [flat]


FOREIGN: dict[str, tuple[Callable[[nn.Module], list[Tensor]], str]] = {
    "flat": (_flat, "shares memory with another one, which storing them in bf16 would separate"),
    "flat and one more": (lambda model: [*_flat(model), nn.Parameter(torch.ones(3))], "shares memory with another"),
    "another model": (lambda model: list(network().parameters()), "belongs to a prepared model: it would train none"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_optimizer_that_conversion_would_cut_off_is_refused_before_it(kind: str) -> None:
    make, text = FOREIGN[kind]
    model = network()
    optimizer = sgd(make(model))
    with pytest.raises(InvalidInput, match=text):
        lowp.Precision("bf16-storage").prepare(model, optimizer)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_a_flat_parameter_is_refused_where_model_and_optimizer_are_prepared_apart() -> None:
    precision, model = lowp.Precision("bf16-storage"), network()
    optimizer = sgd(_flat(model))
    precision.prepare_model(model)
    with pytest.raises(InvalidInput, match="none of the optimizer's parameters belongs to a prepared model"):
        precision.prepare_optimizer(optimizer)


def test_weights_of_one_model_that_share_memory_are_refused_and_one_parameter_in_two_places_is_not() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    with pytest.raises(InvalidInput, match=r"of shape \(6, 6\) shares memory with another one"):
        lowp.Precision("bf16-storage").prepare_model(model)
    assert model[0].weight.dtype is torch.float32
    model[1].weight = model[0].weight
    lowp.Precision("bf16-storage").prepare_model(model)
    side_by_side = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False))
    both = torch.randn(4, 12)
    side_by_side[0].weight.data, side_by_side[1].weight.data = both[:, :6], both[:, 6:]
    lowp.Precision("bf16-storage").prepare_model(side_by_side)


@pytest.mark.parametrize("name", ["fp32", "bf16", "flex16+5"])
def test_an_optimizer_of_another_model_that_can_train_nothing_warns(name: str) -> None:
    precision, model = lowp.Precision(name), network()
    optimizer = precision.prepare(model, sgd(network().parameters()))[1]
    backward(precision, model)
    with pytest.warns(UserWarning, match="no parameter of a prepared model, and none with a gradient"):
        precision.step(optimizer)


@pytest.mark.parametrize("name", ["fp32", *NAMES])
def test_parameters_that_loading_has_replaced_are_reported_once(name: str) -> None:
    precision, model, optimizer = started(name)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    backward(precision, model)  # leaves the gradients of the old parameters, so that no scaler misses them
    with pytest.warns(UserWarning, match="4 of the 4 parameters that the optimizer trains are no longer the model's"):
        precision.step(optimizer)
    backward(precision, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision.step(optimizer)


def test_a_layer_that_is_replaced_after_the_optimizer_was_made_is_reported() -> None:
    precision, model, optimizer = started("bf16")
    model[2] = nn.Linear(8, 3)
    backward(precision, model)
    with pytest.warns(UserWarning, match="2 of the 4 parameters"):
        precision.step(optimizer)


@pytest.mark.parametrize(("layer", "name"), [(0, "weight"), (2, "bias")])
def test_one_parameter_that_is_replaced_at_an_end_of_the_model_is_reported(layer: int, name: str) -> None:
    precision, model, optimizer = started("bf16")
    setattr(model[layer], name, nn.Parameter(getattr(model[layer], name).detach().clone()))
    backward(precision, model)
    with pytest.warns(UserWarning, match="1 of the 4 parameters"):
        precision.step(optimizer)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_that_is_converted_after_prepare_is_refused_in_every_precision(name: str, steps: int) -> None:
    precision, model, optimizer = started(name, steps)
    model.to(torch.bfloat16 if name == "fp16-storage" else torch.float16)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    with pytest.raises(InvalidInput, match=r"0\.weight is torch"):
        precision.step(optimizer)


def test_a_model_that_is_converted_though_its_own_optimizer_stores_it_is_refused() -> None:
    precision, model = lowp.Precision("bf16"), network()
    optimizer = precision.prepare(model, lowp.optim.AdamW(model.parameters()))[1]
    model.half()
    with pytest.raises(InvalidInput, match=r"0\.weight is torch\.float16, and was torch\.bfloat16 when"):
        precision.step(optimizer)


def test_a_model_that_is_converted_and_converted_back_trains_on() -> None:
    precision, model, optimizer = started("bf16")
    model.half().float()
    backward(precision, model)
    precision.step(optimizer)


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float16, "fp16-storage"), (torch.bfloat16, "bf16-storage")])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_a_model_in_sixteen_bits_is_refused_where_nothing_keeps_masters(
    name: str, dtype: torch.dtype, kept: str
) -> None:
    model = network().to(dtype)
    advice = f"0.weight is {dtype}, and {name} trains parameters as they are.* masters: {kept}"
    with pytest.raises(InvalidInput, match=advice):
        lowp.Precision(name).prepare(model)
    with pytest.raises(InvalidInput, match=advice):
        lowp.Precision(name).prepare(model, sgd(model.parameters()))
    with pytest.raises(InvalidInput, match="a parameter of shape"):
        lowp.Precision(name).prepare_optimizer(sgd(model.parameters()))


def test_narrow_parameters_that_are_frozen_or_have_masters_are_admitted() -> None:
    model = network()
    model[0].bfloat16().requires_grad_(False)
    lowp.Precision("bf16").prepare(model, sgd(model[2].parameters()))
    model = network()
    lowp.Precision("bf16").prepare(model, lowp.optim.AdamW(model.parameters()))
    model = network().bfloat16()
    lowp.Precision("bf16").prepare(model, lowp.optim.AdamW(model.parameters(), storage="fp32", split=False))
    model = network().half()
    lowp.Precision("fp16-storage").prepare(model, sgd(model.parameters()))
    model = network().bfloat16()
    lowp.Precision("fp32").prepare(model, sgd(model.parameters()))  # plain torch
