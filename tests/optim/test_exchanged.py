"""Models whose parameters are exchanged, as `torch.__future__.set_swap_module_params_on_conversion` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import lowp

PRECISIONS = ("fp16", "bf16-storage", "fp16-storage", "flex16+5", "e5m7")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def started(precision: str) -> tuple[nn.Module, Callable[[], Tensor], lowp.Precision]:
    """A prepared model and a step of its training, which draws nothing at random."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    prepared = lowp.Precision(precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = prepared.prepare(model, optimizer)
    x, y = torch.randn(32, 8), torch.arange(32) % 4

    def step() -> Tensor:
        optimizer.zero_grad()
        with prepared.autocast():
            loss = nn.functional.cross_entropy(model(x).float(), y)
        prepared.backward(loss)
        prepared.step(optimizer)
        return loss.detach()

    return model, step, prepared


def trained(precision: str, swaps: bool, convert: Callable[[nn.Module], object]) -> list[Tensor]:
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    model, step, _ = started(precision)
    for _ in range(3):
        step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    step()
    model.load_state_dict(state)
    loss = step()
    convert(model)
    return [loss, step(), *model.state_dict().values()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_that_is_loaded_by_exchange_trains_as_one_that_is_copied_into(precision: str) -> None:
    written, exchanged = (trained(precision, swaps, lambda model: None) for swaps in (False, True))
    assert all(torch.equal(*pair) for pair in zip(written, exchanged, strict=True))


@pytest.mark.parametrize("precision", ["fp16", "e5m7", "flex16+5"])
def test_a_model_that_is_converted_by_exchange_trains_on(precision: str) -> None:
    written, exchanged = (trained(precision, swaps, lambda model: model.double().float()) for swaps in (False, True))
    assert all(torch.equal(*pair) for pair in zip(written, exchanged, strict=True))


def test_a_name_is_that_of_the_parameter_which_the_module_has() -> None:
    model, step, prepared = started("fp16")
    step()
    first = model[0]  # type: ignore[index]
    first.weight, first.bias = nn.Parameter(first.weight.detach()), nn.Parameter(first.bias.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared.scaler.scale(torch.ones(()))
    for one in model.parameters():
        one.grad = torch.full_like(one, torch.inf if one is first.weight else 1.0)
    prepared.scaler.step(optimizer)
    prepared.scaler.update()
    assert prepared.scaler.nonfinite is not None and prepared.scaler.nonfinite.name == "0.weight"


def test_an_optimizer_owns_no_parameter_that_it_does_not_hold() -> None:
    from lowp.optim.model_state import _owners, own, owner_of

    held, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = lowp.MasterWeights(torch.optim.SGD([held], lr=0.1), storage="bf16")
    own(optimizer, [other])
    assert owner_of(held) is optimizer and owner_of(other) is None
    places = {id(held), id(other)}
    del optimizer
    assert owner_of(held) is None and not places & _owners.keys()
