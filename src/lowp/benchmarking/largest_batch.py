"""The largest batch that fits into a given memory, and the memory that a step on a CPU takes from the system.

The batch is predicted by linear extrapolation, and then measured. The memory is the growth of a fresh process: besides
torch's tensors that of libraries, memory that the C library keeps after a free, and the rest of partly used pages, but
not memory that is allocated and never written.
"""

import gc
import io
import multiprocessing
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp.benchmarking.contenders import STOPPED_BY, Contender, begin, step_of
from lowp.benchmarking.memory import batch_of, warm_up
from lowp.errors import InvalidInput
from lowp.recipes.recipe import Data
from lowp.recipes.runs import interrupts_left_to_us

METHOD = (
    "largest batch: the peak of a step is measured at two batches and extended along a line to the memory given; the "
    "batch found is then measured, and again until one fits and one of at most {tolerance:.0%} more does not"
)
TOLERANCE = 0.01
_MOST = 12  # measurements
_GROWTH = 8  # largest ratio of a guess to the largest measured batch
_UNITS = {"B": 1}
_UNITS |= {letter + end: base**at for end, base in (("B", 1000), ("IB", 1024)) for at, letter in enumerate("KMGT", 1)}

Measure = Callable[[int], "int | None"]


@dataclass
class LargestBatch:
    """The largest `batch` that was measured to fit `limit`, and the smallest one that was measured not to fit.

    `measured`: bytes by batch size, None if memory ran out. `batch` is 0 if one example does not fit. `ended`: the
    reason for which the search ended before it closed the gap.
    """

    limit: int
    measured: dict[int, int | None] = field(default_factory=dict)
    ended: str = ""

    @property
    def batch(self) -> int:
        """The largest batch that fits."""
        return max((batch for batch, used in self.measured.items() if self._fits(used)), default=0)

    @property
    def too_large(self) -> int | None:
        """The smallest batch that does not fit."""
        return min((batch for batch, used in self.measured.items() if not self._fits(used)), default=None)

    @property
    def peak(self) -> int | None:
        """Bytes of the largest batch that fits."""
        return self.measured.get(self.batch)

    @property
    def is_closed(self) -> bool:
        """Whether the two differ by at most one, or by the tolerance."""
        return self.too_large is not None and self.too_large - self.batch <= max(1, int(TOLERANCE * self.batch))

    def document(self) -> dict[str, Any]:
        """Return plain values."""
        found = {name: getattr(self, name) for name in ("limit", "batch", "peak", "too_large", "ended")}
        measured = {str(batch): used for batch, used in sorted(self.measured.items())}
        return {**found, "verified": self.is_closed, "measured": measured}

    def _fits(self, used: int | None) -> bool:
        return used is not None and used <= self.limit


def largest_batch(
    limit: int, measure: Measure, start: int, stop: Callable[[int], str] = lambda batch: ""
) -> LargestBatch:
    """Search from the batch `start`; `measure` returns the bytes of a batch, None if memory ran out.

    `stop` is called before each measurement; a nonempty text that it returns ends the search and is the reason.
    """
    found = LargestBatch(limit)
    for guess in _guesses(found, start):
        found.ended = stop(guess)
        if found.ended:
            break
        found.measured[guess] = measure(guess)
        if found.is_closed:
            break
    else:
        found.ended = f"{_MOST} batches were measured"
    return found


def _guesses(found: LargestBatch, start: int) -> Iterator[int]:
    yield start
    yield 2 * start if found.batch else max(1, start // 2)
    for _ in range(_MOST - 2):
        yield _next(found)


def _next(found: LargestBatch) -> int:
    """Return the batch at which the line through the two nearest measurements meets the limit, between the two."""
    low, high = found.batch, found.too_large
    known = sorted((batch, used) for batch, used in found.measured.items() if used is not None)
    known.sort(key=lambda point: abs(point[1] - found.limit))
    if low == 0:  # nothing fits so far
        assert high is not None
        return max(1, high // _GROWTH)
    guess = low
    if len(known) > 1:
        (first, used), (second, other) = known[:2]
        slope = (used - other) / (first - second)
        if slope > 0:
            guess = int(first + (found.limit - used) / slope)
    elif high is not None:
        guess = (low + high) // 2
    if guess <= low:  # by the line, or without one, no larger batch fits: try the next one
        guess = low + max(1, int(TOLERANCE * low))
    if high is None:
        return min(guess, _GROWTH * low)
    # the line contradicts the measurements (memory runs out, or grows in steps): bisect
    return guess if guess < high else (low + high) // 2


def bytes_from(text: str) -> int:
    """Return a size in bytes from its text: 2GB (10^9), 1.5GiB (2^30), 800MB, 4096B. Raise InvalidInput for others."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        known = "KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)"
        raise InvalidInput(
            f"--memory {text!r} is not a size: give a number and a unit, such as 2GB or 512MiB; units: {known}"
        )
    size = int(float(match[1]) * _UNITS[unit])
    if size < 1:
        raise InvalidInput(f"--memory {text!r} is not possible: give at least one byte, such as 2GB or 512MiB")
    return size


# -- the memory of a process -------------------------------------------------------------------------------------------
RESERVED_METHOD = (
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
    # of processes forked from one that has imported this module and computed nothing
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
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
    with suppress(OSError):  # the peak may be that of the start of the process otherwise
        Path("/proc/self/clear_refs").write_text("5")
    before = _kibibytes("VmRSS") if is_known() else 0
    yield lambda: 1024 * max(0, _kibibytes("VmHWM") - before) if is_known() else None


def _load_libraries() -> None:
    """Take a tiny step, so that code loaded by every training is not counted as memory of the step."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), torch.zeros(4, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _kibibytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[name].split()[0])
