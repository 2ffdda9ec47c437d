"""Many training runs, one after another or in parallel processes; an interruption loses less than a minute."""

import functools
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from lowp.errors import LowpError
from lowp.exponents import SharedExponents
from lowp.recipes import get
from lowp.recipes.recipe import Data
from lowp.recipes.results import available_cores
from lowp.recipes.sampling import Sampler
from lowp.recipes.training import STOPS, Settings, Training, load_data, read_extra, threads_of

# Fewer steps than this are done before a second process has imported torch.
_STEPS_WORTH_A_PROCESS = 4000
_PACE = 0.1  # seconds between two calls for the progress display
_LAST_STEP = 1.0  # seconds for a process to finish its step after a stop

OnEpoch = Callable[[str, float], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Job:
    """A training run to be done. `name`: for the progress display. `samples`: the number of steps to sample, or 0.

    `kept`: the checkpoint of the run where it was interrupted, which is removed at its end; None for no checkpoint.
    """

    name: str
    settings: Settings
    samples: int = 8
    kept: Path | None = None


def train_once(job: Job, data: Data, on_epoch: OnEpoch, stop: Stop = lambda: False) -> dict[str, Any] | None:
    """Train, and return the run as plain values; None if it was stopped, which `job.kept` then continues.

    `on_epoch` gets the name and the number of epochs done, a fraction within one, at most ten times a second.

    They are the settings, the history, the sampler's shares, the state of the loss scale, and the failure. The errors
    in `STOPS` (no usable loss scale, a weight that is NaN, out of memory) are the run's failure and are not raised.
    """
    training, shares = None, {}
    if stop():
        return None
    try:
        training, observed = _begun(job, data)
        sampler = Sampler(training, job.samples) if job.samples else None
        if sampler is not None and observed is not None:
            sampler.restore(observed)
        keeper = RunKeeper(job.kept, lambda: {"observed": sampler and sampler.state()}, False) if job.kept else None
        on_step = Paced(lambda training: on_epoch(job.name, training.progress * training.epochs))
        if not training.run(lambda training: on_epoch(job.name, training.epoch), stop, sampler, keeper, on_step):
            return None
        failure, shares = training.failure, sampler.shares() if sampler is not None else {}
    except STOPS as error:
        failure = f"{type(error).__name__}: {error}"
    if job.kept is not None:
        job.kept.unlink(missing_ok=True)
    precision = None if training is None else training.precision
    exponents = None if precision is None else precision.exponents
    return {
        "settings": asdict(job.settings),
        "seed": job.settings.seed,
        "history": [] if training is None else training.history,
        "failure": failure,
        "loss_scale": None if precision is None else precision.scale,
        "skipped_steps": None if precision is None else precision.skipped_steps,
        "steps": None if precision is None else precision.steps,
        **({} if exponents is None else {"shared_exponents": summary_of(exponents)}),
        **shares,
    }


class Paced:
    """Calls a function after a step of a training, at most ten times a second."""

    def __init__(self, then: Callable[[Training], None]) -> None:
        self._then, self._called = then, time.monotonic()

    def __call__(self, training: Training, loss: torch.Tensor) -> None:
        """Take a step into account."""
        if (now := time.monotonic()) - self._called >= _PACE:
            self._called = now
            self._then(training)


def _begun(job: Job, data: Data) -> tuple[Training, dict[str, Any] | None]:
    """Return a training as its checkpoint has left it, with what was sampled; a new one without such a checkpoint."""
    if job.kept is not None and job.kept.exists():
        try:
            extra = read_extra(job.kept)
            if extra["settings"] == asdict(job.settings.filled()):
                return Training.resume(job.kept, {"recipe": job.settings.recipe}, data), extra.get("observed")
        except LowpError:  # damaged, or of another version
            pass
    return Training(job.settings, data), None


def summary_of(exponents: SharedExponents) -> dict[str, dict[str, float]]:
    """Return the summary of what training wrote under shared exponents, by class of tensors, as plain values."""
    return {
        name: {**asdict(summary), "headroom_bits": summary.headroom_bits}
        for name, summary in exponents.summary().items()
    }


def processes_for(jobs: Sequence[Job], data: Data) -> int:
    """Return the number of processes to use: one per core for many steps of one thread, otherwise 1."""
    if not jobs or any(get(job.settings.recipe).threads != 1 or job.settings.device != "cpu" for job in jobs):
        return 1
    steps = sum((job.settings.epochs or 1) * len(data.training) // (job.settings.batch or 1) for job in jobs)
    return min(available_cores(), len(jobs)) if steps >= _STEPS_WORTH_A_PROCESS else 1


def run_jobs(
    jobs: Sequence[Job], data: Data, processes: int, on_epoch: OnEpoch, stop: Stop = lambda: False
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its run when it is done.

    Once `stop()` is true, the others end within a step and are not yielded.
    """
    if processes > 1:
        yield from _in_processes(jobs, processes, on_epoch, stop)
        return
    for job in jobs:
        with threads_of(get(job.settings.recipe).threads):
            run = train_once(job, data, on_epoch, stop)
        if run is not None:
            yield job, run


def _in_processes(
    jobs: Sequence[Job], processes: int, on_epoch: OnEpoch, stop: Stop
) -> Iterator[tuple[Job, dict[str, Any]]]:
    # Each process is a new interpreter: a fork of a process whose OpenMP threads have run would hang.
    context = multiprocessing.get_context("spawn")
    stopping, epochs = context.Event(), context.Queue()
    executor = ProcessPoolExecutor(processes, context, _begin, (stopping, epochs))
    try:
        with interrupts_left_to_us():
            waiting: dict[Future[dict[str, Any] | None], Job] = {executor.submit(_work, job): job for job in jobs}
        while waiting:
            done, _ = wait(waiting, timeout=0.1, return_when=FIRST_COMPLETED)
            if stop():
                stopping.set()
            with suppress(queue.Empty):
                while True:
                    on_epoch(*epochs.get_nowait())
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
        epochs.close()


@contextmanager
def interrupts_left_to_us() -> Iterator[None]:
    """Start processes inside with SIGINT blocked from the beginning, so that only this process handles Ctrl-C.

    One that comes while they start reaches this process afterwards. It does nothing where signals cannot be blocked.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # starting it would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in a worker process ----------------------------------------------------------------------------------------------
_stopping: Any = None
_epochs: Any = None


def _begin(stopping: Any, epochs: Any) -> None:
    global _stopping, _epochs
    _stopping, _epochs = stopping, epochs
    threading.Thread(target=_end_after, args=(stopping,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_after(stopping: Any) -> None:
    """End this process if its step takes too long after a stop."""
    stopping.wait()
    time.sleep(_LAST_STEP)
    os._exit(1)


def _end_with(parent: Any) -> None:
    """End this process when its parent ends, even if that was killed."""
    parent.join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _data_of(settings: Settings) -> Data:
    return load_data(settings)


def _work(job: Job) -> dict[str, Any] | None:
    data_settings = Settings(job.settings.recipe, size=job.settings.size, data=job.settings.data)
    return train_once(job, _data_of(data_settings), lambda name, epoch: _epochs.put((name, epoch)), _stopping.is_set)


# -- checkpoints -------------------------------------------------------------------------------------------------------
_SECONDS = 30.0  # between two checkpoints within an epoch
_LONG = 0.5  # seconds of an evaluation that is worth a checkpoint before it


class RunKeeper:
    """Writes the checkpoint of one training.

    It is written before the first evaluation (if `keeps_beginning`), within an epoch every 30 seconds, before an
    evaluation that will take long, and where the training is stopped. `extra` gives what is saved beside. `at` says in
    words what the file holds.
    """

    def __init__(self, path: Path, extra: Callable[[], dict[str, Any]] = dict, keeps_beginning: bool = True) -> None:
        self.path, self.at = path, ""
        self._extra = extra
        self._saved = time.monotonic()
        self._evaluation = math.inf if keeps_beginning else 0.0  # seconds of the latest one

    def save(self, training: Training) -> None:
        """Write the checkpoint."""
        self.path.parent.mkdir(exist_ok=True)
        training.save(self.path, **self._extra())
        self._saved = time.monotonic()
        self.at = f"step {training.step_of_epoch} of epoch {min(training.epoch + 1, training.epochs)}"

    def after_step(self, training: Training) -> None:
        """Write the checkpoint if the last one is old."""
        if time.monotonic() - self._saved > _SECONDS:
            self.save(training)

    def before_evaluation(self, training: Training) -> bool:
        """Return whether the evaluation may be stopped, because the state before it is kept."""
        if self._evaluation < _LONG:
            return False
        self.save(training)
        return True

    def evaluated(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self._evaluation = seconds
