"""Delayed maxima: the history of each entry, what is remembered and what is not."""

from __future__ import annotations

import torch

from lowp.scaling import Autoflex, Reactive
from lowp.scaling.autoflex import extended
from lowp.scaling.delayed import DelayedMaximum, MaximaSeen


def fed(scaling: DelayedMaximum, *steps: float) -> list[float]:
    """Return the maximum that each further step is scaled for."""
    state, found = scaling.init(), []
    for value in steps:
        state = scaling.observe(state, MaximaSeen(torch.tensor([value]), torch.tensor([True])))
        found.append(float(scaling.scale(state)))
    return found


def test_the_largest_of_the_window_is_taken_and_then_forgotten() -> None:
    assert fed(DelayedMaximum(3), 1.0, 8.0, 2.0, 3.0, 1.0, 1.0) == [1.0, 8.0, 8.0, 8.0, 3.0, 3.0]


def test_a_window_of_one_is_the_most_recent_maximum() -> None:
    assert fed(DelayedMaximum(1), 1.0, 8.0, 2.0, 3.0) == [1.0, 8.0, 2.0, 3.0]


def test_headroom_is_a_margin_of_powers_of_two() -> None:
    assert fed(DelayedMaximum(2, headroom=3), 1.0, 4.0) == [8.0, 32.0]


def test_what_is_not_finite_is_counted_and_not_remembered() -> None:
    scaling = DelayedMaximum(2)
    assert fed(scaling, 5.0, torch.inf, torch.nan, 1.0, 1.0) == [5.0, 5.0, 5.0, 5.0, 1.0]
    state = scaling.observe(scaling.init(), MaximaSeen(torch.tensor([torch.nan]), torch.tensor([True])))
    assert (state.nonfinite.item(), state.writes.item(), state.known.item()) == (1, 1, 0)


def test_entries_that_were_not_written_stay_as_they_are() -> None:
    scaling = DelayedMaximum(2)
    state = extended(scaling, scaling.init())
    state = scaling.observe(state, MaximaSeen(torch.tensor([3.0, 0.0]), torch.tensor([True, False])))
    after = scaling.observe(state, MaximaSeen(torch.tensor([9.0, 2.0]), torch.tensor([False, True])))
    assert scaling.scale(after).tolist() == [3.0, 2.0] and after.writes.tolist() == [1, 1]
    after = scaling.observe(after, MaximaSeen(torch.tensor([torch.nan, 1.0]), torch.tensor([False, True])))
    assert after.nonfinite.tolist() == [0, 0]


def test_no_two_parts_of_a_state_lie_in_the_same_memory() -> None:
    for scaling in (DelayedMaximum(), Autoflex(), Reactive()):
        parts = scaling.init(entries=3)
        assert len({one.data_ptr() for one in parts}) == len(parts)
    assert (DelayedMaximum().window, DelayedMaximum().headroom) == (16, 0)


def test_steps_beyond_their_scale_are_counted_from_the_second_on() -> None:
    scaling = DelayedMaximum(4, headroom=1)
    for values in ((8.0, 16.0, 33.0, 8.0), (0.125, 0.25, 0.5078125, 0.0)):  # twice the largest so far is held
        state = scaling.init()
        for value in values:
            state = scaling.observe(state, MaximaSeen(torch.tensor([value]), torch.tensor([True])))
        assert state.saturated.item() == 1
