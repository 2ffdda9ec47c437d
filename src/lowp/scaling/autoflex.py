"""Autoflex: predicts the shared exponent of the next write from the maxima of the last writes.

Source: Koester et al. 2017, arXiv 1711.02213, algorithms 1 and 2, with the constants of the authors' code (the ngraph
repository before commit f3f07758): there chi = max(f) + 3 std(f) + 100 kappa and kappa = 2**(floor(log2 chi) - 14).

One state holds all entries as vectors; an entry is one tensor that one operation writes at one site of the step. Every
function works on all entries at once, on their device, without waiting for the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.compat import widest_float
from lowp.errors import InvalidInput
from lowp.scaling.powers import floor_log2, sum_by_halves, times

# algorithm 1: the first guess, the smallest mantissa that suffices to set the exponent, and the number of tries
_START_EXPONENT = -8
_TELLING_MANTISSA = 32
_TRIES = 10


class AutoflexState(NamedTuple):
    """The state of n entries; its tensors are saved in checkpoints."""

    exponent: Tensor  # int32[n]: the next write's kappa is 2**exponent
    history: Tensor  # fp64[n, window] (fp32 without fp64 on the device): ring of the last maxima, as real values
    seen: Tensor  # int32[n]: maxima written into the ring since it was last cleared
    started: Tensor  # bool[n]: whether the guess of algorithm 1 is done
    writes: Tensor  # int64[n]
    saturated: Tensor  # int64[n]: writes whose largest mantissa was at its limit
    moved: Tensor  # int64[n]: changes of the exponent
    nonfinite: Tensor  # int64[n]: writes that held an infinity or a NaN; they leave the exponent unchanged


class WritesSeen(NamedTuple):
    """Measurements of the writes of one step, by entry."""

    mantissa: Tensor  # int32[n]: the largest |mantissa| after saturation
    mask: Tensor | None = None  # bool[n]: the entries that were written; all by default
    nonfinite: Tensor | None = None  # bool[n]: the entries whose values were not all finite
    vanished: Tensor | None = None  # bool[n]: the entries whose values were not all zero but were all rounded to zero
    overflowed: Tensor | None = None  # int64[n]: elements that did not fit; used by reactive exponents
    crowded: Tensor | None = None  # int64[n]: elements that would not fit under half the scale
    elements: Tensor | None = None  # int64[n]: elements written

    def told(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return which entries were written, and which of them were not all finite: bool[n], as `like`."""
        writes = torch.ones_like(like) if self.mask is None else self.mask
        return writes, torch.zeros_like(writes) if self.nonfinite is None else self.nonfinite & writes


def extended(scaling: Any, state: Any, entries: int = 1) -> Any:
    """Return the state of a scaling with more entries at its end, of which nothing was seen."""
    more = scaling.init(state[0].device, entries)
    return type(state)(*(torch.cat(pair) for pair in zip(state, more, strict=True)))


def powers_of_two(exponent: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return kappa of every entry, 2**exponent."""
    return times(torch.ones_like(exponent, dtype=dtype), exponent)


@dataclass(frozen=True)
class Autoflex:
    """Predicts shared exponents; a scaling (`init`, `observe`, `scale`) for all entries of a model at once.

    The defaults are those of the paper and its code except one: `warm_headroom` keeps a bit while little is known.
    ``Autoflex(warm_headroom=0)`` is as published, on maxima that are neither zero nor non-finite, of which the paper
    says nothing (`start` and `observe` tell what becomes of them).

    `bits`: of a mantissa. `window`: maxima remembered. `beta`, `gamma`: weights of deviation and resolution.
    `min_exponent` .. `max_exponent`: of kappa (5 bits: -31 .. 0). `headroom`: bits kept free always; `warm_headroom`:
    more of them while fewer than `window` maxima are known; `start_headroom`: more of them right after the guess.
    `adapt=False` keeps the exponent that the guess found, which is what fails in comparisons.
    """

    bits: int = 16
    window: int = 16
    beta: float = 3.0
    gamma: float = 100.0
    min_exponent: int = -31
    max_exponent: int = 0
    headroom: int = 0
    warm_headroom: int = 1
    start_headroom: int = 0
    adapt: bool = True

    def __post_init__(self) -> None:
        if not 4 <= self.bits <= 16 or self.window < 1 or self.min_exponent > self.max_exponent:
            raise InvalidInput(
                f"Autoflex with {self.bits} bits, a window of {self.window} and exponents {self.min_exponent} .. "
                f"{self.max_exponent}: allowed are 4 to 16 bits, a window of 1 or more, the smaller exponent first"
            )
        if min(self.headroom, self.warm_headroom, self.start_headroom) < 0:
            raise InvalidInput("Autoflex: give headroom as a number of bits, 0 or more")

    @property
    def limit(self) -> int:
        """The largest mantissa, 2**(bits - 1) - 1; a mantissa as large as that counts as saturated."""
        return (1 << (self.bits - 1)) - 1

    @property
    def guess(self) -> "Autoflex":
        """What makes the exponents of first writes."""
        return self

    @property
    def first_exponent(self) -> int:
        """The exponent of an entry of which nothing was seen."""
        return self._clamped(_START_EXPONENT)

    def init(self, device: torch.device | str | None = None, entries: int = 1) -> AutoflexState:
        """The state of `entries` tensors of which nothing was seen."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(entries, *shape, dtype=dtype, device=device)

        exponent = torch.full((entries,), self.first_exponent, dtype=torch.int32, device=device)
        counters = [zeros(torch.int64) for _ in range(4)]
        started = zeros(torch.bool)
        history = zeros(widest_float(exponent.device), self.window)
        return AutoflexState(exponent, history, zeros(torch.int32), started, *counters)

    def scale(self, state: AutoflexState) -> Tensor:
        """kappa of the next write of every entry: fp32[n], powers of two."""
        return powers_of_two(state.exponent)

    def start(self, state: AutoflexState, maximum: Tensor, mask: Tensor | None = None) -> AutoflexState:
        """Algorithm 1, guess and adjust, for entries that have not started: `maximum` is max|x| of the first write.

        The trial writes of the paper are not made: the largest mantissa of a write at kappa is round(maximum / kappa),
        saturated, which is all that the algorithm looks at. Entries whose maximum is not finite, or that are not in
        `mask`, stay. Zeros are written at kappa = 1, as in the paper, but do not count as a start: what comes after
        them may be small, would be rounded to zero there, and never be seen. From a mantissa of 0 the next try is
        2**14 finer, as in the authors' code (the paper's logarithm of it is minus infinity): 0 counts as one bit long.
        """
        maximum = maximum.to(widest_float(maximum.device)).abs()
        todo = ~state.started & torch.isfinite(maximum)
        if mask is not None:
            todo = todo & mask
        exponent = torch.full_like(state.exponent, self.first_exponent)
        done = ~todo
        step_up = (self.bits - 1) // 2
        for _ in range(_TRIES):
            mantissa = self._mantissa(maximum, exponent)
            saturated = mantissa >= self.limit
            bit_length = (floor_log2(mantissa) + 1).clamp(min=1)
            wanted = torch.where(saturated, exponent + step_up, exponent + bit_length - (self.bits - 1))
            clamped = wanted.clamp(self.min_exponent, self.max_exponent)
            settled = torch.where(saturated, clamped != wanted, mantissa >= _TELLING_MANTISSA)
            # A saturated mantissa is tried again a whole step up, unless the exponent is at the end of its range.
            exponent = torch.where(done, exponent, clamped)
            done = done | settled
        exponent = (exponent + self.start_headroom).clamp(self.min_exponent, self.max_exponent)
        exponent = torch.where(maximum == 0, torch.full_like(exponent, self._clamped(0)), exponent)
        started = state.started | (todo & (maximum > 0))
        return state._replace(exponent=torch.where(todo, exponent, state.exponent), started=started)

    def observe(self, state: AutoflexState, seen: WritesSeen) -> AutoflexState:
        """Algorithm 2, after the writes of a step: remember their maxima and predict the next exponents.

        A saturated write clears what was remembered and counts twice its mantissa. A write of zeros is not remembered:
        a run of them would walk kappa down to where the next value saturates. A non-finite write is counted only. A
        write that vanished at too large a kappa starts again from the guess.
        """
        mantissa = seen.mantissa.to(state.history.dtype)
        writes, bad = seen.told(state.started)
        good = writes & ~bad
        saturated = good & (mantissa >= self.limit)
        kappa = powers_of_two(state.exponent, state.history.dtype)
        value = torch.where(saturated, 2 * mantissa, mantissa) * kappa
        remembered = good & (mantissa > 0)
        seen_before = torch.where(saturated, 0, state.seen)
        slot = torch.arange(self.window, device=seen_before.device) == (seen_before % self.window)[:, None]
        history = torch.where(saturated[:, None], 0.0, state.history)
        history = torch.where(slot & remembered[:, None], value[:, None], history)
        count = seen_before + remembered.to(torch.int32)
        exponent = torch.where(good & (count > 0), self._predicted(history, count, kappa), state.exponent)
        if not self.adapt:
            exponent = state.exponent
        return AutoflexState(
            exponent,
            history,
            count,
            state.started if seen.vanished is None or not self.adapt else state.started & ~(seen.vanished & good),
            state.writes + writes,
            state.saturated + saturated,
            state.moved + (exponent != state.exponent),
            state.nonfinite + bad,
        )

    def predicted_maximum(self, state: AutoflexState) -> Tensor:
        """chi, the predicted maximum of the next write of every entry: fp64[n]; the paper's figure 3 draws it."""
        kappa = powers_of_two(state.exponent, state.history.dtype)
        return self._chi(state.history, state.seen, kappa)

    def _chi(self, history: Tensor, count: Tensor, kappa: Tensor) -> Tensor:
        known = torch.arange(self.window, device=history.device) < count[:, None]
        number = known.sum(1).clamp(min=1)
        mean = sum_by_halves(history) / number
        variance = sum_by_halves(torch.where(known, (history - mean[:, None]) ** 2, 0.0)) / number
        return history.amax(1) + self.beta * variance.sqrt() + self.gamma * kappa

    def _predicted(self, history: Tensor, count: Tensor, kappa: Tensor) -> Tensor:
        exponent = floor_log2(self._chi(history, count, kappa)) - (self.bits - 2) + self.headroom
        exponent = exponent + torch.where(count < self.window, self.warm_headroom, 0).to(torch.int32)
        return exponent.clamp(self.min_exponent, self.max_exponent)

    def _mantissa(self, maximum: Tensor, exponent: Tensor) -> Tensor:
        return times(maximum, -exponent).round().clamp(max=self.limit)

    def _clamped(self, exponent: int) -> int:
        return min(max(exponent, self.min_exponent), self.max_exponent)

    def replay(self, maxima: Iterable[float]) -> list[int]:
        """Feed the maxima of one tensor's writes, get the exponent that each was written with.

        The first maximum also serves the guess. So published expectations can be checked without training.
        """
        state = self.init("cpu")
        exponents = []
        for value in maxima:
            maximum = torch.tensor([value], dtype=torch.float64, device="cpu")
            state = self.start(state, maximum)
            exponents.append(int(state.exponent))
            state = self.observe(state, WritesSeen(self._mantissa(maximum.abs(), state.exponent).to(torch.int32)))
        return exponents
