"""The loss scale to begin with, found in the first backward instead of by skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp import distributed
from lowp.random_state import random_states, restore_random_states

__all__ = ["first_scale"]

HEADROOM = 5  # powers of two left above the first batch: the gradients of the next ones are up to 32 times as large
_STRIDE = 4  # powers of two between two tries on the way down


def first_scale(loss: Tensor, initial: float, floor: float, **options: Any) -> float:
    """Return the largest scale, `initial` / 2^n, at which 2^5 times the scaled gradients of `loss` are finite.

    With less room where that is below `floor`.
    The gradients are computed anew for each try, up to eight times, into tensors of their own: `.grad` and the random
    states are as before, and the graph is kept for the backward that follows. `options` are those of that backward.
    Returns `initial` where nothing can be found: a loss that is not finite, or gradients that are not even at `floor`;
    a graph that cannot be run twice (reentrant checkpoints, torch.compile's donated buffers); and wherever gradients
    are collected over ranks, which must all begin with one scale. Waits for the device at each try.
    """
    inputs = options.get("inputs")
    leaves = _leaves(loss) if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if distributed.has_other_ranks() or not leaves or not bool(torch.isfinite(loss.detach()).all()):
        return initial
    states = random_states()

    def fits(power: int) -> bool:
        # a tensor, as the scaler's: a loss in fp16 times it is an fp32 number
        scale = torch.full((), initial * 2.0 ** (HEADROOM - power), dtype=torch.float32, device=loss.device)
        given = options.get("gradient")
        return _all_finite(torch.autograd.grad(loss * scale, leaves, given, retain_graph=True, allow_unused=True))

    try:
        most = _powers_between(floor, initial)
        power = _smallest(fits, most + HEADROOM)  # at the floor with less room, or none
    except RuntimeError:  # said again by the backward that follows, if it cannot be run once either
        return initial
    finally:
        restore_random_states(states)
    return initial if power is None else initial * 2.0 ** -min(power, most)


def _smallest(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest power from 0 to `most` that fits, in strides down and by halves back; None if none does."""
    above, below = -1, 0  # the largest known not to fit, and the one to try
    while not fits(below):
        if below >= most:
            return None
        above, below = below, min(below + _STRIDE, most)
    while below - above > 1:
        middle = (above + below) // 2
        if fits(middle):
            below = middle
        else:
            above = middle
    return below


def _powers_between(floor: float, initial: float) -> int:
    """Return how often `initial` can be halved before it is below `floor`."""
    powers = 0
    while initial * 2.0 ** -(powers + 1) >= floor:
        powers += 1
    return powers


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves that a backward of `loss` would give gradients to."""
    seen, leaves, waiting = set(), [], [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether every value of the gradients that are there is finite; one read for each device."""
    checks: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = gradient.coalesce()._values() if gradient.is_sparse else gradient
            checks.setdefault(values.device, []).append(torch.isfinite(values).all())
    return all(bool(torch.stack(flags).all()) for flags in checks.values())
