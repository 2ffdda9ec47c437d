"""Detects an `optimizer.step()` on gradients that are still multiplied by a loss scale, and raises."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowp.errors import Misuse
from lowp.grad_scaler.scaler import GradScaler

__all__ = ["expect_step", "step_comes"]

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
