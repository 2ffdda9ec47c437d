"""Steps of weights under shared exponents, all at once: the bits and observations of one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.exponents import ExponentTable, SharedExponents, StepWriter
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16 import payloads
from lowp.optim.exponents import UnderExponents

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Moving(torch.optim.SGD):
    """An optimizer that puts its parameters into other memory."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.data = one.data - 0.1 * one.grad


class Large(torch.optim.SGD):
    """An optimizer that leaves every second weight beyond the largest that its exponent holds."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for one in group["params"][::2]:
                one.add_(one.grad, alpha=-1e3)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01),
    "other memory": lambda given: Moving(given, lr=0.1),
    "beyond": lambda given: Large(given, lr=0.1),
}


def trained(make: Make, before: Callable[[torch.optim.Optimizer], None] | None = None) -> list[Any]:
    """Weights, moments and what is remembered of sites, after each step; one weight is set from outside."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False), nn.LayerNorm(3))
    numbers, found = lowp.Precision("flex16+5"), list[Any]()
    model, optimizer = numbers.prepare(model, make(list(model.parameters())))
    if before is not None:
        before(optimizer)
    x = torch.randn(4, 6)
    for step in range(5):
        with numbers.autocast():
            loss = model(x).square().mean()
        numbers.backward(loss)
        if step == 2:
            with torch.no_grad():
                next(model.parameters()).fill_(0.123456)
        numbers.step(optimizer)
        optimizer.zero_grad()
        assert numbers.exponents is not None
        found += [one.detach().clone() for one in model.parameters()]
        found += [one.clone() for kept in optimizer.state.values() for one in kept.values() if isinstance(one, Tensor)]
        found += [(site, numbers.exponents.exponent(site)) for site in numbers.exponents.sites()]
        found.append(str(numbers.exponents.summary()))
    return found


def are_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.filterwarnings("ignore:.*numbers beyond the largest")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:step .* most numbers were cut off:UserWarning")
def test_a_step_of_all_weights_has_the_bits_of_one_after_the_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, bool]] = []
    end = StepWriter.end

    def noted(self: StepWriter, *given: Any) -> tuple[dict[Tensor, Tensor], list[int]]:
        moved, rest = end(self, *given)
        if self.weights:
            done.append((len(self.weights), not moved))
        return moved, rest

    monkeypatch.setattr(StepWriter, "end", noted)
    at_once = trained(make)
    if uses_library():  # the first step begins the exponents, and in the third a weight is not in the format
        assert make is OPTIMIZERS["beyond"] or (len(done) == 4 and done[1][0] <= 4)
        assert {is_done for _, is_done in done} == {make is not OPTIMIZERS["other memory"]}
    monkeypatch.setattr(ExponentTable, "is_quick", property(lambda one: False, lambda *given: None), raising=False)
    monkeypatch.setattr(payloads, "are_exact", lambda every, cast: [payloads.is_exact(one, cast) for one in every])
    one_by_one = trained(make)
    assert len(at_once) == len(one_by_one) and all(map(are_same, at_once, one_by_one))


def test_gradients_that_a_hook_of_the_step_has_changed_are_written() -> None:
    def double(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.data.mul_(1.37)

    seen: list[bool] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        cast = lowp.casts.parse("flex16+5")
        seen.extend(payloads.is_exact(one.grad, cast) for group in optimizer.param_groups for one in group["params"])

    def hook(optimizer: Any) -> None:
        optimizer.register_step_pre_hook(double)
        optimizer.inner.register_step_pre_hook(look)

    trained(OPTIMIZERS["SGD"], hook)
    assert all(seen) and len(seen) == 5 * 5


def test_a_parameter_group_that_is_added_between_steps_is_trained() -> None:
    torch.manual_seed(0)
    numbers, first, second = lowp.Precision("flex16+5"), nn.Linear(3, 3), nn.Linear(3, 3)
    first_again, optimizer = numbers.prepare(first, torch.optim.SGD(first.parameters(), lr=0.1))
    before = second.weight.detach().clone()
    for _ in range(3):
        with numbers.autocast():
            loss = second(first_again(torch.ones(2, 3))).sum()
        numbers.backward(loss)
        numbers.step(optimizer)
        optimizer.zero_grad()
        if len(optimizer.param_groups) == 1:
            optimizer.inner.add_param_group({"params": list(second.parameters())})  # type: ignore[attr-defined]
    assert not torch.equal(second.weight, before)
    assert payloads.is_exact(second.weight.detach(), lowp.casts.parse("flex16+5"))


@pytest.mark.parametrize(
    ("numbers", "flex", "dfp"),
    [
        ([-1.0, 2.0**-15], True, False),  # -32768 is the lowest mantissa of one, -32767 of the other
        ([1.0, 2.0**-15], False, False),
        ([-1.0, 2.0**-14], True, True),
        ([-1.5, 2.0**-15], False, False),
        ([-(2.0**-16), 2.0**-31], True, False),  # the smallest exponent of flex16+5
        ([-(2.0**-17), 2.0**-32], False, False),
    ],
)
def test_parts_of_a_tensor_are_exact_where_one_exponent_holds_all_their_numbers(
    numbers: list[float], flex: bool, dfp: bool
) -> None:
    for name, expected in (("flex16+5", flex), ("dfp16", dfp)):
        storage = UnderExponents(lowp.casts.parse(name), "none", SharedExponents(), {})
        assert storage.are_exact([torch.tensor(numbers)]) == [expected]
