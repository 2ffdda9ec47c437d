"""The memory that a training step on a CPU takes from the system: the growth of a fresh process.

Besides torch's tensors it includes the memory of libraries, memory that the C library keeps after a free, and the rest
of partly used pages; it does not include memory that is allocated and never written.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.benchmarking.contenders import STOPPED_BY, Contender, begin, step_of
from lowp.benchmarking.memory import batch_of, warm_up
from lowp.recipes.recipe import Data
from lowp.recipes.runs import interrupts_left_to_us

METHOD = (
    "reserved: growth of a fresh process's resident memory from before the model was created to its peak (VmHWM of "
    "/proc/self/status) after two steps"
)
_STATUS = Path("/proc/self/status")


def is_known() -> bool:
    """Whether this system reports the current and peak size of a process, as Linux does."""
    try:
        return _kibibytes("VmHWM") > 0
    except (OSError, KeyError, ValueError):
        return False


def process_growth(
    contender: Contender, data: Data, batch: int, threads: int, stop: Callable[[], bool] = lambda: False
) -> int | None:
    """Return the growth of a process in bytes for a step; None if it is unknown, or an error or `stop` ends it."""
    if not is_known() or contender.settings.device != "cpu":
        return None
    context = _context()
    examples = _Same(_packed(data.training.batch(torch.arange(batch) % len(data.training))), batch)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sending, contender, examples, threads), daemon=True)
    with interrupts_left_to_us():
        process.start()
    sending.close()
    try:
        while not receiving.poll(0.1):
            if stop() or not process.is_alive():
                break
        return int(found) if receiving.poll() and (found := receiving.recv()) is not None else None
    except EOFError:  # the process ended without a result, for example out of memory
        return None
    finally:
        receiving.close()
        if process.is_alive():
            process.join(1)
        process.kill()
        process.join()


@dataclass(frozen=True)
class _Same:
    """Examples whose every selection is the one batch sent along, so that no process loads the data again."""

    packed: bytes
    size: int

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> Any:
        return torch.load(io.BytesIO(self.packed), weights_only=True)


def _packed(batch: Any) -> bytes:
    file = io.BytesIO()
    torch.save(batch, file)
    return file.getvalue()


def _context() -> Any:
    """Return a context of processes forked from one that has imported this module and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


# -- in the other process ---------------------------------------------------------------------------------------------
def _measure(sending: Connection, contender: Contender, examples: _Same, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    torch.set_num_threads(threads)
    try:
        with growth() as grown:
            training = begin(contender, Data(examples, examples, ""))
            training.model.train()
            inputs = batch_of(training, len(examples))
            warm_up(training, contender, inputs)
            step_of(training, contender, inputs)
            found = grown()
    except STOPPED_BY:
        found = None
    with suppress(BrokenPipeError):  # the parent was interrupted and waits no more
        sending.send(found)


@contextmanager
def growth() -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the peak growth of this process in bytes since then; None if it is unknown."""
    _load_libraries()
    gc.collect()
    _forget_highest()
    before = _kibibytes("VmRSS") if is_known() else 0
    yield lambda: 1024 * max(0, _kibibytes("VmHWM") - before) if is_known() else None


def _load_libraries() -> None:
    """Take a tiny step, so that code loaded by every training is not counted as memory of the step."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.zeros(4, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _forget_highest() -> None:
    """Reset the peak size of this process; otherwise it may be that of the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _kibibytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[name].split()[0])
