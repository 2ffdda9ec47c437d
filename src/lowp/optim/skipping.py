"""What an optimizer says of steps that a device decides to skip, and nobody reads."""

from __future__ import annotations

from torch.optim import SGD, Optimizer

__all__ = ["starts_momentum", "steps_by_itself"]


def steps_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step takes `found_inf`, a tensor of its device, and changes nothing where that is set."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def starts_momentum(optimizer: Optimizer) -> bool:
    """Whether the next step makes the momentum of torch's fused SGD, which a step that skips leaves uninitialised.

    Until every momentum is there the host has to know whether the step is skipped.
    """
    if not isinstance(getattr(optimizer, "inner", optimizer), SGD):
        return False
    groups = [group for group in optimizer.param_groups if group.get("fused") and group.get("momentum")]
    state = optimizer.state if groups else {}
    return any(
        parameter.grad is not None and state.get(parameter, {}).get("momentum_buffer") is None
        for group in groups
        for parameter in group["params"]
    )
