"""A benchmark of recipes: steps in fp32, torch.amp and lowp timed in turns, with memory, operations and estimates."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lowp import cost, presets
from lowp.benchmarking import largest_batch, memory, operations, timing
from lowp.benchmarking.contenders import STOPPED_BY, Contender, contenders_of, products_of
from lowp.benchmarking.largest_batch import LargestBatch
from lowp.benchmarking.memory import PARTS, Split, memory_of
from lowp.benchmarking.operations import Operations
from lowp.benchmarking.timing import StepTimer, slow_limit, time_steps
from lowp.cost import Estimate
from lowp.errors import counted
from lowp.formats import FORMATS, Format, IntFormat
from lowp.kernels.choose.choices import choices
from lowp.recipes import get, results
from lowp.recipes.training import Settings, load_data, threads_of

KIND = "benchmark"
Stop = Callable[[], bool]
_PATIENCE = 20.0  # limit in seconds for the measurement of one batch in the search for the largest


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to measure: the rows, seconds of timed steps for each, CPU threads, and memory for the largest batch.

    `threads`: None for the recipe's default. `memory`: bytes in which to search the largest batch; None for no search
    on a CPU, and for the free memory on a GPU.
    """

    precisions: Sequence[str] = ("fp16", "bf16", "flex16+5", "dfp16")
    torch_amp: bool = True
    seconds: float = 3.0
    threads: int | None = None
    memory: int | None = None


class Subject:
    """One recipe and its measurements; its document contains the finished ones."""

    def __init__(self, settings: Settings, plan: BenchmarkPlan) -> None:
        self.contenders = contenders_of(settings, plan.precisions, plan.torch_amp)
        self.settings = self.contenders[0].settings
        self.plan = plan
        self.recipe = get(settings.recipe)
        self.size = self.recipe.size(self.settings.size)
        self.data = load_data(self.settings)
        self.threads = plan.threads or self.recipe.threads or torch.get_num_threads()
        self.timers: dict[str, StepTimer] = {}
        self.memory: dict[str, Split] = {}
        self.largest: dict[str, LargestBatch] = {}

    @property
    def batch(self) -> int:
        """Examples per step."""
        assert self.settings.batch is not None
        return self.settings.batch

    @property
    def stages(self) -> int:
        """Number of measurements of `measure`, if none fails: one for all steps, and one for the memory of each row."""
        return 1 + len(self.contenders) * (2 if self._limit() else 1)

    def measure(self, stop: Stop) -> Iterator[str]:
        """Run all measurements until `stop()` is true, and yield a description of each."""
        with threads_of(self.threads):
            timers = time_steps(self.contenders, self.data, self.plan.seconds, stop)
            self.timers = {one.contender.label: one for one in timers if one.rounds or one.failure}
            yield f"{self.recipe.name}: {counted(sum(len(one.times) for one in timers), 'step')} timed"
            for contender in self.contenders:
                if stop():
                    return
                if self._goes(contender):
                    self._measure_memory(contender, stop)
                    yield f"{self.recipe.name}: memory of {contender.label}"
            limit = self._limit()
            for contender in self.contenders if limit else ():
                if stop():
                    return
                if self._goes(contender):
                    self._measure_largest(contender, limit, stop)
                    yield f"{self.recipe.name}: largest batch of {contender.label}"

    def _goes(self, contender: Contender) -> bool:
        timer = self.timers.get(contender.label)
        return timer is not None and timer.failure is None

    def _measure_memory(self, contender: Contender, stop: Stop) -> None:
        timer = self.timers[contender.label]
        try:
            split = memory_of(contender, self.data, self.batch)
        except STOPPED_BY as error:
            timer.failure = f"{type(error).__name__}: {error}"
            return
        if split.reserved is None and not timer.slow:
            growth = largest_batch.process_growth(contender, self.data, self.batch, self.threads, stop)
            split = replace(split, reserved=growth)
        self.memory[contender.label] = split

    def _limit(self) -> int:
        """Return the memory in bytes for the largest batch, 0 for no search."""
        device = torch.device(self.settings.device)
        if self.plan.memory is None and device.type == "cuda":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(device)[0])
        return self.plan.memory or 0

    def _measure_largest(self, contender: Contender, limit: int, stop: Stop) -> None:
        seconds = self.timers[contender.label].median or 0.0

        def taken(batch: int) -> int | None:
            try:
                split = memory_of(contender, self.data, batch)
            except STOPPED_BY:
                return None
            return split.allocated if split.reserved is None else split.reserved

        def ended(batch: int) -> str:
            expected, most = 2 * seconds * batch / self.batch, max(_PATIENCE, 10 * self.plan.seconds)
            if expected > most:
                return f"two steps of batch {batch} would take about {expected:.0f} s, and {most:g} s are allowed"
            return "interrupted" if stop() else ""

        self.largest[contender.label] = largest_batch.largest_batch(limit, taken, self.batch, ended)

    # -- results ------------------------------------------------------------------------------------------------------
    def document(self) -> dict[str, Any]:
        """Return the recipe and its rows as plain values."""
        recipe = self.recipe
        any_row = next(iter(self.timers.values()), None)
        return {
            "recipe": {
                **results.recipe_head(recipe, self.data, self.settings.size),
                "batch": self.batch,
                "unit": recipe.unit,
                "units_per_step": None if any_row is None else any_row.units,
            },
            "settings": asdict(self.settings),
            "threads": self.threads,
            "published": published(recipe.name),
            "variants": [self._row(one, self.timers[one.label]) for one in self.contenders if one.label in self.timers],
        }

    def _row(self, contender: Contender, timer: StepTimer) -> dict[str, Any]:
        label, median = contender.label, timer.median
        preset = presets.parse(contender.settings.precision) if contender.kind == "lowp" else None
        row: dict[str, Any] = {
            "label": label,
            "products": products_of(contender),
            "kind": contender.kind,
            "precision": contender.settings.precision,
            "summary": _TORCH[contender.kind] if preset is None else preset.summary,
            "tf32": contender.tf32,
            "failure": timer.failure,
            "step": {**timer.step(), "relative": timer.relative_to(self.timers[self.contenders[0].label])},
            "wall": timer.wall(len(self.data.training) // self.batch),
            "throughput": None if median is None else timer.units / median,
        }
        counted, split = timer.operations, self.memory.get(label)
        if counted is not None:
            row["operations"] = {"total": counted.total, "in_16_bits": counted.narrow, "share": counted.share}
            row["estimates"] = estimate(contender, counted, split)
        if split is not None:
            slack = None if split.reserved is None else split.reserved - split.allocated
            row["memory"] = {**asdict(split), "slack": slack}
        if label in self.largest:
            row["largest_batch"] = self.largest[label].document()
        return row


class Benchmark:
    """Recipes measured one after another."""

    def __init__(self, settings: Sequence[Settings], plan: BenchmarkPlan) -> None:
        self.plan = plan
        self.subjects = [Subject(one, plan) for one in settings]
        self.complete = False
        self.command: str | None = None
        self._header = results.header(KIND)

    @property
    def stages(self) -> int:
        """Number of measurements of `run`, if none fails."""
        return sum(subject.stages for subject in self.subjects)

    def run(self, stop: Stop = lambda: False) -> Iterator[str]:
        """Run the measurements until `stop()` is true, and yield a description of each."""
        for subject in self.subjects:
            yield from subject.measure(stop)
        self.complete = not stop()

    def document(self) -> dict[str, Any]:
        """Return all measurements as plain values."""
        settings = self.subjects[0].settings
        device = torch.device(settings.device).type
        return {
            **self._header,
            "command": self.command,
            "complete": self.complete,
            "device": settings.device,
            "tf32": _TF32.get(device, _TF32["cpu"]),
            "products": {subject: words for subject, words in choices().items() if subject.endswith("products")},
            "plan": asdict(self.plan),
            "methods": {
                "step": timing.STEP_METHOD.format(slow=slow_limit(self.plan.seconds)),
                "wall": timing.WALL_METHOD,
                "memory": memory.METHODS[device],
                "parts": "; ".join(f"{name}: {text}" for name, text in PARTS.items()),
                **({"reserved": largest_batch.RESERVED_METHOD} if device == "cpu" else {}),
                "slack": _SLACK,
                "operations": operations.METHOD,
                "largest_batch": largest_batch.METHOD.format(tolerance=largest_batch.TOLERANCE),
                "estimates": ESTIMATES,
            },
            "recipes": [subject.document() for subject in self.subjects if subject.timers],
        }


# -- estimates ---------------------------------------------------------------------------------------------------------
_SLACK = (
    "slack: reserved minus allocated; negative if memory was allocated and not written to; kept for backward: all "
    "activations at the end of the forward pass, which need not be the peak"
)
_TORCH = {"fp32": "plain torch", "torch.amp": "torch.autocast, and torch.amp.GradScaler for fp16, in the same loop"}
_TF32 = {
    "cpu": "TF32: there is none on a CPU",
    "cuda": "TF32: fp32 is measured with it off and on, everything else with it off",
}


ESTIMATES = (
    f"energy and area are ESTIMATES, not measurements, from {cost.SOURCE}: multiply-adds of a step, each a "
    "multiplication in the format and an addition in fp32 (of integers in int32), in picojoules; and each byte of "
    "weights, masters, gradients, optimizer state, activations and casts written to DRAM and read back once a step, "
    f"{cost.READ_ENERGY['DRAM']:g} pJ for 32 bits; area of one multiplier with its adder; ~ marks values between "
    "the rows of that table"
)
_INT32 = IntFormat("int32", 32, False)
_DRAM_PER_BYTE = cost.READ_ENERGY["DRAM"] / 4


def estimate(contender: Contender, operations: Operations, memory: Split | None) -> dict[str, Any]:
    """Return joules per step of arithmetic and of DRAM traffic, and the area of a multiply-add unit in µm².

    These are not measurements and do not depend on the machine that ran the step. Operations and bytes are those
    counted in the step.
    """
    wide = FORMATS["tf32" if contender.tf32 else "fp32"]
    narrow = contender.narrow or wide
    pairs = (
        (operations.narrow, _multiply_add(narrow, contender.sums_integers)),
        (operations.total - operations.narrow, _multiply_add(wide, False)),
    )
    picojoules = sum(count / 2 * energy.value for count, (energy, _) in pairs)
    area, fp32_area = _multiply_add(narrow, contender.sums_integers)[1], _multiply_add(FORMATS["fp32"], False)[1]
    result: dict[str, Any] = {
        "format": str(narrow),
        "arithmetic_joules": picojoules * 1e-12,
        "how": "table" if all(energy.how == "table" for count, (energy, _) in pairs if count) else "interpolated",
        "unit_area_um2": area.value,
        "unit_area_relative_to_fp32": area.value / fp32_area.value,
        "unit_area_how": area.how,
    }
    if memory is not None:
        result["dram_bytes"] = 2 * sum(memory.held.values())
        result["dram_joules"] = result["dram_bytes"] * _DRAM_PER_BYTE * 1e-12
    return result


def _multiply_add(format: Format, sums_integers: bool) -> tuple[Estimate, Estimate]:
    """Return energy and area of a multiplication in a format and an addition in the width of its sums."""
    one, sums = cost.cost(format), cost.cost(_INT32 if sums_integers else FORMATS["fp32"])
    return _together(one.multiply_energy, sums.add_energy), _together(one.multiply_area, sums.add_area)


def _together(first: Estimate, second: Estimate) -> Estimate:
    how = next((one.how for one in (first, second) if one.how != "table"), "table")
    return Estimate(first.value + second.value, first.unit, how)


SOURCE = (
    "A. Bilogur's guide to mixed precision training, June 2020 (PyTorch 1.6 nightly; whole trainings, fp32 and "
    "torch.amp fp16; memory as reserved)"
)


# by recipe and GPU: minutes and seconds of a whole training, and gigabytes, each in fp32 and under torch.amp
_PUBLISHED = {
    ("rossmann", "V100"): (((10, 10), (10, 55)), (1.19, 1.19)),
    ("rossmann", "T4"): (((8, 43), (8, 39)), (0.932, 0.936)),
    ("unet", "V100"): (((8, 25), (7, 58)), (4.33, 3.71)),
    ("unet", "T4"): (((13, 7), (9, 14)), (4.26, 2.67)),
    ("bert", "V100"): (((17, 38), (8, 10)), (9.62, 8.76)),
    ("bert", "T4"): (((55, 17), (20, 27)), (9.35, 8.49)),
}


def published(recipe: str) -> dict[str, Any] | None:
    """Return the published figures of a recipe as plain values with their source; None for other recipes."""
    rows = []
    for (name, gpu), (times, gigabytes) in _PUBLISHED.items():
        if name == recipe:
            seconds = tuple(60.0 * minutes + rest for minutes, rest in times)
            ratios = {"time_ratio": seconds[1] / seconds[0], "memory_ratio": gigabytes[1] / gigabytes[0]}
            rows.append({"gpu": gpu, "seconds": seconds, "gigabytes": gigabytes, **ratios})
    return {"source": SOURCE, "size": "full", "gpus": rows} if rows else None
