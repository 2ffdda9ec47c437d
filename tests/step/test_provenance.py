"""The first non-finite gradient is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step.cases import INF, NAN, OPTIMIZERS, batches, loss_of, make_model, one_parameter, started
from torch import nn

from lowp.step import GradScaler, NonFinite, NonFiniteGradients
from lowp.step.provenance import Latch


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_the_first_nonfinite_gradient_is_named(
    make_optimizer: Callable[..., torch.optim.Optimizer], watched: bool, clipped: bool
) -> None:
    model = make_model()
    scaler = GradScaler("cpu", init_scale=1024.0)
    if watched:
        scaler.watch(model)
    optimizer = make_optimizer(model.parameters() if watched else model.named_parameters())
    for number, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if number == 1:
            model[1].weight.grad[0, 0] = NAN
            model[0].bias.grad[3] = INF
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.nonfinite is not None) == (number >= 1)
    found = scaler.nonfinite
    assert isinstance(found, NonFinite)
    assert (found.name, found.kind, found.step, found.scale) == ("1.weight", "nan", 1, 1024.0)
    assert found.others == ("0.bias",) and found.loss_finite
    assert found.maximum is not None and 0 < found.maximum < 1


def test_the_largest_finite_gradient_is_exact_where_the_host_decides() -> None:
    scaler = started(init_scale=2.0)
    optimizer = one_parameter([[3.0, -8.0], [INF, NAN]])
    scaler.step(optimizer)
    assert str(scaler.nonfinite) == (
        "nan first in the gradient of param_groups[0]['params'][0], shape (2, 2), step 0, "
        "largest finite gradient 4 (8 scaled), loss scale 2"
    )


def test_the_order_is_that_of_backward_and_not_of_definition() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))  # type: ignore[no-any-return]

    model = Crossed()
    scaler = GradScaler("cpu")
    scaler.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():  # of a step without a backward, of which there is nothing to learn
        parameter.grad = torch.zeros_like(parameter)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(model(torch.full((1, 2), 1.0)).sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    found = scaler.nonfinite
    assert found is not None and found.name.startswith("last.") and found.loss_finite is False
    assert "; the loss itself was not finite" in str(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nonfinite_loss_does_not_raise(name: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = OPTIMIZERS[name]([parameter])
    scaler = GradScaler("cpu")
    scaler.scale([parameter.sum() * NAN, parameter.sum()])[0].backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 1.0 and scaler.nonfinite is not None and scaler.nonfinite.loss_finite is False


@pytest.mark.parametrize(
    ("name", "keywords", "steps"),
    [
        ("plain", {"init_scale": 4.0, "floor": 1.0, "patience": 3}, 5),
        ("plain", {"loss_scale": 8.0, "patience": 3}, 3),
        ("fused", {"init_scale": 4.0, "floor": 1.0, "patience": 3}, 9),  # late: nothing was waited for
        ("own", {"loss_scale": 8.0, "patience": 3}, 6),
    ],
)
def test_overflows_that_no_scale_cures_end_in_an_error_with_a_name(name: str, keywords: Any, steps: int) -> None:
    model = make_model()
    scaler = GradScaler("cpu", **keywords)
    scaler.watch(model)
    optimizer = OPTIMIZERS[name](model.parameters())

    def step() -> None:
        scaler.scale(torch.ones(()))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model[0].bias.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(steps - 1):
        step()
    with pytest.raises(NonFiniteGradients) as caught:
        step()
    assert "3 steps in a row were skipped with the loss scale at" in str(caught.value)
    assert "inf first in the gradient of 0.bias" in str(caught.value)
    step()  # the update was done; whoever catches the error can go on


def test_numbers_of_the_latest_skipped_step_are_kept_by_site_and_sites_may_come_later() -> None:
    latch, (yes, no) = Latch(), torch.tensor([True, False])
    assert latch.read() == []
    latch.keep(["a", "b"], torch.tensor([1.0, 2.0]), no)
    assert latch.read() == [("a", 0.0), ("b", 0.0)]
    latch.keep(["a", "b"], torch.tensor([3.0, INF]), yes)
    latch.keep(["c", "b"], torch.tensor([5.0, 6.0]), no)
    assert latch.read() == [("a", 3.0), ("b", INF), ("c", 0.0)]
    latch.keep(["a"], torch.tensor([7.0]), yes)  # what this step has not seen was not bad in it
    assert latch.read() == [("a", 7.0), ("b", 0.0), ("c", 0.0)]
    latch.keep(["c", "a"], torch.tensor([8.0, 9.0]), yes)
    assert latch.read() == [("a", 9.0), ("b", 0.0), ("c", 8.0)]
