"""The cost of the rows of a comparison: the time and peak memory of a step, and the other load of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowp.benchmarking import memory
from lowp.benchmarking.contenders import BASELINE, STOPPED_BY, Contender
from lowp.benchmarking.timing import STEP_METHOD, StepTimer, slow_limit, time_steps
from lowp.recipes.comparison import Study, Variant
from lowp.recipes.recipe import Data
from lowp.recipes.training import threads_of


def measure(study: Study, seconds: float = 1.5, stop: Callable[[], bool] = lambda: False) -> None:
    """Time steps of every row for about `seconds` each, and measure their peak memory, until `stop()` is true."""
    contenders = [_contender(variant) for variant in study.variants]
    with threads_of(study.recipe.threads) as threads:
        with others_busy() as busy:
            timers = time_steps(contenders, study.data, seconds, stop, steps_only=True)
            cores = busy()
        study.cost_methods = {
            "time": STEP_METHOD.format(slow=slow_limit(seconds)) + _meanwhile(cores),
            "memory": memory.METHODS[torch.device(study.settings.device).type],
        }
        for contender, timer in zip(contenders, timers, strict=True):
            if stop():
                return
            study.costs[contender.label] = {
                **_times(timer, timers[0]),
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


def _contender(variant: Variant) -> Contender:
    return Contender(variant.label, BASELINE if variant.settings.precision == "fp32" else "lowp", variant.settings)


def _times(timer: StepTimer, baseline: StepTimer) -> dict[str, object]:
    step = timer.step()
    return {
        "step_seconds": step["median"],
        "step_seconds_quartiles": step["quartiles"],
        "step_relative": timer.relative_to(baseline),
        "steps_timed": step["steps"] or None,
    }


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


def _meanwhile(cores: float | None) -> str:
    return "" if cores is None else f". Other processes kept {cores:.1f} of {os.cpu_count()} cores busy meanwhile"


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
