"""Outcomes of a step: skipped or taken, with or without a loss scale, and misplaced calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import InvalidInput, Misuse
from lowp.grad_scaler import NonFiniteGradients
from lowp.kernels.late import LateNumber
from lowp.step_guard import StepGuard


def _training(name: str, lr: float = 0.1, **options: Any) -> tuple[nn.Module, Any, lowp.Precision]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    precision = lowp.Precision(name, **options)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return model, optimizer, precision


def _loss(model: nn.Module, precision: lowp.Precision, factor: float = 1.0) -> torch.Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    with precision.autocast():
        return nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)) * factor


def _step(training: tuple[nn.Module, Any, lowp.Precision], factor: float = 1.0) -> None:
    model, optimizer, precision = training
    optimizer.zero_grad()
    precision.backward(_loss(model, precision, factor))
    precision.step(optimizer)


# -- calls that belong elsewhere --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fp16", "fp16-storage", "e5m7"])
def test_a_step_of_the_optimizer_on_scaled_gradients_is_refused_and_changes_nothing(name: str) -> None:
    model, optimizer, precision = _training(name, loss_scale="dynamic(65536)")
    before = [one.detach().clone() for one in model.parameters()]
    precision.backward(_loss(model, precision))
    with pytest.raises(Misuse, match=r"multiplied by the loss scale 65536: call precision.step\(optimizer\), which"):
        optimizer.step()
    assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    precision.step(optimizer)
    assert precision.stepped


def test_optimizers_of_other_models_and_unscaled_gradients_step_as_they_like() -> None:
    model, optimizer, precision = _training("fp16")
    precision.backward(_loss(model, precision))
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], lr=1.0).step()
    assert other.tolist() == [0.0, 0.0]
    precision.unscale_(optimizer)
    optimizer.step()


def test_without_a_loss_scale_the_optimizer_may_step_by_itself() -> None:
    model, optimizer, precision = _training("bf16")
    precision.backward(_loss(model, precision))
    optimizer.step()


@pytest.mark.parametrize("call", ["step", "unscale_"])
@pytest.mark.parametrize("first", [False, True])
def test_a_forgotten_backward_of_the_precision_is_named(call: str, first: bool) -> None:
    model, optimizer, precision = training = _training("fp16")
    if not first:
        _step(training)
    _loss(model, precision).backward()
    with pytest.raises(Misuse, match=rf"{call}\(\) needs precision.backward\(loss\) since the last step: .* divide"):
        getattr(precision, call)(optimizer)


# -- runs without a loss scale ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-storage", "fp8", "dfp16"])
def test_a_run_that_turns_non_finite_says_so_once(name: str) -> None:
    training = _training(name)
    _step(training)
    with pytest.warns(UserWarning, match=rf"step 2: the loss or a gradient is infinite or NaN, and {name} has no loss"):
        _step(training, factor=torch.inf)
    _step(training)


def test_a_run_whose_loss_nobody_showed_says_so_by_its_gradients() -> None:
    model, optimizer, precision = _training("bf16")
    (_loss(model, precision) * torch.nan).backward()
    with pytest.warns(UserWarning, match=r"skip such steps: Precision\(.*or --loss-scale dynamic in lowp run"):
        precision.step(optimizer)


def test_the_loss_scale_that_is_advised_skips_such_steps() -> None:
    model, _, precision = training = _training("bf16", loss_scale="dynamic")
    before = [one.detach().clone() for one in model.parameters()]
    _step(training, factor=torch.inf)
    assert precision.skipped_steps == 1
    assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))


def test_weights_that_shared_exponents_cannot_hold_end_in_an_error() -> None:
    training = _training("flex16+5", lr=1e30)
    with pytest.warns(UserWarning, match=r"step 1: numbers beyond the largest of flex16\+5 are cut off, first in the"):
        _step(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NonFiniteGradients, match=r"weights for 20 steps in a row: look at the learning rate"):
            for _ in range(40):
                _step(training)


# -- the guard itself -------------------------------------------------------------------------------------------------
def test_a_guard_counts_puts_statistics_back_and_gives_up() -> None:
    guard, norm = StepGuard(patience=3), nn.BatchNorm1d(2)
    guard.protect(norm)
    assert guard.skipped_steps == 0 and guard.stepped is None
    for stepped in (True, False):
        norm(torch.full((4, 2), 9.0))
        kept = float(norm.running_mean[0])
        guard.settle(torch.tensor(stepped))
        assert (float(norm.running_mean[0]) == kept) == stepped
    assert guard.skipped_steps == 1
    given_up = []
    for hopeless in (True, True, False, True, True, True):
        guard.count(hopeless)
        given_up.append(guard.too_many())
    assert given_up == [False] * 5 + [True]


@pytest.mark.parametrize("known", [True, False])
def test_what_the_host_knows_of_a_step_counts_as_its_flag_does(known: bool) -> None:
    by_host, by_flag = StepGuard(patience=3), StepGuard(patience=3)
    norms = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for guard, norm, stepped in zip((by_host, by_flag), norms, (known, torch.tensor(known)), strict=True):
        guard.protect(norm)
        norm(torch.full((4, 2), 9.0))
        guard.settle(stepped)
    assert by_host.skipped_steps == by_flag.skipped_steps == int(not known)
    assert torch.equal(norms[0].running_mean, norms[1].running_mean)
    assert by_host.stepped is not None and by_host.stepped.dtype is torch.bool and bool(by_host.stepped) is known
    by_host.stepped.logical_not_()  # the caller's own: what is remembered stays
    assert bool(by_host.stepped) is known
    assert by_host.turned_bad(not known) is (not known)


def test_a_number_is_read_after_it_was_sent() -> None:
    number = LateNumber()
    assert number.read() is None and not number.is_under_way
    number.send(torch.tensor(7))
    assert number.read() == 7 and not number.is_under_way


# -- torch's fused SGD ------------------------------------------------------------------------------------------------
@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """Fill memory that torch allocates without writing with NaN, so that unwritten elements are detected."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_skipped_first_step_of_fused_sgd_leaves_no_uninitialised_momentum(
    dampening: float, masters: bool, uninitialised_is_nan: None
) -> None:
    found = []
    for skips in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 4096))
        inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9, dampening=dampening, fused=True)
        optimizer = lowp.MasterWeights(inner) if masters else inner
        scaler = lowp.GradScaler("cpu", init_scale=4.0, backoff_factor=0.999, growth_interval=1000)
        for factor in [torch.inf] * skips + [1.0, 2.0]:
            scaler.scale(torch.ones(()))
            weight.grad = torch.full_like(weight, factor) * scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
        found.append(weight.detach().float())
    assert torch.allclose(found[0], found[1], atol=1e-2)


# -- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options, text",
    [
        ({"accumulate": 16}, "accumulate=16: give a format and a block of products as text: fp16/16"),
        ({"loss_scale": 2**70}, "must be finite and lie between its floor 1.0 and its ceiling"),
        ({"seed": "x"}, "seed='x': give a whole number"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        lowp.Precision("fp16", **options)


def test_a_scale_beyond_64_bits_is_a_scale() -> None:
    assert lowp.GradScaler("cpu", init_scale=2**70).scale(torch.ones(())) == 2.0**70
    with pytest.raises(InvalidInput, match="allowed is a finite number"):
        lowp.GradScaler("cpu", init_scale=10**400)
