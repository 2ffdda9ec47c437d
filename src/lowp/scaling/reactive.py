"""Dynamic fixed point as before Autoflex: an exponent moves by one after too many elements have overflowed.

Source: Courbariaux, Bengio and David 2014, arXiv 1412.7024, section 5. A scale is doubled if more than a given share of
the elements overflowed since the last check, and halved if no more than that share would overflow at half the scale. It
reacts to overflows that Autoflex predicts, and serves for comparison.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.scaling.autoflex import Autoflex, WritesSeen, powers_of_two


class ReactiveState(NamedTuple):
    """The state of n entries; its tensors are saved in checkpoints."""

    exponent: Tensor  # int32[n]: the next write's kappa is 2**exponent
    overflowed: Tensor  # int64[n]: elements that did not fit since the last check of the exponent
    crowded: Tensor  # int64[n]: elements since then that would not have fitted under half the scale
    elements: Tensor  # int64[n]: elements written since then
    started: Tensor  # bool[n]: whether the first guess is done
    writes: Tensor  # int64[n]
    saturated: Tensor  # int64[n]: writes whose largest mantissa was at its limit
    moved: Tensor  # int64[n]: changes of the exponent
    nonfinite: Tensor  # int64[n]: writes that held an infinity or a NaN


@dataclass(frozen=True)
class Reactive:
    """Moves shared exponents by one after each `period` writes; `rate` is the share of elements that may overflow.

    `guess` makes the first exponent, as Autoflex does, and says the range of exponents and mantissas.
    """

    period: int = 100
    rate: float = 1e-4
    guess: Autoflex = field(default_factory=Autoflex)

    def __post_init__(self) -> None:
        if self.period < 1 or not 0 <= self.rate < 1:
            raise InvalidInput(
                f"Reactive with a period of {self.period} writes and a rate of {self.rate}: allowed are 1 write or "
                "more, and a share from 0 to below 1"
            )

    @property
    def limit(self) -> int:
        """The largest mantissa; a mantissa as large as that counts as saturated."""
        return self.guess.limit

    @property
    def first_exponent(self) -> int:
        """The exponent of an entry of which nothing was seen."""
        return self.guess.first_exponent

    def init(self, device: torch.device | str | None = None, entries: int = 1) -> ReactiveState:
        """The state of `entries` tensors of which nothing was seen."""
        first = self.guess.init(device, entries)
        zeros = {
            name: torch.zeros(entries, dtype=torch.int64, device=device)
            for name in ReactiveState._fields
            if name not in ("exponent", "started")
        }
        return ReactiveState(exponent=first.exponent, started=first.started, **zeros)

    def scale(self, state: ReactiveState) -> Tensor:
        """kappa of the next write of every entry: fp32[n], powers of two."""
        return powers_of_two(state.exponent)

    def observe(self, state: ReactiveState, seen: WritesSeen) -> ReactiveState:
        """Count what overflowed, and after `period` writes double the scale, halve it or leave it."""
        written, bad = seen.told(state.started)
        good = written & ~bad
        counts = [
            before + torch.where(good, torch.zeros_like(before) if new is None else new, 0)
            for before, new in (
                (state.overflowed, seen.overflowed),
                (state.crowded, seen.crowded),
                (state.elements, seen.elements),
            )
        ]
        overflowed, crowded, elements = counts
        writes = state.writes + written
        due = good & (writes % self.period == 0) & (elements > 0)
        share = self.rate * elements
        step = (overflowed > share).to(torch.int32) - (crowded <= share).to(torch.int32) * (overflowed <= share)
        moved_to = (state.exponent + step).clamp(self.guess.min_exponent, self.guess.max_exponent)
        exponent = torch.where(due, moved_to, state.exponent)
        overflowed, crowded, elements = (torch.where(due, 0, count) for count in counts)
        saturated = good & (seen.mantissa >= self.limit)
        return ReactiveState(
            exponent,
            overflowed,
            crowded,
            elements,
            state.started,
            writes,
            state.saturated + saturated,
            state.moved + (exponent != state.exponent),
            state.nonfinite + bad,
        )
