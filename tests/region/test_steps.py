"""The rules of a region never apply to a step of an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.region import following
from lowp.region.entries import current_engine

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=False),
    "lowp.optim.AdamW": lambda parameters: lowp.optim.AdamW(parameters, lr=0.1),
}


def stepped(name: str, precision: Any, within: bool) -> list[Tensor]:
    """Return the weights after three steps, each within a region or outside of it, on the same gradients."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    region = lowp.autocast(precision) if within else nullcontext()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        with region:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("precision", ["flex16+5", "bf16", "dfp16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_within_a_region_is_that_outside_of_it(name: str, precision: str) -> None:
    for inside, outside in zip(stepped(name, precision, True), stepped(name, precision, False), strict=True):
        assert torch.equal(inside, outside)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("name", ["flex16+5", "bf16-storage", "fp16"])
def test_precision_step_within_its_region_is_that_outside_of_it(name: str, optimizer: str) -> None:
    def trained(within: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        precision = lowp.Precision(name)
        prepared, prepared_optimizer = precision.prepare(model, OPTIMIZERS[optimizer](model.parameters()))
        for _ in range(4):
            prepared_optimizer.zero_grad()
            with precision.autocast():
                loss = prepared(torch.randn(6, 4)).square().mean()
                if within:
                    precision.backward(loss)
                    precision.step(prepared_optimizer)
            if not within:
                precision.backward(loss)
                precision.step(prepared_optimizer)
        return [value.clone() for value in model.state_dict().values()]

    for inside, outside in zip(trained(True), trained(False), strict=True):
        assert torch.equal(inside, outside) and bool(inside.isfinite().all())


def test_the_closure_of_a_step_is_under_the_rules() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.LBFGS([weight], max_iter=2)
    dtypes: list[torch.dtype] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        result = torch.randn(3, 2) @ weight
        dtypes.append(result.dtype)
        loss = result.float().square().mean()
        loss.backward()
        return loss

    with lowp.autocast("bf16"):
        optimizer.step(closure)
        dtypes.append((torch.randn(3, 2) @ weight).dtype)
    assert len(dtypes) >= 2 and set(dtypes) == {torch.bfloat16}


def test_rules_are_in_force_again_after_a_step_that_has_raised() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    precision = lowp.Precision("flex16+5")
    prepared, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    prepared(torch.tensor([1])).sum().backward()
    with lowp.autocast("bf16"):
        with pytest.raises(InvalidInput, match="is sparse"):
            optimizer.step()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_the_hooks_of_a_step_suspend_its_region_and_wake_it_for_its_closure() -> None:
    optimizer, region = torch.optim.SGD([torch.ones(1)]), lowp.autocast("fp16")

    def closure(*given: object, **named: object) -> tuple[object, ...]:
        """Say what it was given."""
        return product(), given, named

    def begun(*args: object, **kwargs: object) -> Any:
        return following._begin(optimizer, args, kwargs)

    assert begun(optimizer, closure) is None  # in no region
    with region:
        engine = current_engine()
        assert engine is not None and begun(optimizer) is None
        assert product() is torch.float16  # the step that began there has ended
        frame = engine.resting = sys._getframe()
        assert product() is torch.float32 and begun(optimizer, 3) is begun(optimizer, closure=None) is None
        assert engine.resting is frame
        (first, woken, *rest), named = begun(optimizer, closure, 3, a=4)
        assert first is optimizer and rest == [3] and named == {"a": 4} and woken.__doc__ == "Say what it was given."
        assert woken(1, b=2) == (torch.float16, (1,), {"b": 2}) and engine.resting is frame
        args, named = begun(optimizer, closure=closure, a=4)
        assert args == (optimizer,) and list(named) == ["closure", "a"] and named["a"] == 4
        assert named["closure"]() == (torch.float16, (), {}) and product() is torch.float32

        def end_of_another() -> None:
            following._end(optimizer, (), {})

        end_of_another()
        assert engine.resting is frame
        following._end(optimizer, (), {})
        assert engine.resting is None and product() is torch.float16
    following._end(optimizer, (), {})


def test_a_function_at_rest_runs_without_rules_with_all_its_parts() -> None:
    @following.at_rest
    def inner(*given: object, **named: object) -> tuple[object, ...]:
        """Say what it was given."""
        return product(), given, named

    @following.at_rest
    def outer() -> list[object]:
        return [inner(1, a=2), product()]

    @following.at_rest
    def failing() -> None:
        raise ZeroDivisionError

    full, half = torch.float32, torch.float16
    assert inner.__doc__ == "Say what it was given." and inner() == (full, (), {})
    with lowp.autocast("fp16"):
        assert outer() == [(full, (1,), {"a": 2}), full] and product() is half
        with pytest.raises(ZeroDivisionError):
            failing()
        assert product() is half
