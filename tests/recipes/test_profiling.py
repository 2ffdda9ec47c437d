"""A recipe is profiled until enough was seen, and a policy is compared over the steps that were asked for."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

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
