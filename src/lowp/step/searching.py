"""Finds the initial loss scale in the first backward instead of by skipped steps."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lowp import distributed
from lowp.compat import private
from lowp.optim.shards import local
from lowp.rng_state import restore_rng_states, rng_states

HEADROOM = 5  # powers of two of room: gradients of later batches may be 32 times as large
_STRIDE = 4  # powers of two between two tries, downwards


def first_scale(loss: Tensor, initial: float, floor: float, **options: Any) -> float:
    """Return the largest scale, `initial` / 2^n, at which 2^5 times the scaled gradients of `loss` are finite.

    The room of 2^5 is reduced if the result would be below `floor`. The gradients are computed anew for each try, up to
    eight times, into tensors of their own. `.grad`, also of tensors that retain their gradients, and the random states
    are restored, and the graph is kept for the backward that follows. `options` are the arguments of that backward.
    Returns `initial` if no scale can be found: for a loss that is not finite, for gradients that are not finite even at
    `floor`, and for a graph that cannot be run twice (reentrant and selective checkpoints, torch.compile's donated
    buffers, a static graph of DistributedDataParallel, FullyShardedDataParallel). All ranks must call this, each with
    its own loss; the result is the smallest scale that any rank needs. Waits for the device and for the other ranks at
    each try.
    """
    inputs, nodes = options.get("inputs"), list(nodes_of([loss]))
    if inputs is None:  # the leaves to which the backward would give gradients
        inputs = [node.variable for node in nodes if hasattr(node, "variable")]
    leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    usable = not any(type(leaf).__name__ == "FlatParameter" for leaf in leaves) and _can_run_twice(nodes)
    usable = usable and bool(leaves) and bool(torch.isfinite(loss.detach()).all())
    if _worst_of_ranks(_FITS if usable else _FAILS, loss.device) == _FAILS:
        return initial
    states, retained = rng_states(), [(tensor, tensor.grad) for tensor in _retaining()]

    def outcome(power: int) -> int:
        # a tensor, like the scaler's: its product with an fp16 loss is an fp32 number
        scale = torch.full((), initial * 2.0 ** (HEADROOM - power), dtype=torch.float32, device=loss.device)
        given = options.get("gradient")
        try:
            found = torch.autograd.grad(loss * scale, leaves, given, retain_graph=True, allow_unused=True)
            own = _FITS if _all_finite(found) else _OVERFLOWS
        except RuntimeError:  # the backward that follows raises the error again if it is a real one
            own = _FAILS
        return _worst_of_ranks(own, loss.device)

    try:
        most = _powers_between(floor, initial)
        power = _smallest(outcome, most + HEADROOM)  # beyond `most`, the scale stays at the floor with less room
    finally:
        restore_rng_states(states)
        for tensor, gradient in retained:
            tensor.grad = gradient
    return initial if power is None else initial * 2.0 ** -min(power, most)


_ONCE = ("CheckpointFunctionBackward", "CompiledFunctionBackward")  # nodes that may refuse to run a second time
_SelectiveCheckpoint = cast(type, private("torch.utils.checkpoint._CachedTorchDispatchMode"))
_FITS, _OVERFLOWS, _FAILS = range(3)  # outcomes of a try on one rank, the worst last


def _worst_of_ranks(found: int, device: torch.device) -> int:
    """Return the worst outcome of all ranks. Every rank must make the same number of calls."""
    if not distributed.has_other_ranks():
        return found
    flag = torch.tensor(float(found), dtype=torch.float32, device=device)
    distributed.agree_on_maximum_(flag, distributed.world())
    return int(flag)


def _smallest(outcome: Callable[[int], int], most: int) -> int | None:
    """Return the smallest power in 0 .. `most` that fits, by strides and then bisection.

    None if none does, or if a try has used up the graph of some rank.
    """
    above, below = -1, 0  # the largest power known not to fit, and the next to try
    while (found := outcome(below)) != _FITS:
        if found == _FAILS or below >= most:
            return None
        above, below = below, min(below + _STRIDE, most)
    while below - above > 1:
        middle = (above + below) // 2
        found = outcome(middle)
        if found == _FAILS:
            return None
        above, below = (above, middle) if found == _FITS else (middle, below)
    return below


def _powers_between(floor: float, initial: float) -> int:
    """Return how often `initial` can be halved before it is below `floor`."""
    powers = 0
    while initial * 2.0 ** -(powers + 1) >= floor:
        powers += 1
    return powers


def nodes_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the autograd nodes of the graphs of tensors, each once."""
    seen, waiting = set(), [one.grad_fn for one in tensors]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def _retaining() -> list[Tensor]:
    """Return the non-leaf tensors that retain gradients: every pass adds to their `.grad`, and no node lists them."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    return [tensor for tensor in tensors if tensor.retains_grad and not tensor.is_leaf]


def _can_run_twice(nodes: Sequence[Any]) -> bool:
    """Whether a try changes nothing for the backward that follows, also if it fails.

    A static graph of DistributedDataParallel reduces only once. A backward through modules of fully_shard must not end
    early, as a try does where a node refuses to run twice: they would reduce nothing from then on, and say nothing.
    A selective checkpoint gives away what it has saved: the first pass through it succeeds, and a second one raises.
    """
    if any(issubclass(type(one), _SelectiveCheckpoint) for one in gc.get_objects()):
        return False
    names = {type(node).__name__ for node in nodes}
    wrappers = [wrapper() for node in nodes if (wrapper := getattr(node, "ddp_weakref", None)) is not None]
    if any(getattr(wrapper, "static_graph", False) for wrapper in wrappers):
        return False
    return "RegisterPostBackwardFunctionBackward" not in names or names.isdisjoint(_ONCE)


def _all_finite(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether every value of the gradients that are present is finite. Reads once per device."""
    checks: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            values = gradient.coalesce()._values() if gradient.is_sparse else local(gradient)
            checks.setdefault(values.device, []).append(torch.isfinite(values).all())
    return all(bool(torch.stack(flags).all()) for flags in checks.values())
