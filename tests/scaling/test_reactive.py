"""The reactive exponent: changed by one after a saturation."""

from __future__ import annotations

import pytest
import torch

from lowp.errors import InvalidInput
from lowp.scaling import Autoflex, Reactive, ReactiveState, WritesSeen
from lowp.scaling.autoflex import extended


def seen(mantissa: int, overflowed: int, crowded: int, elements: int = 1000) -> WritesSeen:
    counts = [torch.tensor([count]) for count in (overflowed, crowded, elements)]
    return WritesSeen(torch.tensor([mantissa], dtype=torch.int32), None, None, None, *counts)


def started(reactive: Reactive) -> ReactiveState:
    first = reactive.guess.start(reactive.guess.init(), torch.tensor([1.0]))
    return reactive.init()._replace(exponent=first.exponent, started=first.started)


@pytest.mark.parametrize(("overflowed", "crowded", "move"), [(5, 10, 1), (0, 0, -1), (0, 10, 0), (1, 1, -1)])
def test_it_moves_by_one_when_its_period_is_over(overflowed: int, crowded: int, move: int) -> None:
    reactive = Reactive(period=4, rate=1e-3)
    state = started(reactive)
    first = int(state.exponent)
    for write in range(1, 5):
        assert int(state.exponent) == first
        state = reactive.observe(state, seen(32767, overflowed, crowded))
        assert int(state.elements) == (0 if write == 4 else 1000 * write)
    assert int(state.exponent) == first + move
    assert int(state.writes) == 4 and int(state.moved) == abs(move)


def test_writes_without_elements_move_nothing() -> None:
    reactive = Reactive(period=1)
    state = reactive.observe(started(reactive), seen(0, 0, 0, elements=0))
    assert torch.equal(state.exponent, started(reactive).exponent) and int(state.writes) == 1
    assert int(reactive.observe(state, seen(0, 0, 0, elements=1)).exponent) == int(state.exponent) - 1


def test_it_stays_in_the_range() -> None:
    reactive = Reactive(period=1, guess=Autoflex(min_exponent=-14, max_exponent=-14))
    assert int(started(reactive).exponent) == -14
    assert int(reactive.observe(started(reactive), seen(32767, 500, 900)).exponent) == -14
    assert reactive.first_exponent == reactive.init().exponent == -14


def test_what_is_not_finite_or_not_written_counts_for_nothing() -> None:
    reactive = Reactive(period=1)
    state = extended(reactive, started(reactive))
    both = WritesSeen(
        torch.tensor([32767, 5], dtype=torch.int32),
        torch.tensor([True, False]),
        torch.tensor([True, True]),
        None,
        *(torch.tensor([900, 900]) for _ in range(3)),
    )
    after = reactive.observe(state, both)
    assert torch.equal(after.exponent, state.exponent) and after.nonfinite.tolist() == [1, 0]
    assert after.writes.tolist() == [1, 0] and after.saturated.tolist() == [0, 0]
    assert not any(count.any() for count in (after.overflowed, after.crowded, after.elements))


def test_a_hundred_writes_may_have_one_element_in_ten_thousand_overflow() -> None:
    assert (Reactive().period, Reactive().rate) == (100, 1e-4)


def test_a_scale_is_a_power_of_two() -> None:
    reactive = Reactive()
    assert reactive.scale(started(reactive)).tolist() == [2.0 ** int(started(reactive).exponent)]


@pytest.mark.parametrize(("period", "rate"), [(0, 0.1), (1, 1.0), (1, -0.1)])
def test_a_period_and_a_rate_have_their_ranges(period: int, rate: float) -> None:
    with pytest.raises(InvalidInput, match="allowed are 1 write or more, and a share from 0 to below 1"):
        Reactive(period, rate)
