"""Calls out of order and impossible arguments raise errors that explain them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step.cases import INF, NAN, OPTIMIZERS, one_parameter, parameter_of, started
from torch import nn

from lowp.precision import Precision
from lowp.step import GradScaler


def unscale_twice(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_without_gradients(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("misuse", "kind", "text"),
    [
        (unscale_twice, RuntimeError, "unscale_() has already been called on this optimizer since the last update()."),
        (unscale_after_step, RuntimeError, "unscale_() is being called after step()."),
        (step_twice, RuntimeError, "step() has already been called since the last update()."),
        (
            step_without_gradients,
            AssertionError,
            "No inf checks were recorded for this optimizer. None of its parameters",
        ),
        (lambda scaler, _: scaler.update(), AssertionError, "No inf checks were recorded prior to update."),
        (lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 1.0), RuntimeError, "Closure use is not"),
        (lambda scaler, optimizer: scaler.step(optimizer, lambda: 1.0), RuntimeError, "Closure use is not currently"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_calls_out_of_order_are_refused(name: str, misuse: Any, kind: type[Exception], text: str) -> None:
    scaler = started()
    with pytest.raises(kind) as caught:
        misuse(scaler, one_parameter([1.0], name))
    assert text in str(caught.value)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("call", ["step", "unscale_", "update"])
def test_calls_before_scale_are_refused(call: str) -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(
        AssertionError, match=rf"Attempted {call} but _scale is None.  This may indicate your script did"
    ):
        getattr(scaler, call)(*([] if call == "update" else [one_parameter([1.0])]))


@pytest.mark.parametrize("new_scale", [0, 0.0, -1.0, INF, NAN, 1e-39, "1", torch.tensor(0.0), torch.tensor([NAN])])
def test_a_scale_outside_the_bounds_is_refused_and_changes_nothing(new_scale: Any) -> None:
    scaler = started()
    scaler.step(one_parameter([1.0]))
    with pytest.raises(
        ValueError, match=r"new_scale cannot be .*: allowed is a finite number from the floor 1\.1754944e-38"
    ):
        scaler.update(new_scale)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("new_scale", [32.0, 32, torch.tensor(32.0), torch.tensor([32.0])])
def test_a_new_scale_may_be_a_number_or_a_tensor(new_scale: Any) -> None:
    scaler = started()
    scaler.update(new_scale)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("new_scale", [torch.ones(2), torch.ones(1, requires_grad=True), torch.ones(1, device="meta")])
def test_a_tensor_that_is_no_scale_is_refused(new_scale: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"new_scale should be a float or a 1-element .*requires_grad=False"):
        started().update(new_scale)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: GradScaler("cpu", growth_factor=1.0), AssertionError, "growth factor must be > 1.0"),
        (lambda: GradScaler("cpu", backoff_factor=1.0), AssertionError, "backoff factor must be < 1.0"),
        (lambda: GradScaler("cpu", init_scale=0.5, floor=1.0), ValueError, "floor 1 "),
        (lambda: GradScaler("cpu", init_scal=1.0), TypeError, "'init_scal'; did you mean init_scale"),
        (lambda: GradScaler("cpu", 1.0, 2.0, 0.5, 10, True, 3), TypeError, "at most 6 positional arguments"),
        (lambda: GradScaler(1.0, init_scale=2.0), TypeError, "two values for 'init_scale'"),
        (lambda: GradScaler("cpu", loss_scale="high"), ValueError, "loss_scale cannot be 'high'"),
        (lambda: GradScaler("cpu", process_group="some"), ValueError, "process_group cannot be 'some'"),
        (lambda: GradScaler("cpu", patience=0), ValueError, "patience=0"),
        (lambda: GradScaler("cpu", sample_interval=-1), ValueError, "sample_interval=-1"),
        (lambda: GradScaler("cpu").set_growth_factor(0.5), AssertionError, "growth factor must be > 1.0"),
        (lambda: GradScaler("cpu").set_backoff_factor(NAN), AssertionError, "backoff factor must be < 1.0"),
        (lambda: GradScaler("cpu").set_growth_interval(0), ValueError, "growth_interval must be a number of steps"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize("by", ["precision", "scaler"])
@pytest.mark.parametrize("during", ["unscale_", "step"])
def test_after_an_interrupted_step_the_next_one_is_as_after_a_whole_one(by: str, during: str) -> None:
    def weights(interrupted: bool) -> torch.Tensor:
        torch.manual_seed(0)
        precision = Precision("fp16", loss_scale="dynamic(1024)")
        model = nn.Linear(4, 2)
        model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler, x = precision.scaler, torch.randn(8, 4)

        def iterate(interrupt: str | None = None) -> None:
            optimizer.zero_grad()
            with precision.autocast():
                loss = model(x).float().square().mean()
            precision.backward(loss) if by == "precision" else scaler.scale(loss).backward()
            if interrupt == "step":
                handle = optimizer.register_step_pre_hook(_raise)
            if during == "unscale_":
                scaler.unscale_(optimizer)
                if interrupt == "unscale_":
                    raise KeyboardInterrupt
            try:
                precision.step(optimizer) if by == "precision" else (scaler.step(optimizer), scaler.update())
            finally:
                if interrupt == "step":
                    handle.remove()

        iterate()
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                iterate(interrupt=during)
        iterate()
        return model.weight.detach()

    assert torch.equal(weights(interrupted=True), weights(interrupted=False))


def _raise(*_: Any) -> None:
    raise KeyboardInterrupt


def test_after_an_interrupt_between_two_optimizers_a_precision_goes_on() -> None:
    precision = Precision("fp16")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, first = precision.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    second = precision.prepare_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1))

    def iterate() -> None:  # without a call of zero_grad
        with precision.autocast():
            loss = model(torch.ones(1, 4)).float().square().mean()
        precision.backward(loss)
        precision.step(first, second)

    handle = second.register_step_pre_hook(_raise)
    with pytest.raises(KeyboardInterrupt):
        iterate()
    handle.remove()
    iterate()
    assert precision.steps == 1 and precision.stepped


def test_a_scaler_agrees_with_groups_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, size: int) -> None:
            self.size = lambda: size

    scaler, optimizer = started(), one_parameter([1.0])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # one without a gradient
    seen: list[list[Any]] = []
    one, two, three = Group(1), Group(2), Group(3)
    monkeypatch.setattr("lowp.distributed.mesh_groups", lambda found: (seen.append(list(found)), [two, one, three])[1])
    assert scaler._groups(optimizer) == []
    monkeypatch.setattr("lowp.distributed.is_running", lambda: True)
    for group, groups in ((one, []), (two, [two]), (None, [two, three])):
        monkeypatch.setattr("lowp.distributed.resolve", lambda _, group=group: group)
        assert scaler._groups(optimizer) == groups
    assert seen == [[parameter_of(optimizer).grad]]
