"""Delayed scaling: the scale of a tensor from the maxima that its place had in earlier steps.

So a cast reads its tensor once: it knows the scale before, and the maximum that it meets is for later steps. Source:
the recipe DelayedScaling of NVIDIA's Transformer Engine (its user guide, "Using FP8"), and Micikevicius et al. 2022,
arXiv 2209.05433, section 3.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class DelayedState(NamedTuple):
    """The state of n entries; its tensors are saved in checkpoints."""

    history: Tensor  # fp32[n, window]: ring of the last maxima
    known: Tensor  # int64[n]: maxima written into the ring
    largest: Tensor  # fp32[n]: the largest of them, for the next scale; 0 if nothing is known but zeros
    writes: Tensor  # int64[n]
    saturated: Tensor  # int64[n]: steps whose maximum was above the one that their scale was made for
    nonfinite: Tensor  # int64[n]: steps that met an infinity or a NaN, which are not remembered


class MaximaSeen(NamedTuple):
    """The maxima of one step, by entry."""

    largest: Tensor  # fp32[n]: max|x|, infinite or NaN if not all was finite
    mask: Tensor  # bool[n]: the entries that were written


@dataclass(frozen=True)
class DelayedMaximum:
    """The largest of the last `window` maxima, of all entries at once; `headroom` bits are left free above it."""

    window: int = 16
    headroom: int = 0

    def init(self, device: torch.device | str | None = None, entries: int = 1) -> DelayedState:
        """The state of `entries` tensors of which nothing was seen."""
        history = torch.zeros(entries, self.window, device=device, dtype=torch.float32)
        counts = [torch.zeros(entries, device=device, dtype=torch.int64) for _ in range(4)]
        return DelayedState(history, counts[0], history[:, 0].clone(), *counts[1:])

    def scale(self, state: DelayedState) -> Tensor:
        """The maxima that the next casts are made for, fp32[n]; 0 where the tensor's own has to serve."""
        return state.largest * 2.0**self.headroom

    def observe(self, state: DelayedState, seen: MaximaSeen) -> DelayedState:
        """Remember the maxima of a step, but those that are not finite."""
        good = seen.mask & seen.largest.isfinite()
        slot = (state.known % self.window)[:, None]
        newest = torch.where(good[:, None], seen.largest[:, None], state.history.gather(1, slot))
        history = state.history.scatter(1, slot, newest)
        return DelayedState(
            history,
            state.known + good,
            history.amax(1),
            state.writes + seen.mask,
            state.saturated + (good & (state.largest > 0) & (seen.largest > self.scale(state))),
            state.nonfinite + (seen.mask & ~good),
        )
