"""What an optimizer says of steps that a device decides to skip, and nobody reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lowp.optim.shards import local


def steps_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step takes `found_inf`, a tensor of its device, and changes nothing where that is set."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def flagged(optimizer: Optimizer, **flags: Tensor | None) -> Iterator[None]:
    """Give the step of an optimizer its flags: one that `steps_by_itself` its `found_inf` and `grad_scale`."""
    for name, value in flags.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in flags:
            delattr(optimizer, name)


def starts_momentum(optimizer: Optimizer) -> bool:
    """Whether the next step makes a momentum of torch's SGD that `begin_momentum` cannot make.

    A fused step that skips leaves it uninitialised; until it is there the host has to know whether a step is skipped.
    """
    inner = getattr(optimizer, "inner", optimizer)
    return any(not _may_begin(inner, group, without) for group, without in _without_momentum(optimizer))


def skips_on_device(inner: Optimizer, trained: Iterable[Tensor]) -> bool:
    """Whether a flag of the device can undo the next step of an optimizer: all that it changes lies there."""
    if starts_momentum(inner):
        return False
    if steps_by_itself(inner) or type(inner) is SGD:
        return True
    if not type(inner).__module__.startswith("torch.optim."):
        return False
    return all(_lies_there(inner.state.get(one), one.device) for one in trained)


def _lies_there(state: Mapping[str, Any] | None, device: torch.device) -> bool:
    """Whether all that is kept of a parameter is there, in tensors of a device."""
    kept = list((state or {}).values())
    return bool(kept) and all(isinstance(one, Tensor) and one.device == device for one in kept)


def step_unless(skip: Tensor, inner: Optimizer, trained: Sequence[Tensor]) -> Any:
    """Step an optimizer that `skips_on_device`; where the flag of the device is set, nothing changes."""
    begin_momentum(inner)
    if steps_by_itself(inner):
        with flagged(inner, found_inf=skip.float()):
            return inner.step()
    tensors = [*trained, *(value for one in trained for value in inner.state.get(one, {}).values())]
    shards = [local(value) for value in tensors if isinstance(value, Tensor)]
    kept = [(value, value.clone()) for value in shards]
    result = inner.step()
    for value, old in kept:
        value.copy_(torch.where(skip, old, value))
    return result


@contextmanager
def skipping(optimizer: Optimizer, skip: Tensor) -> Iterator[None]:
    """Let a step change nothing where a flag of the device is set, without reading it.

    An optimizer that cannot skip by itself takes gradients of zero there: nothing that is not finite gets in, and its
    momentum and weight decay go on. Not for a momentum that `begin_momentum` cannot make.
    """
    if hasattr(optimizer, "skips_there"):  # stored under shared exponents
        with flagged(optimizer, skip=skip):
            yield
        return
    begin_momentum(optimizer)
    if not steps_by_itself(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    values = gradient._values() if gradient.is_sparse else gradient
                    local(values.detach()).masked_fill_(skip.to(values.device, non_blocking=True), 0)
        yield
        return
    with flagged(optimizer, found_inf=skip.float()):
        yield


@torch.no_grad()
def begin_momentum(optimizer: Optimizer) -> bool:
    """Give parameters of torch's SGD the momentum that its first step would make, so that this step is as any other.

    All elements are -0, the identity of addition: momentum * -0 + gradient has the bits of the gradient, which the
    first step copies. A step that is skipped leaves -0, and the next one is the first again. Not for a dampening,
    which the first step does not apply, nor of an optimizer in a wrapper. Returns `starts_momentum`.
    """
    inner = getattr(optimizer, "inner", optimizer)
    is_left = False
    for group, without in _without_momentum(optimizer):
        if not _may_begin(inner, group, without):
            is_left = True
            continue
        for parameter in without if inner is optimizer else ():
            assert parameter.grad is not None
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.grad, -0.0)
    return is_left


def _may_begin(inner: Optimizer, group: dict[str, Any], without: list[Tensor]) -> bool:
    if type(inner) is not SGD or group["dampening"]:
        return False
    gradients = [parameter.grad for parameter in without if parameter.grad is not None]
    return not any(one.is_sparse or one.is_complex() for one in gradients)


def _without_momentum(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Yield the groups of an SGD with momentum in which parameters with gradients have none yet, and these."""
    if not isinstance(getattr(optimizer, "inner", optimizer), SGD):
        return
    groups = [group for group in optimizer.param_groups if group.get("momentum")]
    state = optimizer.state if groups else {}
    for group in groups:
        without = [
            parameter
            for parameter in group["params"]
            if parameter.grad is not None and state.get(parameter, {}).get("momentum_buffer") is None
        ]
        if without:
            yield group, without
