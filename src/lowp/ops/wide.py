"""Computing in fp32 what was read in 16 bits, without keeping anything wide for backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.compat import gradients_of
from lowp.ops.casting import functorch_is_active, is_jit_tracing, rounded, shield
from lowp.ops.generic import gradient_cast
from lowp.policy import Rule

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Computation(ABC):
    """A function of x and up to two parameters, all fp32. `plain` is torch's own; the rest may be faster."""

    @abstractmethod
    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the result, as part of the autograd graph."""

    def again(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the result once more, without side effects."""
        return self.plain(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the result and what `backward` wants kept of it, which is to be small."""
        return self.plain(x, weight, bias), ()

    def backward(
        self, gradient: Tensor, kept: tuple[Tensor, ...], x: Tensor, *parameters: Tensor | None, wanted: list[bool]
    ) -> Gradients:
        """Return the gradients of x and the parameters."""
        with torch.enable_grad():
            inputs = [None if one is None else one.detach().requires_grad_() for one in (x, *parameters)]
            result = self.again(*inputs)  # type: ignore[arg-type]
        return _three(result, inputs, wanted, gradient)


def computed_wide(
    computation: Computation,
    rule: Rule,
    seed: Callable[[], Tensor | int],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return a computation of x, which was rounded already, in fp32, rounded by the rule's output.

    The incoming gradient is rounded by `grad`, the gradient of x to x's dtype. torch.func and torch.compile see the
    same numbers as a plain chain of conversions and torch's own op.
    """
    rule = Rule(grad=rule.grad, output=rule.output)
    parameters = [None if one is None else one.float() for one in (weight, bias)]
    traced = functorch_is_active() or is_jit_tracing()
    if traced or (x.dtype is torch.float32 and rule.grad is None):
        wide = rounded(computation.plain(x.float(), *parameters), rule.output, seed)
        return wide if rule.grad is None else gradient_cast(wide, rule.grad, seed)
    result: Tensor = _Wide.apply(computation, rule, seed, x, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Wide(torch.autograd.Function):
    """The computation in fp32; saves x as it was read, the parameters and what the computation wants kept."""

    @staticmethod
    def forward(
        ctx: Any,
        computation: Computation,
        rule: Rule,
        seed: Callable[[], Tensor | int],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        result, kept = computation.forward(x.float(), weight, bias)
        ctx.computation, ctx.rule, ctx.seed = computation, rule, seed
        ctx.save_for_backward(x, weight, bias, *kept)
        return rounded(result, rule.output, seed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        with shield():
            x, weight, bias, *kept = ctx.saved_tensors
            wanted = list(ctx.needs_input_grad[3:])
            gradient = rounded(gradient, ctx.rule.grad, ctx.seed).float()
            if torch.is_grad_enabled():  # double backward: torch's own op once more, as part of the graph
                result = ctx.computation.again(x.float(), weight, bias)
                graded = _three(result, [x, weight, bias], wanted, gradient, create_graph=True)
            else:
                graded = ctx.computation.backward(gradient, tuple(kept), x.float(), weight, bias, wanted=wanted)
            return (
                None,
                None,
                None,
                *(
                    None if one is None or not want else one.to(source.dtype)
                    for one, want, source in zip(graded, wanted, (x, weight, bias), strict=True)
                ),
            )


def _three(result: Tensor, inputs: list[Tensor | None], wanted: list[bool], gradient: Tensor, **more: Any) -> Gradients:
    """Return the gradients of the three inputs, None where it is not wanted."""
    chosen = [one for one, want in zip(inputs, wanted, strict=True) if want and one is not None]
    found = iter(gradients_of(result, chosen, gradient, **more))
    first, second, third = (next(found) if want else None for want in wanted)
    return first, second, third
