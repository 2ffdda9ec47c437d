"""Detects what a training loop has forgotten: unscaling before a step or before clipping, and the region."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowp.errors import Misuse
from lowp.step.scaler import GradScaler

__all__ = ["FirstStep", "expect_step", "step_comes"]

_waiting: dict[int, weakref.ref[GradScaler]] = {}  # by id; a WeakSet takes microseconds, which small steps feel


def expect_step(scaler: GradScaler) -> None:
    """Note that gradients are scaled: until `step_comes`, optimizers of watched models must not step."""
    if scaler.is_enabled() and not torch.compiler.is_compiling():
        _watch_optimizers()
        _waiting[id(scaler)] = weakref.ref(scaler)


def step_comes(scaler: GradScaler) -> None:
    """Note that the scaler itself is about to step its optimizers."""
    _waiting.pop(id(scaler), None)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_scaled)


def _refuse_scaled(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise Misuse before a step on scaled gradients. Costs nothing in a correct loop, where no scaler waits."""
    if torch.compiler.is_compiling() or not _waiting:
        return
    for key, reference in list(_waiting.items()):
        scaler = reference()
        if scaler is None:
            _waiting.pop(key, None)
        elif scaler.holds_scaled_gradients(optimizer):
            raise Misuse(
                f"optimizer.step() would apply gradients that are multiplied by the loss scale "
                f"{scaler.get_scale():g}: call precision.step(optimizer), which divides them by it and skips the step "
                "if one is not finite, or precision.unscale_(optimizer) first"
            )


class FirstStep:
    """The scaled gradients of `models` as a backward pass has left them, looked at when the first step begins.

    A line that the loop lacks is missing in its first step too; later ones are not looked at.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        found = {id(one): one.grad for model in models for one in model.parameters() if one.grad is not None}
        dense = {key: one for key, one in found.items() if type(one) is torch.Tensor and not one.is_sparse}
        self._left = {key: (one, one._version, torch.linalg.vector_norm(one.detach())) for key, one in dense.items()}

    def begins(self, scaler: GradScaler, optimizers: Sequence[torch.optim.Optimizer], forgotten: str) -> bool:
        """Warn of what was forgotten: `forgotten`, if it says something, and to unscale before clipping.

        Returns whether this is settled: not if gradients were changed that were infinite. Reads a device only if
        gradients were changed in place while they were scaled.
        """
        if forgotten:
            warnings.warn(forgotten, UserWarning, stacklevel=4)
        settled = True
        for optimizer in filter(scaler.holds_scaled_gradients, optimizers):
            keys = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            left = [self._left[key] for key in keys if key in self._left]
            changed = [
                (norm, torch.linalg.vector_norm(one.detach())) for one, version, norm in left if one._version != version
            ]
            if not changed:
                continue
            before, after = (math.hypot(*(float(norm) for norm in norms)) for norms in zip(*changed, strict=True))
            scale = scaler.get_scale()
            settled = settled and math.isfinite(before)
            # averages and masks leave the order of magnitude, which the loss scale raises by far more
            if math.isfinite(before) and after * math.sqrt(scale) < before:
                warnings.warn(
                    f"between precision.backward and precision.step gradients were reduced from a norm of {before:.4g} "
                    f"to {after:.4g} while they were multiplied by the loss scale {scale:g}, by which the step divides "
                    "them: call precision.unscale_(optimizer) before clipping",
                    UserWarning,
                    stacklevel=4,
                )
        return settled
