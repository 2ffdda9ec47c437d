"""The cost of a training step: its time, precisions taking turns, its peak of memory, and what else ran meanwhile."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lowp.errors import LowpError
from lowp.recipes.recipe import Data
from lowp.recipes.training import Settings, Training, moved

__all__ = [
    "MEMORY_METHOD",
    "STOPS",
    "TIME_METHOD",
    "StepTime",
    "beside",
    "peak_memory",
    "silent",
    "step_times",
    "threads_of",
]

TIME_METHOD = (
    "time a step: forward, loss, backward and update of one batch that lies ready; median of steps timed one by one "
    "after all training, in one process, the precisions taking turns of {turn} steps"
)
MEMORY_METHOD = {
    "cpu": "peak memory: bytes that torch's allocator had handed out at the peak of the second and third step, counted "
    "from before the model was made: weights, masters, gradients, optimizer, activations, casts, the batch",
    "cuda": "peak memory: torch.cuda.max_memory_allocated over the second and third step, less what was allocated "
    "before the model was made",
}

# Errors that speak of numbers or of memory, not of a defect: they end a run, not a comparison.
STOPS = (LowpError, ArithmeticError, torch.OutOfMemoryError)

TURN = 10
_WARM_UP = 3
_MARK = "lowp: peak counted from here"


class StepTime(NamedTuple):
    """Seconds a step: the median, the quartiles, and the number of steps that were timed."""

    median: float
    quartiles: tuple[float, float]
    steps: int


@contextmanager
def threads_of(count: int | None) -> Iterator[int]:
    """Use `count` CPU threads in torch (None: as many as it has now) for a while; yields the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def beside() -> Iterator[Callable[[], float | None]]:
    """Yields a function that tells how many cores other processes have kept busy since; None where nobody says so."""
    started, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores() -> float | None:
        now = _busy_seconds()
        if busy is None or now is None:
            return None
        return max(0.0, now - busy - (_own_seconds() - own)) / max(time.perf_counter() - started, 1e-9)

    yield cores


def _busy_seconds() -> float | None:
    """The seconds in which cores of the machine were not idle, since it started; None but on Linux."""
    try:
        head = Path("/proc/stat").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, head[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """The seconds of processor time of this process and of those that it has started and that have ended."""
    return sum(os.times()[:4])


def step_times(
    settings: Sequence[Settings], data: Data, seconds: float = 1.5, stop: Callable[[], bool] = lambda: False
) -> list[StepTime | None]:
    """Time the step of each of the settings, in turns of `TURN` steps, for about `seconds` each (one turn at least).

    None for a precision that cannot take these steps, because an error stops them. Ends early when `stop()` is true.
    """
    trainings: list[Training | None] = [_ready(one, data) for one in settings]
    batches = [None if one is None else _batch(one) for one in trainings]
    taken: list[list[float]] = [[] for _ in settings]
    end = time.perf_counter() + seconds * len(settings)
    while not stop() and (
        not any(taken) or (time.perf_counter() < end and min(map(len, filter(None, taken))) < 40 * TURN)
    ):
        for place, training in enumerate(trainings):
            if training is None:
                continue
            try:
                taken[place] += [_timed(training, batches[place]) for _ in range(TURN)]
            except STOPS:
                trainings[place], taken[place] = None, []
        if not any(trainings):
            break
    return [_summary(times) if times else None for times in taken]


def peak_memory(settings: Settings, data: Data) -> int | None:
    """The peak of memory of a training step in bytes, by MEMORY_METHOD of the device; None where an error stops it."""
    gc.collect()
    if torch.device(settings.device).type == "cuda":
        return _peak_on_cuda(settings, data)
    with tempfile.TemporaryDirectory() as folder, silent():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            stepped = _three_steps(settings, data)
            gc.collect()
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return _peak(events) if stepped else None


def _ready(settings: Settings, data: Data) -> Training | None:
    """A training that has taken a few steps; None where an error stops it."""
    try:
        training = Training(settings, data)
        training.model.train()
        for _ in range(_WARM_UP):
            training.step(_batch(training))
    except STOPS:
        return None
    return training


def _batch(training: Training) -> Any:
    """The first examples as a batch on the device."""
    return moved(training.data.training.batch(torch.arange(training.batch)), training.device)


def _timed(training: Training, batch: Any) -> float:
    _wait(training.device)
    started = time.perf_counter()
    training.step(batch)
    _wait(training.device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(times: list[float]) -> StepTime:
    low, middle, high = statistics.quantiles(times, n=4)
    return StepTime(middle, (low, high), len(times))


def _three_steps(settings: Settings, data: Data) -> bool:
    try:
        training = Training(settings, data)
        training.model.train()
        for number in range(3):
            if number == 1:
                with record_function(_MARK):
                    pass
            training.step(_batch(training))
    except STOPS:
        return False
    return True


def _peak(events: list[dict[str, Any]]) -> int:
    """The highest sum of allocations less frees, from the mark on."""
    mark = next(event["ts"] for event in events if event.get("name") == _MARK)
    alive = peak = 0
    moves = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    for moment, size in sorted(moves, key=lambda move: move[0]):
        if moment >= mark:
            peak = max(peak, alive)
        alive += size
    return peak


def _peak_on_cuda(settings: Settings, data: Data) -> int | None:
    device = torch.device(settings.device)
    before = torch.cuda.memory_allocated(device)
    training = _ready(settings, data)
    if training is None:
        return None
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        training.step(_batch(training))
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


@contextmanager
def silent() -> Iterator[None]:
    """Send what C++ writes to stderr away: torch's profiler announces its start and stop there."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
