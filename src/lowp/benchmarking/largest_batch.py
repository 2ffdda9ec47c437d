"""The largest batch that fits into a given memory: predicted by linear extrapolation, and then measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lowp.errors import InvalidInput

METHOD = (
    "largest batch: the peak of a step is measured at two batches and extended along a line to the memory given; the "
    "batch found is then measured, and again until one fits and one of at most {tolerance:.0%} more does not"
)
TOLERANCE = 0.01
_MOST = 12  # measurements
_GROWTH = 8  # largest ratio of a guess to the largest measured batch
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}

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
        if found.is_closed or (guess == 1 and not found.batch):
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
    guess = low + 1
    if len(known) > 1:
        (first, used), (second, other) = known[:2]
        slope = (used - other) / (first - second)
        if slope > 0:
            guess = int(first + (found.limit - used) / slope)
    elif high is not None:
        guess = (low + high) // 2
    if guess <= low:  # by the line no larger batch fits: try the next one
        guess = low + max(1, int(TOLERANCE * low))
    if high is None:
        return min(guess, _GROWTH * low)
    # the line contradicts the measurements (memory runs out, or grows in steps): bisect
    return guess if low < guess < high else (low + high) // 2


def bytes_from(text: str, option: str = "--memory") -> int:
    """Return a size in bytes from its text: 2GB (10^9), 1.5GiB (2^30), 800MB, 4096B. Raise InvalidInput for others."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        known = "KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024)"
        raise InvalidInput(
            f"{option} {text!r} is not a size: give a number and a unit, such as 2GB or 512MiB; units: {known}"
        )
    size = int(float(match[1]) * _UNITS[unit])
    if size < 1:
        raise InvalidInput(f"{option} {text!r} is not possible: give at least one byte, such as 2GB or 512MiB")
    return size
