"""The verdict on a precision: whether it converges as fp32 does, by a stated rule on means and deviations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lowp.recipes.recipe import Metric

AS_FP32 = "converges as fp32"
LOSES = "loses"
FAILS = "fails"
UNDECIDED = "undecided"
BASELINE = "baseline"

SIGNIFICANCE = 0.05
RULE = (
    "verdict: 'converges as fp32' if the mean is worse than fp32's by no more than one seed deviation (the sample "
    "standard deviation of fp32 over the seeds, or one validation example where that is larger); 'loses' if it is "
    "worse by more, and by so much that runs of fp32 would be so with p < 0.05 (one-sided t test with that deviation); "
    "'undecided' if it is worse by more but not significantly: give more seeds; 'fails' if a run ended in an error or "
    "without a finite loss, or learned less than half of what fp32 did"
)


class GapVerdict(NamedTuple):
    """The verdict in words, the gap to fp32 (positive: worse), the gap in seed deviations, its p, and the reason."""

    verdict: str
    gap: float
    gap_in_deviations: float
    p: float
    reason: str


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; NaN without values, or if one is NaN."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; NaN with fewer than two values, or if one is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def judge(
    values: Sequence[float], baseline: Sequence[float], start: float, metric: Metric, examples: int, failures: int
) -> GapVerdict:
    """Compare the final `values` of a metric, one per seed, with those of fp32, and return the verdict.

    `start`: the metric before training. `examples`: the number of validation examples. `failures`: the number of runs
    that ended in an error or without a finite loss, whose values may be missing or NaN.
    """
    finite = [value for value in values if math.isfinite(value)]
    gap = metric.worse_by(mean(finite), mean(baseline)) if finite else math.nan
    unit = max(metric.resolution(examples), _or_zero(deviation(baseline)))
    p = chance(gap, unit, len(baseline))
    in_units = gap / unit if unit else math.nan
    if failures or not finite:
        return GapVerdict(FAILS, gap, in_units, p, f"{failures} of {max(failures, len(values))} runs came to nothing")
    learned = -metric.worse_by(mean(finite), start)
    learned_by_baseline = -metric.worse_by(mean(baseline), start)
    if learned < learned_by_baseline / 2:
        share = learned / learned_by_baseline
        return GapVerdict(FAILS, gap, in_units, p, f"learned {share:.0%} of what fp32 did")
    if gap <= unit:
        return GapVerdict(AS_FP32, gap, in_units, p, "within one seed deviation")
    if p < SIGNIFICANCE:
        return GapVerdict(LOSES, gap, in_units, p, f"worse by {in_units:.1f} seed deviations, p = {p:.2g}")
    return GapVerdict(UNDECIDED, gap, in_units, p, _undecided(p, len(values), len(baseline)))


def _undecided(p: float, seeds: int, baseline_seeds: int) -> str:
    if baseline_seeds < 2:
        return "one seed has no deviation"
    if math.isnan(p):
        return "p is computed by SciPy, which is not installed: pip install 'lowp[recipes]'"
    return f"p = {p:.2g} with {seeds} seeds: give more"


def chance(gap: float, deviation_of_one: float, seeds: int) -> float:
    """Return the probability that the means of two sets of fp32 runs differ by at least `gap` in one direction.

    It is Student's t test with the deviation of fp32. The deviation of the precision is not used, since a large one
    would hide its own loss of accuracy. NaN with fewer than two seeds, or without SciPy.
    """
    if seeds < 2 or not math.isfinite(gap):
        return math.nan
    if deviation_of_one == 0:
        return 0.0 if gap > 0 else 1.0
    return student_tail(gap / (deviation_of_one * math.sqrt(2 / seeds)), seeds - 1)


def student_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t with `freedom` degrees of freedom is above `t`; NaN without SciPy."""
    try:
        from scipy.special import stdtr
    except ImportError:
        return math.nan
    return float(stdtr(freedom, -t))


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
