"""Weight updates: lost, distorted or kept."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowp.casts import parse
from lowp.errors import InvalidInput
from lowp.explain import (
    Verdict,
    render,
    round_exact,
    weight_update,
)


def test_an_update_is_lost_distorted_or_kept() -> None:
    cases = [
        ("1.125", "2^-11", Verdict.LOST),  # a tie, and 1.125 is even
        ("1.1259765625", "2^-11", Verdict.DISTORTED),  # a tie, and the last bit is odd: moves up
        ("1.125", "0.0006", Verdict.DISTORTED),
        ("1.125", "2^-10", Verdict.KEPT),
        ("1.125", "0.01", Verdict.KEPT),
        ("1.125", "0", Verdict.NONE),
        ("1.125", "1e-9", Verdict.UNDERFLOW),
        ("65504", "1000", Verdict.OVERFLOW),
    ]
    for weight, gradient, verdict in cases:
        assert weight_update(weight, gradient, "fp16").verdict is verdict, (weight, gradient)


def test_the_first_steps_of_a_weight_that_moves_are_shown_in_lines_of_80_letters() -> None:
    moving, lost = (render(weight_update("1", gradient, "fp16", steps=5)) for gradient in ("0.0006", "2^-12"))
    assert "fp16        1.0048828125\n              step 1: 1.00097656, 2: 1.00195312, 3: 1.00292969\n" in moving
    assert "fp16        1, for ever: no step moves it\n  fp32 " in lost
    assert 70 < max(map(len, f"{moving}\n{lost}".splitlines())) <= 80


def test_below_a_power_of_two_half_the_size_counts() -> None:
    up, down = weight_update("1", "0.0003", "fp16"), weight_update("1", "0.0003", "fp16", minus=True)
    assert up.threshold is not None and down.threshold is not None
    assert (up.threshold.size, up.threshold.inclusive) == (Fraction(1, 1 << 11), False)
    assert (down.threshold.size, down.threshold.inclusive) == (Fraction(1, 1 << 12), False)
    assert (up.verdict, down.verdict) == (Verdict.LOST, Verdict.DISTORTED)
    assert "below the power of two 2^0 numbers are closer" in render(down) and "are closer" not in render(up)
    assert "are closer" not in render(weight_update("3", "0.0008", "fp16", minus=True))
    assert weight_update("1", "2^-12", "fp16", minus=True).verdict is Verdict.LOST


def test_the_threshold_lies_where_the_source_says_by_the_significand() -> None:
    for cast, low, high in (("fp16", -12, -11), ("bf16", -9, -8)):
        for weight in ("1", "1.5", "1.9921875", "3"):
            threshold = weight_update(weight, "1e-9", cast).threshold
            assert threshold is not None
            share = threshold.size / Fraction(weight)
            assert Fraction(2) ** low < share <= Fraction(2) ** high


@given(
    st.sampled_from(["fp16", "bf16", "bf16-tpu", "e4m3fn", "e5m2:saturate", "fp16:up", "fp16:toward-zero", "e3m2"]),
    st.floats(-60000, 60000, width=16),
    st.booleans(),
)
def test_the_threshold_is_exact(cast: str, weight: float, minus: bool) -> None:
    start = round_exact(weight, parse(cast).format).result
    if not start.is_finite:
        return
    threshold = weight_update(weight, 1.0, cast, minus=minus).threshold
    if threshold is None:
        return
    sign, little = (-1 if minus else 1), threshold.spacing / 1000

    def moves(size: Fraction) -> bool:
        result = round_exact(start.value + sign * size, cast).result
        return bool(result.special) or result.value != start.value

    if threshold.size:
        assert moves(threshold.size) == threshold.inclusive
        assert not moves(threshold.size - little)
    assert moves(threshold.size + little)


def test_a_learning_rate_takes_the_gradient_off() -> None:
    update = weight_update("1", "0.5", "fp16", learning_rate=Fraction("0.01"), steps=2)
    assert update.step == Fraction("-0.005")
    assert update.first is not None and update.first.result.value == Fraction("0.9951171875")
    assert render(update).startswith("weight - 0.01 x gradient in fp16: 1 - 0.01 x 0.5")
    assert "that is a gradient above 0.0244141" in render(update)


def test_stochastic_rounding_keeps_an_update_on_average() -> None:
    update = weight_update("1.125", "0.00041999", "fp16:stochastic", steps=101)
    assert update.verdict is Verdict.CHANCE
    assert update.expected == Fraction("1.167429447174072265625")
    assert update.chance is not None and abs(update.chance - Fraction("0.4301757812")) < Fraction(1, 10**9)
    assert "KEPT ON AVERAGE" in render(update)
    third = weight_update("1", "0.0001", "fp16:stochastic", learning_rate=Fraction(1, 3))
    assert (third.verdict, third.bias) == (Verdict.CHANCE, 0)  # though no number of bits holds the share


def test_few_random_bits_are_not_called_unbiased() -> None:
    cases = {
        "stochastic-1": (Verdict.LOST, Fraction("-0.43017578125")),
        "stochastic-2": (Verdict.BIASED, Fraction(1, 4) - Fraction("0.43017578125")),
        "stochastic-b-1": (Verdict.BIASED, Fraction(1, 2) - Fraction("0.43017578125")),
        "stochastic-c-3": (Verdict.BIASED, Fraction(3, 8) - Fraction("0.43017578125")),
        "stochastic-13": (Verdict.CHANCE, Fraction(0)),
    }
    for mode, (verdict, bias) in cases.items():
        update = weight_update("1.125", "0.00041999", f"fp16:{mode}", steps=1_000)
        assert (update.verdict, update.bias) == (verdict, bias / 1024), mode
    words = " ".join(render(weight_update("1.125", "0.00041999", "fp16:stochastic-1")).split())
    assert "bias -0.4302 ulp a step: the share of the spacing is no number of a single random bit" in words
    words = " ".join(render(weight_update("1.125", "0.00041999", "fp16:stochastic-13")).split())
    assert "bias none: the share of the spacing is a number of 13 random bits" in words


def test_a_sum_beyond_the_largest_number_has_no_mean() -> None:
    update = weight_update("65504", "20", "fp16:stochastic")
    assert (update.verdict, update.expected, update.bias) == (Verdict.OVERFLOW, None, None)
    words = " ".join(render(update).split())
    assert "OVERFLOW: the sum is beyond the largest number, with a probability of 0.625" in words
    assert "stochastic beyond the largest number, 65504: there is no mean" in words
    assert weight_update("65504", "20", "fp16:stochastic:saturate").verdict is Verdict.OVERFLOW
    assert weight_update("60000", "20", "fp16", steps=1000).expected is None
    assert weight_update("60000", "20", "fp16", steps=100).expected == 62000


def test_a_weight_may_get_stuck_on_its_way() -> None:
    update = weight_update("1", "0.002", "bf16", steps=5000)
    assert update.verdict is Verdict.LOST
    moving = weight_update("0.1", "0.002", "bf16", steps=5000).trajectory
    assert moving is not None and moving.stuck_after is not None
    assert float(moving.last) == 1.0  # below 1 half an ulp is 2^-9 = 0.00195, from 1 on it is twice that
    assert moving.stuck_after < 5000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("1", "1", "flex16+5", 1), "a weight update is explained in signed float formats"),
        (("1", "1", "e8m0", 1), "a weight update is explained in signed float formats"),
        (("1", "inf", "fp16", 1), "an update needs finite numbers"),
        (("1", "1", "fp16", 0), "0 steps are not possible here: give 1 to 100000"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(arguments: tuple[str, str, str, int], text: str) -> None:
    weight, gradient, cast, steps = arguments
    with pytest.raises(InvalidInput, match=text):
        weight_update(weight, gradient, cast, steps=steps)


def test_a_directed_rounding_moves_a_weight_by_updates_of_any_size() -> None:
    spacing = Fraction(1, 1024)
    up = weight_update("1", "2^-12", "fp16:up").threshold
    assert up is not None and (up.size, up.inclusive, up.spacing, up.tie) == (0, False, spacing, spacing / 2)
    cut = weight_update("1", "2^-12", "fp16:toward-zero").threshold
    assert cut is not None and (cut.size, cut.inclusive) == (spacing, True)
    away = weight_update("1", "2^-12", "fp16:nearest-away").threshold
    assert away is not None and (away.size, away.inclusive) == (spacing / 2, True)
    assert weight_update("65504", "1", "fp16:toward-zero").threshold is None


def shown(weight: str, gradient: str, steps: int) -> list[tuple[int, float]]:
    trajectory = weight_update(weight, gradient, "fp16", steps=steps).trajectory
    assert trajectory is not None
    return [(index, float(value)) for index, value in trajectory.shown]


def test_a_trajectory_shows_the_first_steps_powers_of_ten_and_the_last() -> None:
    assert shown("1", "2^-12", 101) == [(0, 1.0), (1, 1.0), (101, 1.0)]
    assert shown("1", "2^-12", 1) == [(0, 1.0), (1, 1.0)]
    assert shown("0.99951171875", "2^-11", 101) == [(0, 1 - 2.0**-11), (1, 1.0), (101, 1.0)]
    assert shown("0", "1", 1000) == [(step, float(step)) for step in (0, 1, 2, 3, 10, 100, 1000)]
    assert shown("0", "1", 7) == [(step, float(step)) for step in (0, 1, 2, 3, 7)]
    assert shown("65472", "32", 9) == [(0, 65472.0), (1, 65504.0), (2, float("inf")), (9, float("inf"))]
    found = [weight_update("65472", "32", "fp16", steps=9), weight_update("0.9990234375", "2^-11", "fp16", steps=9)]
    assert [one.trajectory.stuck_after for one in found if one.trajectory is not None] == [2, 2]
    assert weight_update("1", "0", "fp16", steps=100_000).verdict is Verdict.NONE
    with pytest.raises(InvalidInput, match="100001 steps are not possible here: give 1 to 100000"):
        weight_update("1", "0", "fp16", steps=100_001)


def test_a_certain_overflow_has_no_probability_and_a_flushed_weight_no_tie() -> None:
    told = {"20": ", with a probability of 0.625 counts", "100": ", with a probability of 1 counts", "32": " counts"}
    for size, words in told.items():  # 65536 is met exactly, without a choice
        verdict = " ".join(render(weight_update("65504", size, "fp16:stochastic")).split())
        assert f"OVERFLOW: the sum is beyond the largest number{words}" in verdict
    flushed = render(weight_update("2^-126", "2^-130", "bf16-tpu", minus=True))
    assert "above |update| 0" in flushed and "a tie" not in flushed
    tie = " ".join(render(weight_update("1.125", "2^-11", "fp16")).split())
    assert "above |update| 2^-11 = 0.00048828125 = 0.0004340 of the weight a tie goes to the even neighbour" in tie
    assert "the weight's last bit is even: at exactly that size it is lost" in tie
    odd = " ".join(render(weight_update("1.1259765625", "2^-11", "fp16")).split())
    assert "from |update| 2^-11" in odd and "last bit is odd: at exactly that size it is moved" in odd
    assert "a tie goes away from zero: at exactly" in " ".join(
        render(weight_update("1", "1", "fp16:nearest-away")).split()
    )


def test_the_chance_is_that_of_the_random_bits_and_the_mean_ends_at_the_largest_number() -> None:
    chances = {"fp16": Fraction("0.43017578125"), "fp16:stochastic-1": 0, "fp16:stochastic-2": Fraction(1, 4)}
    assert {cast: weight_update("1.125", "0.00041999", cast).chance for cast in chances} == chances
    assert weight_update("65472", "32", "fp16").expected == 65504
    assert weight_update("65472", "33", "fp16:nearest-away").expected is None
    kept = {"2^-11": Verdict.CHANCE, "2^-10": Verdict.KEPT, "0.0015": Verdict.KEPT, "1": Verdict.KEPT}
    assert {size: weight_update("1", size, "fp16:stochastic").verdict for size in kept} == kept
    still = weight_update("1", "0.5", "fp16", learning_rate=Fraction(0))
    assert (still.verdict, still.step, still.upward) == (Verdict.NONE, 0, True)
    for minus, gradient, upward in ((False, "-1", False), (True, "-1", True), (True, "1", False)):
        assert weight_update("1", gradient, "fp16", minus=minus).upward is upward
