"""Outcomes of a step: skipped or taken, with or without a loss scale, and misplaced calls."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowp
from lowp.errors import InvalidInput, Misuse
from lowp.exponents import learning
from lowp.kernels.choose import hardware
from lowp.kernels.int16.late import LateNumber
from lowp.step import NonFiniteGradients
from lowp.step.guard import StepGuard


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
def test_a_run_in_fp32_that_turns_non_finite_says_so_once() -> None:
    training = _training("fp32")
    _step(training)
    with pytest.warns(UserWarning, match=r"step 2: the loss or a gradient is infinite or NaN, and fp32 has no loss"):
        _step(training, factor=torch.inf)
    _step(training)


def test_a_run_in_fp32_whose_loss_nobody_showed_says_so_by_its_gradients() -> None:
    model, optimizer, precision = _training("fp32")
    (_loss(model, precision) * torch.nan).backward()
    with pytest.warns(UserWarning, match=r"skip such steps: Precision\(.*or --loss-scale dynamic in lowp run"):
        precision.step(optimizer)


UNSCALED = ["bf16", "bf16-storage", "bf16-trunc", "bf16-tpu", "fp8", "dfp16", "flex16+5", "e5m7"]


def _adam(name: str) -> tuple[nn.Module, torch.optim.Optimizer, lowp.Precision]:
    """Return a model with running statistics and Adam in a precision without a loss scale, after three steps."""
    torch.manual_seed(0)
    precision = lowp.Precision(name, loss_scale="none")
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    training = *precision.prepare(model, torch.optim.Adam(model.parameters(), 1e-2)), precision
    for _ in range(3):
        _spoiled(training)
    return training


def _spoiled(
    training: tuple[nn.Module, torch.optim.Optimizer, lowp.Precision], key: str = "", value: float = 0.0
) -> None:
    """Take a step in which a number of the last weight's gradient, or of its state, is overwritten."""
    model, optimizer, precision = training
    with precision.autocast():
        loss = model(torch.linspace(-1, 1, 8).reshape(4, 2)).float().square().mean()
    precision.backward(loss)
    weight = list(model.parameters())[-2]
    if key:
        tensor = weight.grad if key == "gradient" else optimizer.state[weight][key]
        assert tensor is not None
        tensor.view(-1)[1] = value
    precision.step(optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize("name", UNSCALED)
@pytest.mark.parametrize(
    "key, value", [("gradient", torch.inf), ("gradient", torch.nan), ("exp_avg", torch.nan), ("exp_avg_sq", torch.inf)]
)
def test_what_is_not_finite_under_a_finite_loss_is_not_applied_and_is_named(name: str, key: str, value: float) -> None:
    model, optimizer, precision = training = _adam(name)
    before = {one: tensor.clone() for one, tensor in model.state_dict().items() if "num_batches" not in one}
    moments = [entry["exp_avg"].clone() for entry in list(optimizer.state.values())[:-2]]
    with pytest.warns(UserWarning, match=rf"first in the {key} of 2.weight: .*, and step 4 was skipped"):
        _spoiled(training, key, value)
    assert not precision.stepped and precision.skipped_steps == 1 and precision.faults == [f"{key} of 2.weight"]
    after = model.state_dict()
    assert all(torch.equal(after[one], tensor) for one, tensor in before.items())
    kept = [entry["exp_avg"] for entry in list(optimizer.state.values())[:-2]]
    assert all(torch.equal(one, old) for one, old in zip(kept, moments, strict=True))
    if key == "gradient":
        _spoiled(training)
        assert precision.stepped and not torch.equal(model.state_dict()["2.weight"], before["2.weight"])


@pytest.mark.parametrize("name", ["bf16", "bf16-storage"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_device_skips_by_itself_and_is_told_of_later(
    name: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, precision = training = _adam(name)
    inner = getattr(optimizer, "inner", optimizer)
    inner._step_supports_amp_scaling = inner.defaults["fused"] = inner.param_groups[0]["fused"] = is_fused
    monkeypatch.setattr(hardware, "is_on_host", lambda x: False)
    before = {one: tensor.clone() for one, tensor in model.state_dict().items() if "num_batches" not in one}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _spoiled(training, "gradient", torch.inf)
        assert not precision.stepped and precision.faults == ["gradient of 2.weight"]
        after = model.state_dict()
        if is_fused:
            assert all(torch.equal(after[one], tensor) for one, tensor in before.items())
        assert all(tensor.isfinite().all() for tensor in after.values())
        for _ in range(3):
            _spoiled(training)
    assert precision.stepped and precision.skipped_steps == 1
    (one,) = told
    assert f"{name} has no loss scale, and 1 of the steps up to 5 were skipped" in str(one.message)
    assert linecache.getline(one.filename, one.lineno).strip() == "precision.step(optimizer)"


def test_a_device_skips_by_its_flags_of_what_was_written_under_shared_exponents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    model, _, precision = training = _adam("flex16+5")
    before = [one.clone() for one in model.parameters()]
    _spoiled(training, "gradient", torch.inf)
    assert not precision.stepped and precision.faults == ["gradient of 2.weight"]
    assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    _spoiled(training)
    assert precision.stepped and precision.skipped_steps == 1


def test_state_written_past_autograd_is_seen_within_sixteen_steps() -> None:
    training = _adam("bf16")
    next(iter(training[1].state.values()))["exp_avg_sq"].numpy()[0] = np.inf  # which makes each update a zero
    for _ in range(13):
        _spoiled(training)
    with pytest.warns(UserWarning, match=r"first in the exp_avg_sq of 0.weight: .*, and step 17 was skipped"):
        _spoiled(training)


def test_a_run_of_which_nothing_is_finite_any_more_ends_in_an_error_that_names_it() -> None:
    training = _adam("bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(19):
            _spoiled(training, "gradient", torch.nan)
        text = (
            "first in the gradient of 2.weight: bf16 has no loss scale, and step 23 was skipped, as were the 19 steps"
        )
        with pytest.raises(NonFiniteGradients, match=text):
            _spoiled(training, "gradient", torch.nan)
        assert training[2].skipped_steps == 20


def test_an_infinite_loss_with_finite_gradients_is_told_once() -> None:
    model, optimizer, precision = _training("bf16")
    told = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            precision.backward(_loss(model, precision) + torch.inf)
            precision.step(optimizer)
        assert precision.stepped
        told.append(sum("no gradient is, so that the step was taken" in str(one.message) for one in said))
    assert told == [1, 0]


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
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _step(training)
    assert not [one for one in said if "are cut off" in str(one.message)], "it is told once"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NonFiniteGradients, match=r"weights for 20 steps in a row: look at the learning rate"):
            for _ in range(40):
                _step(training)


def test_a_result_that_is_mostly_cut_off_at_a_place_that_saw_smaller_ones_is_told_once() -> None:
    model, optimizer, precision = _training("flex16+5", lr=1e-6)
    told = []
    for size in (1.0, 1.0, 400.0, 1e5, 1.0):
        with warnings.catch_warnings(record=True) as said, precision.autocast():
            warnings.simplefilter("always")
            precision.backward(model(torch.full((4, 4), size)).square().mean())
            precision.step(optimizer)
        told.append([str(one.message) for one in said if "most numbers were cut off in the output" in str(one.message)])
    assert [len(one) for one in told] == [0, 0, 1, 0, 0] and "step 3: " in told[2][0]


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
    for hopeless in (True, True, False, True, True, True, True, True, True):
        guard.count(hopeless)
        given_up.append(guard.too_many())
    assert given_up == [False] * 5 + [True, False, False, True]


def test_a_guard_of_one_step_gives_up_when_it_has_read_of_a_hopeless_one() -> None:
    guard = StepGuard(patience=1)
    assert [guard.too_many(torch.tensor(count)) for count in (0, 1, 0, 0)] == [False, False, True, False]


def test_a_loss_that_is_bad_is_told_though_the_gradients_are_not() -> None:
    model, optimizer, precision = _training("fp32")
    with precision.autocast():
        precision.backward(model(torch.ones(4, 4)).sum() + torch.inf)
    with pytest.warns(UserWarning, match="step 1: the loss or a gradient is infinite or NaN"):
        precision.step(optimizer)


@pytest.mark.parametrize("known", [True, False])
def test_what_the_host_knows_of_a_step_counts_as_its_flag_does(known: bool) -> None:
    by_host, by_flag = StepGuard(patience=3), StepGuard(patience=3)
    norms = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for guard, norm, stepped in zip((by_host, by_flag), norms, (known, torch.tensor(known)), strict=True):
        guard.protect(norm)
        norm(torch.full((4, 2), 9.0))
        guard.settle(stepped)
    assert by_host.skipped_steps == by_flag.skipped_steps == int(not known)
    assert [by_host.newly_skipped() for _ in range(3)] == [0, 0, 0], "the host has told of it"
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


@pytest.mark.parametrize("spoiled", ["dense", "sparse"])
def test_an_infinity_is_found_in_the_gradients_of_either_of_two_optimizers(spoiled: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"sparse": nn.Embedding(8, 4, sparse=True), "dense": nn.Linear(4, 2)})
    precision = lowp.Precision("bf16")
    precision.prepare_model(model)
    optimizers = [precision.prepare_optimizer(torch.optim.SGD(model[name].parameters(), 0.1)) for name in model]
    for factor in (1.0, torch.inf):
        before = [one.detach().clone() for one in model.parameters()]
        with precision.autocast():
            loss = model["dense"](model["sparse"](torch.arange(4))).sum()
        precision.backward(loss)
        for one in model[spoiled].parameters():
            assert one.grad is not None
            one.grad *= factor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            precision.step(*optimizers)
        kept = all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
        assert kept == (factor == torch.inf)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert precision.skipped_steps == 1
