"""A recipe is profiled until enough was seen, and a policy is compared over the steps that were asked for."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowp.presets import PRESETS
from lowp.recipes import profiling
from lowp.recipes.profiling import Verified, profiled, verified
from lowp.recipes.training import Settings, Training

SETTINGS = Settings("digits", batch=100, epochs=1)  # twelve steps


class Told:
    def __init__(self) -> None:
        self.progress: list[tuple[int, int]] = []

    def __call__(self, taken: int, steps: int) -> None:
        self.progress.append((taken, steps))


def test_a_number_of_steps_is_taken_and_told_of() -> None:
    told = Told()
    record = profiled(SETTINGS, 3, None, on_progress=told)
    assert told.progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert record.complete and record.header["title"] == "digits, fp32"


def test_a_stop_is_heeded_behind_the_first_step() -> None:
    told = Told()
    profiled(SETTINGS, 3, None, stop=lambda: True, on_progress=told)
    assert told.progress == [(0, 3), (1, 3)]


@pytest.mark.parametrize(
    ("looks", "seconds", "last"), [(1, math.inf, 4), (5, math.inf, 9), (1000, 0.0, 4), (1000, 2.5, 6)]
)
def test_without_a_number_it_goes_on_until_it_has_looked_often_enough_or_the_time_is_over(
    looks: int, seconds: float, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_STEPS", 4), ("_LOOKS", looks), ("_SECONDS", seconds)):
        monkeypatch.setattr(profiling, name, value)
    clock = itertools.count(1000)  # it does not begin at zero
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    """Without a bound of the overhead it looks at the steps 0, 1, 2, 4 and 8."""
    told = Told()
    profiled(SETTINGS, None, None, on_progress=told)
    assert told.progress == [(taken, max(taken, 4)) for taken in range(last + 1)]


@pytest.mark.parametrize(("steps", "compared"), [(2, 2), (None, 12)])
def test_a_policy_is_compared_over_the_steps_given_or_those_of_the_recipe(steps: int | None, compared: int) -> None:
    found = verified(SETTINGS, PRESETS["fp32"].policy, steps)
    assert (found.steps, found.whole, found.skipped) == (compared, 12, 0)
    training = Training(SETTINGS)
    losses = training.take(lambda taken: taken >= compared)
    assert found.losses == (losses[-1], losses[-1]) and found.first == losses[0] and found.holds
    assert set(found.errors) == {"flushed in fp16", "lost in pure bf16"} and max(found.errors.values()) < 0.05
    assert len(found.layers) == 4


@pytest.mark.parametrize(
    ("policy", "fp32", "holds"),
    [
        (1.19, 1.0, True),  # a tenth of the decrease from 3
        (1.21, 1.0, False),
        (0.5, 1.0, True),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (3.14, 3.0, True),  # without a decrease a twentieth of the loss
        (3.16, 3.0, False),
    ],
)
def test_a_policy_holds_up_to_a_tenth_of_the_decrease_in_fp32(policy: float, fp32: float, holds: bool) -> None:
    found = Verified(5, 9, (fp32, policy), 3.0, 2, {"lost": 0.5})
    assert found.holds == holds
    assert str(found) == (
        f"verified over 5 of the recipe's 9 steps: loss {policy:.4f} beside {fp32:.4f} in fp32, "
        f"{'as fp32' if holds else 'NOT as fp32'}; 2 steps skipped\nerror of the predictions: lost 5.0e-01"
    )


def test_a_layer_that_is_cast_alone_changes_the_loss_by_what_is_told_and_is_put_back() -> None:
    training = Training(SETTINGS)
    model, batch = training.model, training.data.training.batch(torch.arange(training.batch))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    found = profiling.confirmed(training, "e2m1")
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(torch.equal(one.grad, torch.ones_like(one)) for one in model.parameters() if one.grad is not None)
    assert [one.role for one in found] == ["weight"] * 2 + ["output"] * 2
    for role in ("weight", "output"):
        sizes = [one.predicted for one in found if one.role == role]
        assert sizes == sorted(sizes, reverse=True) and {one.module for one in found if one.role == role} == {"0", "2"}
    (first, *_), (only, other) = profiling.confirmed(training, "e2m1", 1), found[:2]
    assert first.module == only.module and first.real == only.real != other.real
    loss = training.recipe.loss(model, batch)
    with torch.no_grad():
        for one in found:
            layer: Any = model.get_submodule(one.module)
            with profiling._cast(layer, one.role, "e2m1"):
                cast = training.recipe.loss(model, batch)
                assert (one.role == "weight") != torch.equal(layer.weight, before[f"{one.module}.weight"])
            assert 0 < one.real == pytest.approx(abs(float(cast) - float(loss)), abs=1e-6)
    assert torch.equal(training.recipe.loss(model, batch), loss)
    assert str(found[0]) == f"{found[0].module} weight: {found[0].predicted:.1e} predicted, {found[0].real:.1e} real"
    assert str(profiling.Confirmed("", "output", 1.0, 2.0)) == "the model output: 1.0e+00 predicted, 2.0e+00 real"


def test_predicted_shares_are_compared_with_those_of_casts() -> None:
    weights = [torch.nn.Parameter(torch.full((8,), 1.0)) for _ in range(3)]
    weights[0].grad = torch.tensor([2.0**-26, 2.0**-27, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])  # two of seven are flushed
    weights[1].grad = torch.tensor([2.0**-8, 1.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    optimizer = torch.optim.SGD(weights, lr=2.0**-4)
    errors = profiling._errors(SimpleNamespace(optimizer=optimizer))  # type: ignore[arg-type]
    assert errors == {"flushed in fp16": 0.0, "lost in pure bf16": 0.0}
    lost = profiling._is_lost(torch.ones(3), torch.tensor([2.0**-10, -(2.0**-6), 0.0]), "bf16")
    assert lost.tolist() == [True, False, True]
