"""The loss scale to begin with, found in the first backward instead of by skipped steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp import distributed
from lowp.rng_state import restore_rng_states, rng_states

__all__ = ["first_scale"]

HEADROOM = 5  # powers of two left above the first batch: the gradients of the next ones are up to 32 times as large
_STRIDE = 4  # powers of two between two tries on the way down


def first_scale(loss: Tensor, initial: float, floor: float, **options: Any) -> float:
    """Return the largest scale, `initial` / 2^n, at which 2^5 times the scaled gradients of `loss` are finite.

    With less room where that is below `floor`.
    The gradients are computed anew for each try, up to eight times, into tensors of their own: `.grad`, that of tensors
    that retain theirs included, and the random states are as before, and the graph is kept for the backward that
    follows. `options` are those of that backward.
    Returns `initial` where nothing can be found: a loss that is not finite, or gradients that are not even at `floor`;
    and a graph that cannot be run twice (reentrant checkpoints, torch.compile's donated buffers, a static graph of
    DistributedDataParallel). Of several ranks all must call this, each with a loss of its own: the scale is the
    smallest that any of them needs. Waits for the device at each try, and for the other ranks.
    """
    inputs = options.get("inputs")
    nodes = _nodes(loss)
    leaves = _leaves(nodes) if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
    usable = all(map(_is_whole, leaves)) and not any(map(_starts_a_reduction, nodes))
    usable = usable and bool(leaves) and bool(torch.isfinite(loss.detach()).all())
    if _worst_of_ranks(_FITS if usable else _FAILS, loss.device) == _FAILS:
        return initial
    states, retained = rng_states(), [(tensor, tensor.grad) for tensor in _retaining()]

    def fits(power: int) -> bool:
        # a tensor, as the scaler's: a loss in fp16 times it is an fp32 number
        scale = torch.full((), initial * 2.0 ** (HEADROOM - power), dtype=torch.float32, device=loss.device)
        given = options.get("gradient")
        try:
            found = torch.autograd.grad(loss * scale, leaves, given, retain_graph=True, allow_unused=True)
            own = _FITS if _all_finite(found) else _OVERFLOWS
        except RuntimeError:  # said again by the backward that follows, if it cannot be run once either
            own = _FAILS
        worst = _worst_of_ranks(own, loss.device)
        if worst == _FAILS:
            raise _CannotRunTwice
        return worst == _FITS

    try:
        most = _powers_between(floor, initial)
        power = _smallest(fits, most + HEADROOM)  # at the floor with less room, or none
    except _CannotRunTwice:
        return initial
    finally:
        restore_rng_states(states)
        for tensor, gradient in retained:
            tensor.grad = gradient
    return initial if power is None else initial * 2.0 ** -min(power, most)


_FITS, _OVERFLOWS, _FAILS = range(3)  # what a try comes to on one rank, the worst last


class _CannotRunTwice(Exception):
    """The graph of one rank was used up by a try."""


def _worst_of_ranks(found: int, device: torch.device) -> int:
    """Return the worst that any rank has found; every rank must call this as often."""
    if not distributed.has_other_ranks():
        return found
    flag = torch.tensor(float(found), dtype=torch.float32, device=device)
    distributed.agree_on_maximum_(flag, distributed.world())
    return int(flag)


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


def _nodes(loss: Tensor) -> list[Any]:
    """Return the nodes of the graph behind a loss."""
    seen, nodes, waiting = set(), [], [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.append(node)
        waiting.extend(following for following, _ in node.next_functions)
    return nodes


def _leaves(nodes: Sequence[Any]) -> list[Tensor]:
    """Return the leaves that a backward through these nodes would give gradients to."""
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _retaining() -> list[Tensor]:
    """Return the tensors that retain their gradients: every pass through them adds to it, and no node tells of them."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return [tensor for tensor in tensors if tensor.retains_grad and not tensor.is_leaf]


def _is_whole(leaf: Tensor) -> bool:
    """Whether a leaf is no shard, neither a DTensor nor what FullyShardedDataParallel makes of parameters."""
    return not hasattr(leaf, "device_mesh") and type(leaf).__name__ != "FlatParameter"


def _starts_a_reduction(node: Any) -> bool:
    """Whether a node sends off what is reduced over ranks once: that of a static graph of DistributedDataParallel."""
    wrapper = getattr(node, "ddp_weakref", None)
    return wrapper is not None and bool(getattr(wrapper(), "static_graph", False))


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether every value of the gradients that are there is finite; one read for each device."""
    checks: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = gradient.coalesce()._values() if gradient.is_sparse else gradient
            checks.setdefault(values.device, []).append(torch.isfinite(values).all())
    return all(bool(torch.stack(flags).all()) for flags in checks.values())
