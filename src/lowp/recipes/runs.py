"""Many trainings, one after another or in parallel processes; what is done is kept whenever one stops."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lowp.exponents import SharedExponents
from lowp.recipes import get
from lowp.recipes.recipe import Data
from lowp.recipes.sampling import Sampler
from lowp.recipes.training import STOPS, Settings, Training, load_data, threads_of

__all__ = ["Job", "Stop", "interrupts_left_to_us", "processes_for", "run_jobs", "train_once"]

# Fewer steps than these are done before a second process has imported torch.
_STEPS_WORTH_A_PROCESS = 4000
_LAST_STEP = 1.0  # seconds that a process has for its step after a stop

Told = Callable[[str, int], None]
Stop = Callable[[], bool]


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Job:
    """One training to be done: its name for the progress, and at how many of its steps losses are counted."""

    name: str
    settings: Settings
    samples: int = 8


def train_once(job: Job, data: Data, on_epoch: Told, stop: Stop = _never) -> dict[str, Any] | None:
    """Train, and return the run as plain values: settings, history, shares lost, and why it failed; None if stopped.

    An error that speaks of numbers (no loss scale is small enough, not a number, no memory) is that run's result.
    """
    training = None
    if stop():
        return None
    try:
        training = Training(job.settings, data)
        sampler = Sampler(training.recipe, training.size, training.device, job.samples) if job.samples else None
        finished = training.run(lambda one: on_epoch(job.name, one.epoch), stop, sampler)
        failure, shares = training.failure, sampler.shares() if sampler is not None else {}
    except STOPS as error:
        finished, failure, shares = True, f"{type(error).__name__}: {error}", {}
    if not finished:
        return None
    history = training.history if training is not None else []
    last = training.precision if training is not None else None
    return {
        "settings": asdict(job.settings),
        "seed": job.settings.seed,
        "history": history,
        "failure": failure,
        "loss_scale": None if last is None else last.scale,
        "skipped_steps": None if last is None else last.skipped_steps,
        "steps": None if last is None else last.steps,
        **({} if last is None or last.exponents is None else {"shared_exponents": sums_of(last.exponents)}),
        **shares,
    }


def sums_of(exponents: SharedExponents) -> dict[str, dict[str, float]]:
    """What was written under shared exponents in training, by class of tensors, as plain values."""
    return {
        name: {**asdict(summary), "headroom_bits": summary.headroom_bits}
        for name, summary in exponents.summary().items()
    }


def processes_for(jobs: Sequence[Job], data: Data) -> int:
    """How many processes are worth their start: all cores for many small steps, one where a step uses all cores."""
    if not jobs or any(get(job.settings.recipe).threads != 1 or job.settings.device != "cpu" for job in jobs):
        return 1
    steps = sum((job.settings.epochs or 1) * len(data.training) // (job.settings.batch or 1) for job in jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, len(jobs)) if steps >= _STEPS_WORTH_A_PROCESS else 1


def run_jobs(
    jobs: Sequence[Job], data: Data, processes: int, on_epoch: Told, stop: Stop = _never
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its run as it is done. Once `stop()` is true all end within a step, and are not yielded."""
    if processes > 1:
        yield from _in_processes(jobs, processes, on_epoch, stop)
        return
    for job in jobs:
        with threads_of(get(job.settings.recipe).threads):
            run = train_once(job, data, on_epoch, stop)
        if run is not None:
            yield job, run


def _in_processes(
    jobs: Sequence[Job], processes: int, on_epoch: Told, stop: Stop
) -> Iterator[tuple[Job, dict[str, Any]]]:
    # A fresh interpreter each: a fork of one whose OpenMP threads have run would hang.
    context = multiprocessing.get_context("spawn")
    stopping, told = context.Event(), context.Queue()
    executor = ProcessPoolExecutor(processes, context, _begin, (stopping, told))
    try:
        with interrupts_left_to_us():
            waiting: dict[Future[dict[str, Any] | None], Job] = {executor.submit(_work, job): job for job in jobs}
        while waiting:
            done, _ = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
            if stop():
                stopping.set()
            _pass_on(told, on_epoch)
            for future in done:
                job = waiting.pop(future)
                try:
                    run = future.result()
                except BrokenProcessPool:
                    if stop():
                        return
                    raise
                if run is not None:
                    yield job, run
    finally:
        stopping.set()
        executor.shutdown(wait=True, cancel_futures=True)
        told.close()


def _pass_on(told: Any, on_epoch: Told) -> None:
    while True:
        try:
            on_epoch(*told.get_nowait())
        except queue.Empty:
            return


@contextmanager
def interrupts_left_to_us() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C, from their first moment on: this one tells them to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# -- in a process of its own ------------------------------------------------------------------------------------------
_stopping: Any = None
_told: Any = None


def _begin(stopping: Any, told: Any) -> None:
    global _stopping, _told
    _stopping, _told = stopping, told
    threading.Thread(target=_end_after, args=(stopping,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_after(stopping: Any) -> None:
    """End a process whose step takes too long after a stop."""
    stopping.wait()
    time.sleep(_LAST_STEP)
    os._exit(1)


def _end_with(parent: Any) -> None:
    """Leave no process behind when the one that started it is killed."""
    parent.join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _data_of(settings: Settings) -> Data:
    return load_data(settings)


def _work(job: Job) -> dict[str, Any] | None:
    of_data = Settings(job.settings.recipe, size=job.settings.size, data=job.settings.data)
    return train_once(job, _data_of(of_data), lambda name, epoch: _told.put((name, epoch)), _stopping.is_set)
