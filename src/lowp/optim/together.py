"""Selects the parameters that one kernel steps at once, and collects the kernel's arguments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lowp.compat import private
from lowp.kernels import updates
from lowp.ops.observing import everywhere
from lowp.optim.shards import is_sharded
from lowp.optim.storage import Storage

_foreach_add_ = cast(Callable[[list[Tensor], Any], None], private("torch._foreach_add_"))
State = Mapping[Tensor, dict[str, Tensor]]


def by_kernel(
    parameters: Sequence[Tensor],
    storage: Storage,
    moments: Sequence[str],
    state: State,
    start: Callable[[Tensor, dict[str, Tensor]], None],
) -> Iterator[list[Tensor]]:
    """Yield the parameters of a group that are stepped together, by device and gradient dtype.

    These are parameters in split storage or plain fp32, contiguous and unsharded, with fp32 moments, if there are no
    observers. `start` creates the state of a parameter that has none.
    """
    if (storage.cast is not None and storage.kind != "split") or everywhere:
        return
    dtype = torch.float32 if storage.cast is None else torch.bfloat16
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or not updates.has_kernels(parameter.device) or not _is_plain(parameter, gradient, dtype):
            continue
        if "step" not in state[parameter]:
            start(parameter, state[parameter])
        found = [state[parameter][name] for name in moments if name in state[parameter]]
        if len(found) == len(moments) and all(one.dtype is torch.float32 and one.is_contiguous() for one in found):
            groups[parameter.device, gradient.dtype].append(parameter)
    yield from groups.values()


def _is_plain(parameter: Tensor, gradient: Tensor, dtype: torch.dtype) -> bool:
    if is_sharded(parameter) or gradient.is_sparse or gradient.dtype not in updates.GRADIENTS or parameter.numel() == 0:
        return False
    return parameter.is_contiguous() and gradient.is_contiguous() and parameter.dtype is dtype


def columns_of(parameters: Sequence[Tensor], state: State, moments: Sequence[str]) -> updates.Columns:
    """Return the kernel's arguments: weights, remainders, gradients, moments and steps."""
    states = [state[parameter] for parameter in parameters]
    split = "remainder" in states[0]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return updates.Columns(
        [parameter.detach() for parameter in parameters],
        [one["remainder"] for one in states] if split else None,
        [gradient.detach() for gradient in gradients],
        [[one[name] for one in states] for name in moments],
        [one["step"] for one in states],
    )


def count_step(state: dict[str, Tensor], found_inf: Tensor | None) -> None:
    """Increment a parameter's step counter on its device, unless a gradient was not finite."""
    before = state["step"]
    state["step"] = before + (1 if found_inf is None else _counted(found_inf, before))


def count_steps(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Do `count_step` for parameters on one device, in place and in one launch."""
    one = 1 if found_inf is None else _counted(found_inf, steps[0])
    _foreach_add_(steps, one)


def _counted(found_inf: Tensor, like: Tensor) -> Tensor:
    return 1 - found_inf.reshape(()).to(like.device).clamp(max=1)
