"""The verdict follows its rule, and its numbers are right."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lowp.recipes.comparison import (
    AS_FP32,
    FAILS,
    LOSES,
    UNDECIDED,
    Study,
    chance,
    deviation,
    judge,
    mean,
    result_line,
    student_tail,
)
from lowp.recipes.recipe import Metric

ACCURACY = Metric("accuracy")
FP32 = [0.975, 0.980, 0.985]  # a deviation of 0.005


# one-sided values of printed tables of Student's t, such as NIST's e-Handbook, section 1.3.6.7.2
@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [(0.0, 3, 0.5), (1.0, 1, 0.25), (2.920, 2, 0.05), (6.965, 2, 0.01), (2.015, 5, 0.05), (1.310, 30, 0.1)],
)
def test_the_tail_of_student_s_t_is_that_of_printed_tables(t: float, freedom: float, p: float) -> None:
    assert student_tail(t, freedom) == pytest.approx(p, rel=1e-3)
    assert student_tail(-t, freedom) == pytest.approx(1 - p, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "failures", "verdict"),
    [
        ([0.975, 0.980, 0.985], 0, AS_FP32),
        ([0.990, 0.995, 0.999], 0, AS_FP32),  # better is not worse
        ([0.971, 0.975, 0.980], 0, AS_FP32),  # by 0.0047
        ([0.970, 0.974, 0.979], 0, UNDECIDED),  # by 0.0057: more than one deviation, p = 0.15
        ([0.90, 0.91, 0.92], 0, LOSES),
        ([0.60, 0.75, 0.90], 0, LOSES),  # erratic, which is no excuse
        ([0.50, 0.52, 0.50], 0, FAILS),  # learned less than half of 0.98 - 0.1
        ([0.975, 0.980, 0.985], 1, FAILS),
        ([math.nan] * 3, 3, FAILS),
    ],
)
def test_a_precision_is_judged_by_the_stated_rule(values: list[float], failures: int, verdict: str) -> None:
    assert judge(values, FP32, 0.1, ACCURACY, 540, failures).verdict == verdict


def test_the_gap_is_in_deviations_of_fp32_or_examples_whichever_is_larger() -> None:
    assert judge([0.97] * 3, FP32, 0.1, ACCURACY, 540, 0).gap_in_deviations == pytest.approx(2.0)
    assert judge([0.97] * 3, [0.98] * 3, 0.1, ACCURACY, 100, 0).gap_in_deviations == pytest.approx(1.0)


def test_a_metric_that_is_better_when_lower_is_judged_the_other_way() -> None:
    error = Metric("error", higher_is_better=False)
    assert judge([0.10, 0.11, 0.12], [0.020, 0.025, 0.030], 0.9, error, 540, 0).verdict == LOSES
    assert judge([0.010, 0.011, 0.012], [0.020, 0.025, 0.030], 0.9, error, 540, 0).verdict == AS_FP32


def test_one_seed_alone_decides_nothing_but_a_failure() -> None:
    verdict = judge([0.95], [0.98], 0.1, ACCURACY, 540, 0)
    assert verdict.verdict == UNDECIDED and "one seed has no deviation" in verdict.reason
    assert judge([0.2], [0.98], 0.1, ACCURACY, 540, 0).verdict == FAILS


def test_the_bounds_of_a_verdict_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge([0.5] * 3, [1.0] * 3, 0.0, ACCURACY, 540, 0).verdict == LOSES  # it learned half
    assert judge([0.5] * 3, [0.75] * 3, 0.0, ACCURACY, 4, 0).verdict == AS_FP32  # worse by one example
    for p, verdict in ((0.0499, LOSES), (0.05, UNDECIDED)):
        monkeypatch.setattr("lowp.recipes.comparison.chance", lambda *_, p=p: p)
        assert judge([0.90, 0.91, 0.92], FP32, 0.1, ACCURACY, 540, 0).verdict == verdict


def test_a_run_that_took_no_epoch_has_no_last_metrics() -> None:
    study = cast(Study, SimpleNamespace(recipe=SimpleNamespace(metric=ACCURACY)))
    run: dict[str, Any] = {"failure": None, "skipped_steps": 0, "history": []}
    for count, shown in ((0, "nan%, loss nan"), (1, "nan%, loss nan"), (2, "50.00%, loss 2.0000")):
        run["history"] = [{"accuracy": 0.5, "loss": 2.0}] * count
        assert result_line(study, "a", run) == f"a: accuracy {shown}"


def test_chance_is_student_s_with_the_deviation_of_fp32() -> None:
    # t = 0.01 / (0.005 * sqrt(2 / 3)) = 2.4495, for which with 2 degrees of freedom p = (1 - t / sqrt(2 + t^2)) / 2
    t = math.sqrt(6)
    assert chance(0.01, 0.005, 3) == pytest.approx((1 - t / math.sqrt(2 + t * t)) / 2, rel=1e-6)
    assert math.isnan(chance(0.01, 0.005, 1)) and math.isnan(chance(math.inf, 0.005, 3))
    assert math.isnan(chance(0.01, 0.0, 1)) and math.isnan(chance(math.nan, 0.0, 2))
    assert (chance(0.01, 0.0, 2), chance(0.0, 0.0, 2)) == (0.0, 1.0)


def test_without_scipy_a_loss_is_undecided_and_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    verdict = judge([0.90, 0.91, 0.92], FP32, 0.1, ACCURACY, 540, 0)
    assert verdict.verdict == UNDECIDED
    assert verdict.reason == "p is computed by SciPy, which is not installed: pip install 'lowp[recipes]'"


def test_means_and_deviations_of_what_is_not_a_number_are_not_numbers() -> None:
    assert mean([1.0, 2.0]) == 1.5 and deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(mean([])) and math.isnan(deviation([1.0])) and math.isnan(deviation([1.0, math.nan]))
