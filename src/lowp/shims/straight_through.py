"""Gradients of the shims: they pass straight through a rounding, or through a rounding of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.errors import InvalidInput

Rounder = Callable[[Tensor], Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, forward: Rounder, backward: Rounder | None) -> Tensor:
        context.rounder = backward
        return forward(x.detach())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rounder = context.rounder
        return gradient if rounder is None else rounder(gradient), None, None


def straight_through(x: Tensor, forward: Rounder, backward: Rounder | None = None) -> Tensor:
    """Return `forward(x)`; its gradient is that of the result, rounded by `backward` if given (Bengio et al. 2013).

    Raises TypeError for what is no floating-point tensor.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating-point tensor, not {given}")
    result: Tensor = _StraightThrough.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def drawn_seed(seed: int | Tensor | None) -> int | Tensor:
    """Return the seed that was given, or one from torch's CPU generator, so that `torch.manual_seed` repeats it."""
    return torch.randint(2**62, (), device="cpu") if seed is None else seed


def whole_number(name: str, value: object, lowest: int, highest: int) -> int:
    """Return a whole number between two limits, or raise InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidInput(f"{name} must be a whole number from {lowest} to {highest}, not {value!r}")
    return value
