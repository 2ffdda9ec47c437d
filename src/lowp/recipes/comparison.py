"""The comparison of several precisions on one recipe with several seeds: planned runs, results, and the verdicts."""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lowp import presets
from lowp.errors import InvalidInput
from lowp.recipes import get, results
from lowp.recipes.recipe import Data, Metric
from lowp.recipes.runs import Job, OnEpoch, Stop, processes_for, run_jobs
from lowp.recipes.training import Settings, load_data

FLUSHED_METHOD = (
    "flushed gradients: elements that are zero in this precision and not zero in an fp32 backward on the same weights "
    "and batch, of those not zero in fp32; lost updates: weights (masters where there are some) that the step left as "
    "they were, of those with a gradient that is not zero; updates < 2^-24: changes that fp32 makes below the smallest "
    "number of fp16, of those not zero. Counted at {samples} steps of each run"
)


@dataclass(frozen=True)
class Variant:
    """A row of a comparison: its label, and the settings that its runs share apart from the seed."""

    label: str
    settings: Settings


def variants_of(settings: Settings, precisions: Sequence[str], loss_scales: Sequence[str] = ()) -> list[Variant]:
    """Return the rows for these precisions, each with every loss scale; fp32 is always included and comes first.

    No loss scale is used for fp32, nor for precisions that store parameters in few bits without masters. Raises
    InvalidInput for unknown precisions or scales, with similar names.
    """
    rows = [Variant("fp32", replace(settings, precision="fp32", loss_scale=None, accumulate=None).filled())]
    for precision in dict.fromkeys(word.strip() for word in precisions):
        if precision == "fp32":
            continue
        for scale in loss_scales if loss_scales and _takes_scale(precision) else (None,):
            label = precision if scale is None else f"{precision}, scale {scale}"
            chosen = settings.loss_scale if scale is None and _takes_scale(precision) else scale
            rows.append(Variant(label, replace(settings, precision=precision, loss_scale=chosen).filled()))
    return rows


def _takes_scale(precision: str) -> bool:
    """Return whether the precision can use a loss scale: not if parameters are stored in few bits without masters."""
    preset = presets.parse(precision)
    return preset.policy.parameters is None or preset.masters.kind != "none"


class Study:
    """Runs a plan, keeps the results, and can continue from the file of an earlier, interrupted study.

    `variants[0]` is the baseline. The runs are in the order of the seeds, so that an interrupted study has whole
    rounds. `kind` is ``comparison`` or ``sweep``.
    """

    def __init__(
        self, variants: Sequence[Variant], seeds: Sequence[int], *, kind: str = "comparison", samples: int = 8
    ) -> None:
        if not seeds:
            raise InvalidInput("seeds 0: give 1 or more; 3 or more show the scatter of the runs")
        self.variants = list(variants)
        self.seeds = list(seeds)
        self.kind = kind
        self.samples = samples
        self.settings = variants[0].settings
        self.recipe = get(self.settings.recipe)
        self.data: Data = load_data(self.settings)
        self.runs: dict[tuple[str, int], dict[str, Any]] = {}
        # the cost of steps by label, and how it was measured: `lowp.benchmarking.timing.measure` fills these
        self.costs: dict[str, dict[str, Any]] = {}
        self.cost_methods: dict[str, str] = {}
        self.command: str | None = None
        self.folder: Path | None = None  # of the checkpoints of runs that are interrupted
        self._header = results.header(kind)

    # -- doing it ---------------------------------------------------------------------------------------------------
    def jobs(self) -> list[Job]:
        """Return the runs that remain to be done."""
        return [
            self._job(_name(variant.label, seed), replace(variant.settings, seed=seed))
            for seed in self.seeds
            for variant in self.variants
            if (variant.label, seed) not in self.runs
        ]

    def _job(self, name: str, settings: Settings) -> Job:
        file = re.sub(r"[^\w.+-]+", "-", name) + ".pt"
        return Job(name, settings, self.samples, self.folder and self.folder / file)

    def run(
        self, on_epoch: OnEpoch, processes: int | None = None, stop: Stop = lambda: False
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Run the remaining jobs, yielding each run's name when it is done, until `stop()` is true."""
        jobs = self.jobs()
        labels = {_name(variant.label, seed): (variant.label, seed) for variant in self.variants for seed in self.seeds}
        count = processes_for(jobs, self.data) if processes is None else min(processes, len(jobs))
        for job, run in run_jobs(jobs, self.data, count, on_epoch, stop):
            self.runs[labels[job.name]] = run
            yield job.name, run

    def resume(self, path: Path) -> int:
        """Load the runs of a file, and return their number; raise InvalidInput for runs that are not of this study."""
        document = results.read(path, self.kind)
        planned = {
            (variant.label, seed): asdict(replace(variant.settings, seed=seed))
            for variant in self.variants
            for seed in self.seeds
        }
        runs: dict[tuple[str, int], dict[str, Any]] = {}
        with results.reading(path):
            for row in document["variants"]:
                for run in row["runs"]:
                    key = (row["label"], run["seed"])
                    if planned.get(key) != run["settings"] or document["samples"] != self.samples:
                        raise InvalidInput(
                            f"{path} contains runs that this command does not ask for ({_name(*key)}): "
                            f"repeat the command "
                            f"as it was ({document['command']}), or name another --out"
                        )
                    history = [  # JSON has no NaN
                        {name: math.nan if value is None else value for name, value in record.items()}
                        for record in run["history"]
                    ]
                    runs[key] = self._checked({**run, "history": history})
        self.runs.update(runs)
        return len(runs)

    def _checked(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return a run read from a file; raise TypeError or KeyError for wrong types and missing entries."""
        numbers = [record[name] for record in run["history"] for name in ("epoch", *self._metrics())]
        numbers += [run[name] for name in ("skipped_steps", "loss_scale") if run[name] is not None]
        are_numbers = all(isinstance(number, (int, float)) for number in numbers)
        if not are_numbers or not isinstance(run["failure"], (str, type(None))):
            raise TypeError(f"the run of seed {run['seed']} has text in place of numbers, or numbers in place of text")
        return run

    # -- what it showed -----------------------------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        """Return the study as plain values.

        Rows have statistics if they have runs, and a verdict if fp32 has runs with the same seeds.
        """
        recipe = self.recipe
        return {
            **self._header,
            "command": self.command,
            "complete": not self.jobs(),
            "recipe": {
                **results.recipe_head(recipe, self.data, self.settings.size),
                "metric": recipe.metric.name,
                "metric_is_share": recipe.metric.share,
                "higher_is_better": recipe.metric.higher_is_better,
                "validation_examples": len(self.data.validation),
            },
            "settings": asdict(self.settings),
            "seeds": self.seeds,
            "samples": self.samples,
            "baseline": self.variants[0].label,
            "methods": {"verdict": RULE, **self.cost_methods, "losses": FLUSHED_METHOD.format(samples=self.samples)},
            "variants": [self._row(variant) for variant in self.variants],
        }

    def _row(self, variant: Variant) -> dict[str, Any]:
        runs = [self.runs[variant.label, seed] for seed in self.seeds if (variant.label, seed) in self.runs]
        preset = presets.parse(variant.settings.precision, variant.settings.loss_scale)
        row: dict[str, Any] = {
            "label": variant.label,
            "precision": variant.settings.precision,
            "summary": preset.summary,
            "source": preset.source,
            "policy": preset.policy.to_toml(),
            "masters": str(preset.masters),
            "loss_scaling": str(preset.loss_scale),
            "runs": runs,
            **self.costs.get(variant.label, {}),
        }
        if runs:
            row["statistics"] = self._statistics(runs)
            row["verdict"] = self._verdict(variant, runs)
        return row

    def _statistics(self, runs: list[dict[str, Any]]) -> dict[str, Any]:
        columns: dict[str, list[float]] = {name: [_last(run, name) for run in runs] for name in self._metrics()}
        for name in ("skipped_steps", "loss_scale", "flushed_gradients", "lost_updates", "small_updates"):
            columns[name] = [run[name] for run in runs if run.get(name) is not None]
        return {
            name: {"mean": mean(values), "deviation": deviation(values), "values": values}
            for name, values in columns.items()
        }

    def _metrics(self) -> list[str]:
        return list(dict.fromkeys([self.recipe.metric.name, "loss"]))

    def _verdict(self, variant: Variant, runs: list[dict[str, Any]]) -> dict[str, Any] | None:
        metric = self.recipe.metric
        if variant is self.variants[0]:
            return {"verdict": BASELINE, "gap": 0.0, "gap_in_deviations": 0.0, "p": None, "reason": ""}
        kept = [self.runs.get((self.variants[0].label, run["seed"])) for run in runs]
        baseline_runs = [run for run in kept if run is not None]
        if len(baseline_runs) < len(runs):
            return None
        baseline = [_last(run, metric.name) for run in baseline_runs]
        if not all(map(math.isfinite, baseline)):
            return None
        failures = sum(run["failure"] is not None or not math.isfinite(_last(run, "loss")) for run in runs)
        start = mean([run["history"][0][metric.name] for run in baseline_runs])
        values = [_last(run, metric.name) for run in runs]
        verdict = judge(values, baseline, start, metric, len(self.data.validation), failures)._asdict()
        causes = [run["failure"] for run in runs if run["failure"]]
        return {**verdict, "reason": "; ".join([verdict["reason"], *causes[:1]])}


def result_line(study: Study, name: str, run: dict[str, Any]) -> str:
    """Return a run as one line, for the progress display."""
    metric = study.recipe.metric
    if run["failure"]:
        return f"{name}: failed: {run['failure']}"
    value = _last(run, metric.name)
    shown = f"{value:.2%}" if metric.share else f"{value:.4g}"
    count = run["skipped_steps"]
    skipped = f", {count} step{'s' * (count > 1)} skipped" if count else ""
    return f"{name}: {metric.name} {shown}, loss {_last(run, 'loss'):.4f}{skipped}"


def _name(label: str, seed: int) -> str:
    return f"{label}, seed {seed}"


def _last(run: dict[str, Any], name: str) -> float:
    """Return a metric after the last epoch; NaN for a run that ended in an error."""
    history = run["history"]
    return float(history[-1][name]) if len(history) > 1 else math.nan


# -- the verdict -------------------------------------------------------------------------------------------------------
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
    scatter = deviation(baseline)
    unit = max(metric.resolution(examples), scatter if math.isfinite(scatter) else 0.0)
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
