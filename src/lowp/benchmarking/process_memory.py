"""What a training step takes from the system: how far a fresh process grows, on a CPU, which has no reserve to ask.

Beside torch's tensors this is the memory that libraries take for themselves, what the C library holds back after a
free, and whole pages where parts are asked for; memory that is allocated and never written is not in it.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.benchmarking.contenders import STOPPED_BY, Contender, begin, step_of
from lowp.benchmarking.memory import batch_of, warm_up
from lowp.recipes.recipe import Data

__all__ = ["METHOD", "growth", "is_known", "process_growth"]

METHOD = (
    "reserved: growth of a fresh process' resident memory from before the model was made to its highest (VmHWM of "
    "/proc/self/status) after two steps"
)
_STATUS = Path("/proc/self/status")


def is_known() -> bool:
    """Whether this system tells how large a process is and was, as Linux does."""
    try:
        return _kibibytes("VmHWM") > 0
    except (OSError, KeyError, ValueError):
        return False


def process_growth(
    contender: Contender, data: Data, batch: int, threads: int, stop: Callable[[], bool] = lambda: False
) -> int | None:
    """Bytes that a process grows by for a step; None where that is not known, or an error or `stop` ends it."""
    if not is_known() or contender.settings.device != "cpu":
        return None
    context = _context()
    examples = _Same(_packed(data.training.batch(torch.arange(batch) % len(data.training))), batch)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sending, contender, examples, threads), daemon=True)
    process.start()
    sending.close()
    try:
        while not receiving.poll(0.1):
            if stop() or not process.is_alive():
                break
        return int(found) if receiving.poll() and (found := receiving.recv()) is not None else None
    except EOFError:  # it ended without a word, as when the system has no memory left for it
        return None
    finally:
        receiving.close()
        if process.is_alive():
            process.join(1)
        process.kill()
        process.join()


@dataclass(frozen=True)
class _Same:
    """Examples of which every choice is the one batch that was sent along: no process has to load the data again."""

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
    """Processes that fork from one which has imported this module and computed nothing: none has to load torch anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


# -- in the other process ---------------------------------------------------------------------------------------------
def _measure(sending: Connection, contender: Contender, examples: _Same, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one tells it to stop
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
    sending.send(found)


@contextmanager
def growth() -> Iterator[Callable[[], int | None]]:
    """Yield what tells by how many bytes this process has grown at its highest since; None where no system tells."""
    _load_libraries()
    gc.collect()
    _forget_highest()
    before = _kibibytes("VmRSS") if is_known() else 0
    yield lambda: 1024 * max(0, _kibibytes("VmHWM") - before) if is_known() else None


def _load_libraries() -> None:
    """A tiny step, so that code which every training loads is not counted as its memory."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.zeros(4, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _forget_highest() -> None:
    """Let the system count the highest size from now on; without it the start of the process may be the highest."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _kibibytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[name].split()[0])
