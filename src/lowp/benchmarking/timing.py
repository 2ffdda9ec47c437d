"""The time of a step, and of a loop with its data, for contenders that take turns, as the rows of a comparison.

A contender whose step takes longer than its time gets few steps, at least one, and its result is marked.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowp.benchmarking import memory
from lowp.benchmarking.contenders import BASELINE, STOPPED_BY, Contender, begin, step_of
from lowp.benchmarking.memory import batch_of
from lowp.benchmarking.operations import Operations, counted
from lowp.recipes.comparison import Study
from lowp.recipes.recipe import Data
from lowp.recipes.training import Training, moved, threads_of

STEP_METHOD = (
    "time per step: forward, loss, backward and update of one prepared batch, steps timed one by one; median and "
    "quartiles. The rows take turns, after at least two steps that are not timed; `relative` is the median over the "
    "turns of the ratio to fp32's time in the same turn, so that a machine that slows down slows both. A row whose "
    "first two steps take {slow:g} s or more each has only the second"
)
WALL_METHOD = (
    "wall time: the same loop with new batches, created and moved one after another, in turns with the timed steps: "
    "seconds from the first to the last, of which `data` went into batches; an epoch is so many steps times that"
)

ROUNDS = 8
_LONGEST_TURN = 0.5  # seconds between checks for Ctrl-C
_LEAST_STEPS = 3
_SLOW = 3  # multiple of a contender's seconds


@dataclass
class StepTimer:
    """A contender and its timings. `failure` is the error that ended it, if any.

    `rounds` has the seconds of the timed steps of each turn; `slow`: only one step was timed. With `steps_only`,
    operations are not counted and the loop with its data is not timed; without `counts`, operations are not counted.
    """

    contender: Contender
    steps_only: bool = False
    counts: bool = True
    training: Training | None = None
    batch: Any = None
    failure: str | None = None
    slow: bool = False
    operations: Operations | None = None
    rounds: list[list[float]] = field(default_factory=list)
    wall_seconds: float = 0.0
    data_seconds: float = 0.0
    wall_steps: int = 0
    units: int = 0

    @property
    def times(self) -> list[float]:
        """The times of all timed steps in seconds."""
        return [seconds for taken in self.rounds for seconds in taken]

    @property
    def median(self) -> float | None:
        """The median time of a step in seconds."""
        return statistics.median(self.times) if self.times else None

    def step(self) -> dict[str, Any]:
        """Return the time of a step as plain values, with quartiles for two steps or more."""
        times = self.times
        quartiles = statistics.quantiles(times, n=4)[::2] if len(times) > 1 else None
        return {"median": self.median, "quartiles": quartiles, "steps": len(times), "only_one": self.slow}

    def relative_to(self, baseline: StepTimer) -> float | None:
        """Return the median over the turns of the ratio to the baseline's time."""
        if self.median is None or baseline.median is None:
            return None
        if self.slow or baseline.slow:
            return self.median / baseline.median
        pairs = zip(self.rounds, baseline.rounds, strict=False)
        return statistics.median(statistics.median(mine) / statistics.median(base) for mine, base in pairs)

    def wall(self, steps_per_epoch: int) -> dict[str, Any] | None:
        """Return the wall time as plain values; None if none of its steps was taken."""
        if not self.wall_steps:
            return None
        each = self.wall_seconds / self.wall_steps
        return {
            "steps": self.wall_steps,
            "seconds": self.wall_seconds,
            "data_seconds": self.data_seconds,
            "seconds_per_step": each,
            "steps_per_epoch": steps_per_epoch,
            "epoch_seconds": each * steps_per_epoch,
        }

    # -- measuring ----------------------------------------------------------------------------------------------------
    def begin(self, data: Data, seconds: float) -> None:
        """Create the model, take the first steps and count the operations of one."""
        training = self.training = begin(self.contender, data)
        training.model.train()
        self.batch = batch_of(training, _size(training))
        self.units = training.recipe.units(self.batch)
        if self.steps_only or not self.counts:
            first = self._timed()
        elif self.contender.kind == "lowp":  # counting slows down its many small calls
            first = self._timed()
            self.operations = counted(self._step)
        else:
            first = self._timed(lambda: setattr(self, "operations", counted(self._step)))
        second = self._timed()
        if min(first, second) >= slow_limit(seconds):
            self.slow, self.rounds = True, [[second]]

    def turn(self, seconds: float) -> None:
        """Take timed steps for about a share of the seconds, and as many steps of the loop with its data."""
        if self.is_done(seconds):
            return
        taken: list[float] = []
        while not taken or sum(taken) < min(seconds / ROUNDS, _LONGEST_TURN):
            taken.append(self._timed())
        self.rounds.append(taken)
        if not self.steps_only:
            self._walk(len(taken))

    def is_done(self, seconds: float) -> bool:
        """Whether the contender has used its time, or cannot take a step."""
        enough = len(self.times) >= _LEAST_STEPS and sum(self.times) >= seconds
        return self.failure is not None or self.slow or enough

    def guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function; an error about numbers, memory or a missing kernel ends only this contender."""
        try:
            function(*arguments)
        except STOPPED_BY as error:
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}"
            self.release()

    def release(self) -> None:
        """Release the model."""
        self.training = self.batch = None

    def _step(self) -> None:
        assert self.training is not None
        step_of(self.training, self.contender, self.batch)

    def _timed(self, step: Callable[[], None] | None = None) -> float:
        assert self.training is not None
        wait(self.training.device)
        started = time.perf_counter()
        (step or self._step)()
        wait(self.training.device)
        return time.perf_counter() - started

    def _walk(self, count: int) -> None:
        """Take steps on new batches, in the same order for every contender."""
        training = self.training
        assert training is not None
        size, total = _size(training), len(training.data.training)
        wait(training.device)
        started = time.perf_counter()
        for _ in range(count):
            loading = time.perf_counter()
            generator = torch.Generator().manual_seed(self.wall_steps)
            indices = torch.randint(total, (size,), generator=generator)
            batch = moved(training.data.training.batch(indices, generator), training.device)
            self.data_seconds += time.perf_counter() - loading
            step_of(training, self.contender, batch)
            self.wall_steps += 1
        wait(training.device)
        self.wall_seconds += time.perf_counter() - started


def slow_limit(seconds: float) -> float:
    """Return the time of a step in seconds from which on only one is timed, for contenders with `seconds` each."""
    return _SLOW * seconds


def time_steps(
    contenders: Sequence[Contender],
    data: Data,
    seconds: float,
    stop: Callable[[], bool],
    *,
    steps_only: bool = False,
    counts: bool = True,
) -> list[StepTimer]:
    """Time contenders in turns for about `seconds` each, and the loop with data as long, until `stop()` is true.

    The first contender is the baseline, which continues as long as any other. `steps_only`: do not time the loop with
    data, and do not count operations. `counts`: whether operations are counted otherwise.
    """
    timers = [StepTimer(contender, steps_only, counts) for contender in contenders]
    for timer in timers:
        if stop():
            break
        timer.guarded(timer.begin, data, seconds)
    while not stop() and not all(timer.is_done(seconds) for timer in timers):
        for timer in timers:
            if timer.training is not None and not stop():
                timer.guarded(timer.turn, seconds)
    for timer in timers:
        timer.release()
    return timers


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _size(training: Training) -> int:
    size = training.settings.batch
    assert size is not None
    return size


# -- the rows of a comparison ------------------------------------------------------------------------------------------
def measure(study: Study, seconds: float = 1.5, stop: Callable[[], bool] = lambda: False) -> None:
    """Time steps of every row for about `seconds` each, and measure their peak memory, until `stop()` is true."""
    contenders = [
        Contender(one.label, BASELINE if one.settings.precision == "fp32" else "lowp", one.settings)
        for one in study.variants
    ]
    with threads_of(study.recipe.threads) as threads:
        with others_busy() as busy:
            timers = time_steps(contenders, study.data, seconds, stop, steps_only=True)
            cores = busy()
        others = "" if cores is None else f". Other processes kept {cores:.1f} of {os.cpu_count()} cores busy meanwhile"
        study.cost_methods = {
            "time": STEP_METHOD.format(slow=slow_limit(seconds)) + others,
            "memory": memory.METHODS[torch.device(study.settings.device).type],
        }
        for contender, timer in zip(contenders, timers, strict=True):
            if stop():
                return
            step = timer.step()
            study.costs[contender.label] = {
                "step_seconds": step["median"],
                "step_seconds_quartiles": step["quartiles"],
                "step_relative": timer.relative_to(timers[0]),
                "steps_timed": step["steps"] or None,
                "threads": threads,
                "peak_memory_bytes": peak_memory(contender, study.data),
            }


def peak_memory(contender: Contender, data: Data) -> int | None:
    """Return the peak memory in bytes of a step of the contender's batch; None if an error stops the step."""
    size = contender.settings.filled().batch
    assert size is not None
    try:
        return memory.memory_of(contender, data, min(size, len(data.training))).allocated
    except STOPPED_BY:
        return None


# -- the rest of the machine ------------------------------------------------------------------------------------------
@contextmanager
def others_busy() -> Iterator[Callable[[], float | None]]:
    """Yield a function that returns how many cores other processes kept busy since then; None if that is unknown."""
    started, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores() -> float | None:
        now = _busy_seconds()
        if busy is None or now is None:
            return None
        return max(0.0, now - busy - (_own_seconds() - own)) / max(time.perf_counter() - started, 1e-9)

    yield cores


def _busy_seconds() -> float | None:
    """Return the seconds of processor time of the whole machine since its start; None on systems other than Linux."""
    try:
        head = Path("/proc/stat").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, head[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the seconds of processor time of this process and of its ended child processes."""
    return sum(os.times()[:4])
