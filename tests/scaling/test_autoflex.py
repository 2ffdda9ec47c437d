"""Autoflex as specified: the initial estimate, the prediction, the ring of maxima, and faults."""

from __future__ import annotations

import math
from statistics import pstdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowp.errors import InvalidInput
from lowp.scaling import Autoflex, WritesSeen
from lowp.scaling.autoflex import extended

AS_PUBLISHED = Autoflex(warm_headroom=0)


def _by_the_paper(maxima: list[float], window: int = 16, bits: int = 16) -> list[int]:
    """Algorithms 1 and 2, one tensor at a time, in plain Python: an independent oracle."""
    limit, half = 2 ** (bits - 1) - 1, 2 ** (bits - 2)
    exponents: list[int] = []
    history: list[float] = []
    exponent, started = -8, False

    def mantissa(value: float) -> int:
        return min(round(math.ldexp(value, -exponent)), limit)  # Python rounds ties to even

    for value in maxima:
        if not started:
            if value == 0:
                exponent = 0
            else:
                exponent, started = -8, True
                for _ in range(10):
                    top = mantissa(value)
                    length = max(top.bit_length(), 1)
                    wanted = exponent + (bits - 1) // 2 if top >= limit else exponent + length - (bits - 1)
                    if half <= top < limit:
                        break
                    before, exponent = top, min(max(wanted, -31), 0)
                    if (before >= limit and exponent != wanted) or (32 <= before < half):
                        break
        elif history:
            chi = max(history) + 3 * pstdev(history) + 100 * math.ldexp(1, exponent)
            exponent = min(max(math.frexp(chi)[1] - 1 - (bits - 2), -31), 0)
        exponents.append(exponent)
        top = mantissa(value)
        if top >= limit:
            history, top = [], 2 * top
        if top:
            history = [*history, math.ldexp(top, exponent)][-window:]
    return exponents


maxima = st.floats(min_value=2.0**-30, max_value=2.0**13)


@settings(max_examples=30)
@given(st.lists(maxima, min_size=1, max_size=40), st.sampled_from([(16, 16), (16, 16), (1, 8), (5, 4), (4, 5)]))
def test_any_sequence_of_maxima_gives_the_exponents_of_the_paper(values: list[float], sizes: tuple[int, int]) -> None:
    window, bits = sizes
    assert Autoflex(bits, window, warm_headroom=0).replay(values) == _by_the_paper(values, window, bits)


@settings(max_examples=8)  # an example has 24 to 60 steps, each of them several tensor operations
@given(st.lists(st.lists(maxima, min_size=12, max_size=12), min_size=2, max_size=5))
def test_many_entries_at_once_equal_each_alone(rows: list[list[float]]) -> None:
    scaling = Autoflex()
    state = scaling.init(entries=len(rows))
    together = []
    for column in zip(*rows, strict=True):
        maximum = torch.tensor(column, dtype=torch.float64)
        state = scaling.start(state, maximum)
        together.append(state.exponent.tolist())
        mantissa = torch.ldexp(maximum, -state.exponent).round().clamp(max=32767).int()
        state = scaling.observe(state, WritesSeen(mantissa))
    assert [list(one) for one in zip(*together, strict=True)] == [scaling.replay(row) for row in rows]


def test_the_guess_steps_by_two_bits_less_than_it_has_from_a_mantissa_of_zero_as_the_authors_code_does() -> None:
    assert AS_PUBLISHED.replay([2**-16.01]) == [-30]  # 0 at 2**-8, 64 at 2**-22, which is 7 bits long
    assert AS_PUBLISHED.replay([2.0**-29]) == [-31]  # 0, then 0, and then the end of the range
    assert Autoflex(bits=4).replay([2.0**-20])[0] == -22  # of four bits by two: 0 down to 2**-18, and 1 at 2**-20


def test_the_guess_goes_up_by_seven_and_ends_after_ten_tries() -> None:
    wide = Autoflex(min_exponent=-200, max_exponent=200)
    assert [wide.replay([2.0**power])[0] for power in (40, 41, 42, 120)] == [26, 27, 28, -8 + 10 * 7]
    assert Autoflex(bits=4).replay([2.0**-4])[0] == -6  # 4 is the smallest mantissa of full length


def test_the_defaults_are_the_paper_s_but_for_a_bit_kept_while_little_is_known() -> None:
    default = Autoflex()
    assert (default.bits, default.window, default.beta, default.gamma) == (16, 16, 3.0, 100.0)
    assert (default.min_exponent, default.max_exponent) == (-31, 0)
    assert (default.headroom, default.start_headroom, default.warm_headroom) == (0, 0, 1)
    steady = [1.0] * 20
    published, ours = AS_PUBLISHED.replay(steady), default.replay(steady)
    # the guess is the same; then one bit more until 16 maxima are known, and the same again
    assert [a - b for a, b in zip(ours, published, strict=True)] == [0] + [1] * 15 + [0] * 4


@pytest.mark.parametrize("value", [2.0**-16, 1e-3, 1.0, 77.0, 120.0])
def test_the_guess_leaves_at_most_one_free_bit(value: float) -> None:
    exponent = AS_PUBLISHED.replay([value])[0]
    assert 2**14 <= math.ldexp(value, -exponent) < 2**15


def test_a_steady_maximum_keeps_its_exponent_and_does_not_saturate() -> None:
    exponents = AS_PUBLISHED.replay([1.0] * 50)
    assert set(exponents[1:]) == {-14}  # floor(log2(1 + 100 * 2**-14)) - 14


def test_what_is_predicted_and_how_often_an_exponent_moved_is_told() -> None:
    scaling, moved = AS_PUBLISHED, 0
    state = scaling.start(scaling.init(), torch.tensor([1.0]))
    for mantissa in (16000, 20000, 32767, 100):
        before = state
        state = scaling.observe(state, WritesSeen(torch.tensor([mantissa], dtype=torch.int32)))
        moved += int(state.exponent != before.exponent)
        assert int(state.moved) == moved
        assert scaling.scale(state).tolist() == [2.0 ** int(state.exponent)]
    assert moved > 1 and int(state.saturated) == 1
    known = state.history[0, :2].tolist()  # two since the saturation
    assert state.seen.tolist() == [2] and known[1] == 100 * float(scaling.scale(before))
    chi = max(known) + 3 * pstdev(known) + 100 * float(scaling.scale(state))
    assert scaling.predicted_maximum(state).tolist() == [pytest.approx(chi)]


def test_a_sixty_fourfold_jump_saturates_and_is_recovered() -> None:
    exponents = AS_PUBLISHED.replay([1.0] * 20 + [64.0] * 8)
    assert exponents[20] == -14  # nobody could know
    assert math.ldexp(64.0, -exponents[-1]) < 32767
    assert exponents[20:] == sorted(exponents[20:])


def test_zeros_move_nothing_and_small_values_after_them_are_found() -> None:
    assert AS_PUBLISHED.replay([1.0] * 3 + [0.0] * 40 + [1.0])[3:] == [-14] * 41
    exponents = AS_PUBLISHED.replay([0.0] * 5 + [2.0**-20])
    assert exponents[:5] == [0] * 5
    assert math.ldexp(2.0**-20, -exponents[5]) >= 2**10


def test_a_write_that_vanished_starts_again() -> None:
    scaling = Autoflex()
    state = scaling.start(scaling.init(), torch.tensor([1.0]))
    seen = WritesSeen(torch.tensor([0]), vanished=torch.tensor([True]))
    state = scaling.observe(state, seen)
    assert not state.started
    state = scaling.start(state, torch.tensor([2.0**-18]))
    assert int(state.exponent) < -25


def test_a_nonfinite_write_is_counted_and_moves_nothing() -> None:
    scaling = Autoflex()
    state = scaling.start(scaling.init(entries=2), torch.tensor([1.0, float("nan")]))
    assert state.started.tolist() == [True, False]
    seen = WritesSeen(torch.tensor([32767, 5]), nonfinite=torch.tensor([True, True]), mask=torch.tensor([True, False]))
    after = scaling.observe(state, seen)
    assert after.nonfinite.tolist() == [1, 0]
    assert after.writes.tolist() == [1, 0]
    assert after.saturated.tolist() == [0, 0]
    assert torch.equal(after.exponent, state.exponent)


def test_headroom_is_kept_free() -> None:
    for bits in (0, 1, 2, 3):
        steady = Autoflex(headroom=bits, warm_headroom=0).replay([1.0] * 20)[-1]
        assert steady == -14 + bits
    assert Autoflex(start_headroom=2).replay([1.0])[0] == AS_PUBLISHED.replay([1.0])[0] + 2
    warm = Autoflex(warm_headroom=1).replay([1.0] * 40)
    assert (warm[5], warm[-1]) == (-13, -14)


def test_a_frozen_exponent_is_that_of_the_guess() -> None:
    exponents = Autoflex(adapt=False).replay([1.0, 2.0, 4.0, 8.0])
    assert len(set(exponents)) == 1


def test_a_state_grows_by_entries_of_which_nothing_was_seen() -> None:
    scaling = Autoflex()
    state = scaling.observe(scaling.start(scaling.init(entries=3), torch.ones(3)), WritesSeen(torch.ones(3).int()))
    grown = extended(scaling, state, 2)
    for whole, before, new in zip(grown, state, scaling.init(entries=2), strict=True):
        assert torch.equal(whole, torch.cat((before, new)))


def test_impossible_settings_are_named() -> None:
    with pytest.raises(InvalidInput, match="allowed are 4 to 16 bits"):
        Autoflex(bits=32)
    with pytest.raises(InvalidInput, match="give headroom as a number of bits"):
        Autoflex(headroom=-1)
