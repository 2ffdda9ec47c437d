"""The scaler's additions to torch's: scales that cannot become 0, steps without host reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from step.cases import (
    INF,
    OPTIMIZERS,
    UNREAD,
    CountReads,
    batches,
    loss_of,
    make_model,
    one_parameter,
    parameter_of,
    started,
)
from torch import nn

from lowp.scaling import AdaptiveLossScale, DynamicLossScale, StaticLossScale
from lowp.step import GradScaler, NonFiniteGradients


@pytest.mark.parametrize(
    ("keywords", "scaling"),
    [
        ({}, DynamicLossScale()),
        ({"loss_scale": "dynamic", "init_scale": 8.0}, DynamicLossScale(8.0)),
        ({"init_scale": 128, "dynamic": False}, StaticLossScale(128)),
        ({"init_scale": 128, "loss_scale": "static"}, StaticLossScale(128)),
        ({"loss_scale": 128.0}, StaticLossScale(128.0)),
        ({"loss_scale": AdaptiveLossScale(headroom=2)}, AdaptiveLossScale(headroom=2)),
        ({"target_underflow": 0.01}, AdaptiveLossScale(target_underflow=0.01)),
        (
            {"floor": 1.0, "ceiling": 2.0**20, "hysteresis": 3},
            DynamicLossScale(floor=1.0, ceiling=2.0**20, hysteresis=3),
        ),
    ],
)
def test_the_loss_scale_is_what_the_arguments_say(keywords: dict[str, Any], scaling: Any) -> None:
    scaler = GradScaler("cpu", **keywords)
    assert scaler._scaling == scaling and scaler.get_scale() == scaling.initial


def test_a_static_scale_skips_and_stays() -> None:
    scaler = started(init_scale=128, dynamic=False)
    for gradient in (1.0, INF, 1.0):
        scaler.step(one_parameter([gradient]))
        assert bool(scaler.stepped) == (gradient == 1.0)
        scaler.update()
    assert scaler.get_scale() == 128.0
    moves = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert moves == (1.0, 1.0, 1)
    loaded = GradScaler("cpu")
    loaded.load_state_dict(scaler.state_dict())
    assert (loaded.get_scale(), loaded.get_growth_factor()) == (128.0, 2.0)


def test_a_patience_of_one_step_ends_at_the_first_overflow_that_no_scale_cures() -> None:
    scaler = started(loss_scale=8.0, patience=1, sample_interval=0)
    scaler.step(one_parameter([INF]))
    with pytest.raises(NonFiniteGradients, match="1 steps in a row were skipped with the loss scale at 8"):
        scaler.update()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_stay_finite_whatever_overflows(name: str) -> None:
    """torch's scale underflows to 0 here, and the finite gradient that follows is written into the weights as NaN."""
    scaler = started(patience=10**6)
    optimizer = one_parameter([INF], name)
    for _ in range(200):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-126
    parameter_of(optimizer).grad = torch.tensor([2.0**-126])
    scaler.step(optimizer)
    assert bool(scaler.stepped) and parameter_of(optimizer).tolist() == [0.5]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("explicitly", [False, True])
def test_a_finite_gradient_that_unscaling_would_make_infinite_is_an_overflow(name: str, explicitly: bool) -> None:
    scaler = started(init_scale=2.0**-100)
    optimizer = one_parameter([1e9], name)
    if explicitly:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not bool(scaler.stepped) and parameter_of(optimizer).tolist() == [1.0]


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", UNREAD)
def test_nothing_is_read_with_optimizers_that_skip_by_themselves(name: str, to_list: list[int]) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(8))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = GradScaler("cpu")
    scaler.watch(model)
    mode = CountReads()
    for number, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        with mode:
            scaler.scale(loss).backward()
            if number == 2:
                model[1].weight.grad.fill_(INF)
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            stepped = scaler.stepped
            scaler.update()
        assert bool(stepped) == (number != 2)
    assert (mode.reads, len(to_list)) == (0, 0)


@pytest.mark.usefixtures("as_on_a_device")
def test_other_optimizers_cost_one_read(to_list: list[int]) -> None:
    scaler, mode = GradScaler("cpu"), CountReads()
    optimizer = one_parameter([1.0])
    with mode:
        for _ in range(5):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert (mode.reads, len(to_list)) == (0, 5)


def test_reads_are_counted_at_all() -> None:
    with CountReads() as mode:
        torch.ones(()).item()
    assert mode.reads == 1


def test_learning_rate_schedules_can_follow_the_steps() -> None:
    scaler = started()
    optimizer = one_parameter([1.0])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert not scaler.stepped
    for gradient in (INF, 1.0, INF, 1.0):
        parameter_of(optimizer).grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        if scaler.stepped:
            scheduler.step()
    assert scheduler.get_last_lr() == [0.125]
    assert not scaler.stepped_for(one_parameter([1.0]))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("is_conjugate", [False, True])
def test_complex_gradients_are_unscaled_and_checked(dtype: torch.dtype, is_conjugate: bool) -> None:
    """torch's scaler has no kernel for them: weights of a spectral convolution could not be trained in fp16."""
    scaler = started(init_scale=4.0, sample_interval=1)
    optimizer = one_parameter(torch.tensor([4 + 8j, -2j], dtype=dtype), "plain")
    if is_conjugate:
        parameter_of(optimizer).grad = torch.tensor([4 - 8j, 2j], dtype=dtype).conj()
    scaler.step(optimizer)
    assert bool(scaler.stepped) and parameter_of(optimizer).tolist() == [0.5 - 1j, 1 + 0.25j]
    scaler.update()
    parameter_of(optimizer).grad = torch.tensor([1, complex(0, INF)], dtype=dtype)
    scaler.step(optimizer)
    assert not scaler.stepped and parameter_of(optimizer).tolist() == [0.5 - 1j, 1 + 0.25j]


class OfOthers(torch.Tensor):
    """A subclass, with all of its numbers here."""


class Shard(torch.Tensor):
    """A gradient of which a rank has a part, as a DTensor."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("kind", [OfOthers, Shard])
def test_gradients_of_other_classes_are_unscaled_and_checked(kind: type[torch.Tensor]) -> None:
    scaler = started(init_scale=4.0)
    optimizer = one_parameter([0.0, 0.0], "plain")
    for values, weight in (([4.0, -2.0], [0.5, 1.25]), ([1.0, INF], [0.5, 1.25])):
        parameter_of(optimizer).grad = torch.tensor(values).as_subclass(kind)
        scaler.step(optimizer)
        assert bool(scaler.stepped) is (INF not in values) and parameter_of(optimizer).tolist() == weight
        scaler.update()


@pytest.mark.parametrize("bad", [None, INF, float("nan")])
def test_gradients_are_unscaled_at_once_to_the_bits_of_torchs_method(bad: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 3.0, 65536.0, 2.0**100):
        values = [torch.randn(shape, generator=generator) * scale for shape in ((3, 5), (7,), ())]
        if bad is not None:
            values[1][3] = bad
        parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = started(loss_scale=scale, sample_interval=0)
        results = []
        for at_once in (True, False):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = value.clone()
            if at_once:
                found = scaler._unscaled_at_once(optimizer, torch.tensor(scale))
            else:
                inverse = torch.full((), 1 / scale)
                found = scaler._unscale_grads_(optimizer, inverse, torch.zeros(()), False)
            assert found is not None
            results.append([flag.item() for flag in found.values()])
            results[-1] += [one.grad.view(torch.int32).tolist() for one in parameters if one.grad is not None]
        assert results[0] == results[1] and results[0][0] == (bad is not None)


def test_gradients_are_divided_by_the_scale_of_their_step_also_when_it_changes() -> None:
    scaler, optimizer = started(loss_scale=4.0, sample_interval=0), one_parameter([1.0])
    for scale in (4.0, 4.0, 8.0, 2.0, 4.0):
        scaler.update(scale)
        parameter_of(optimizer).grad = torch.tensor([1.0])
        scaler.unscale_(optimizer)
        assert parameter_of(optimizer).grad == torch.tensor([1.0 / scale])
        flags = list(scaler._found_inf_per_device(optimizer).values())
        assert [flag.item() for flag in flags] == [0.0]
        flags[0].fill_(1.0)  # the flag of this step alone
        scaler.step(optimizer)
        assert not scaler.stepped
        assert scaler._inverse is not None and scaler._inverse[0] == scale
    scaler.update()
    assert "_inverse" not in scaler.__getstate__() and copy.deepcopy(scaler)._inverse is None


def test_gradients_that_need_more_than_one_pass_are_not_unscaled_at_once() -> None:
    scaler, optimizer = started(sample_interval=0), one_parameter([1.0, 2.0])
    assert scaler._unscaled_at_once(optimizer, torch.tensor(2.0)) is not None
    assert started()._unscaled_at_once(optimizer, torch.tensor(2.0)) is None  # exponents are counted in its first step
    assert scaler._unscaled_at_once(optimizer, torch.tensor(0.5)) is None  # the division could overflow
    assert scaler._unscaled_at_once(optimizer, torch.tensor(float("nan"))) is None
    assert scaler._unscaled_at_once(one_parameter([1.0], dtype=torch.float16), torch.tensor(2.0)) is None
    parameter = parameter_of(optimizer)
    (of_graph,) = torch.autograd.grad((parameter**2).sum(), parameter, create_graph=True)
    parameter.grad = of_graph
    assert scaler._unscaled_at_once(optimizer, torch.tensor(2.0)) is None


def test_whether_an_optimizer_stepped_is_told_of_it_alone() -> None:
    scaler, first, second = started(), one_parameter([1.0]), one_parameter([INF])
    scaler.step(first)
    scaler.step(second)
    assert bool(scaler.stepped_for(first)) and not scaler.stepped_for(second)
    assert not scaler.stepped_for(one_parameter([1.0]))
