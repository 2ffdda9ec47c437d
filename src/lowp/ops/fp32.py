"""Computation in fp32 of inputs in 16 bits, without keeping fp32 tensors for backward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.compat import gradients_of
from lowp.kernels.products import is_torchs_own
from lowp.kernels.products.scratch import Scratch
from lowp.kernels.tracing import functorch_is_active, is_jit_tracing
from lowp.ops.call import RoleCasts
from lowp.ops.casting import native_dtype, with_derivatives
from lowp.ops.generic import finished
from lowp.ops.shields import shielded
from lowp.policy import Rule

Tensors = Sequence[Tensor | None]
_GRADIENTS = ("input gradient", "weight gradient", "bias gradient")


class Fp32Function(ABC):
    """A function of fp32 tensors (None for an omitted optional one) with one result."""

    @abstractmethod
    def plain(self, *tensors: Any) -> Tensor:
        """Return the result, as part of the autograd graph."""

    def again(self, *tensors: Any) -> Tensor:
        """Return the result again, without side effects."""
        return self.plain(*tensors)

    def forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the result, outside the graph, and the (small) tensors that `backward` needs."""
        return self.plain(*tensors), ()

    def reads(self, wanted: Sequence[bool]) -> list[bool]:
        """Return which tensors the gradients of the wanted tensors need."""
        return [True] * len(wanted)

    def held(self) -> list[Tensor]:
        """Return what backward reads beside the fp32 tensors, as indices: saved, so that writes to it are noticed."""
        return []

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        """Return the gradients of the wanted tensors."""
        with torch.enable_grad():
            inputs = [
                None if one is None else one.detach().requires_grad_(want)
                for one, want in zip(tensors, wanted, strict=True)
            ]
            result = self.again(*inputs)
        return gradients_wanted(result, inputs, wanted, gradient)

    def differentiable(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        """Return the same as part of the graph, for double backward."""
        return gradients_wanted(self.again(*tensors), tensors, wanted, gradient, create_graph=True)


def gradients_wanted(result: Tensor, inputs: Tensors, wanted: Sequence[bool], gradient: Tensor, **more: Any) -> Tensors:
    """Return the gradients of the inputs; None for gradients that are not wanted."""
    chosen = [one for one, want in zip(inputs, wanted, strict=True) if want and one is not None]
    found = iter(gradients_of(result, chosen, gradient, **more))
    return [next(found) if want else None for want in wanted]


class Computation(Fp32Function):
    """A function of x and up to two parameters. `plain` is torch's own; the other methods may be faster."""

    narrows_parameters = False  # torch's 16-bit kernels on accelerators take them in the dtype of x alone
    is_exact_on_cpu = False  # torch's kernel there reads and writes 16 bits, its parameters fp32, and sums in fp32

    reads_16_bits = False  # its `forward` may be given 16 bits with fp32 parameters on a CPU, and computes in fp32

    def native(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the result of a torch kernel that reads and writes x's 16 bits and computes in fp32."""
        return self.plain(x, weight, bias)


def computed_in_fp32(
    computation: Computation, casts: RoleCasts, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return a computation of x, which is already rounded, in fp32, rounded by the rule's output.

    The incoming gradient is rounded by `grad`, the gradient of x to x's dtype. torch.func and torch.compile compute the
    same values as a chain of conversions and torch's own op. Where torch's own arithmetic is used, one torch kernel
    does everything.
    """
    is_one = is_one_kernel(computation, x, casts.rule)
    if is_one and is_torchs_own(x):
        return finished(computation.native(x, weight, bias), casts)
    parameters = [None if one is None else one.float() for one in (weight, bias)]
    if is_one:
        return finished(computation.native(x, *parameters), casts)
    traced = functorch_is_active() or is_jit_tracing()
    if traced or (x.dtype is torch.float32 and casts.rule.grad is None):
        return finished(computation.plain(x.float(), *parameters), casts)
    result: Tensor = _InFp32.apply(computation, casts, x, *parameters)  # type: ignore[no-untyped-call]
    return result


def is_one_kernel(computation: Computation | type[Computation], x: Tensor, rule: Rule) -> bool:
    """Whether one torch kernel reads the rounded x, computes in fp32 and writes the dtype of the rule's output."""
    if x.dtype not in (torch.float16, torch.bfloat16) or rule.output is None:
        return False
    if not is_torchs_own(x, computation.is_exact_on_cpu):
        return False
    return native_dtype(rule.output) is x.dtype and (rule.grad is None or rule.grad == rule.output)


class _InFp32(torch.autograd.Function):
    """The computation in fp32; saves x as it was read, the parameters and the data that the computation needs."""

    @staticmethod
    def forward(
        ctx: Any, computation: Computation, casts: RoleCasts, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        reads = (
            computation.reads_16_bits and weight is not None and bias is not None and is_torchs_own(x, is_exact=True)
        )
        ctx.computation, ctx.casts = computation, casts
        with Scratch() as scratch:
            result, saved = computation.forward(x if reads else scratch.wide(x), weight, bias)
            ctx.save_for_backward(x, weight, bias, *saved)
            return casts.cast(result, "output")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *shielded(_graded, gradient, ctx, *ctx.saved_tensors)


def _graded(gradient: Tensor, ctx: Any, x: Tensor, weight: Any, bias: Any, *saved: Tensor) -> list[Tensor | None]:
    """Return the gradients of the tensors of an `_InFp32`."""
    wanted, watch = list(ctx.needs_input_grad[2:]), ctx.casts.watch
    gradient = ctx.casts.cast(gradient, "grad")
    with torch.no_grad(), Scratch() as scratch:
        wide = scratch.wide(gradient), saved, scratch.wide(x)
        graded = ctx.computation.backward(*wide, weight, bias, wanted=wanted)
    if torch.is_grad_enabled():  # double backward: torch's own op once more, as part of the graph
        result = ctx.computation.again(x.float(), weight, bias)
        inputs = (x, weight, bias)
        same = gradients_wanted(result, inputs, wanted, gradient.float(), create_graph=True)
        graded = with_derivatives(graded, same)
    found: list[Tensor | None] = []
    for one, want, source, role in zip(graded, wanted, (x, weight, bias), _GRADIENTS, strict=True):
        if one is None or not want:
            found.append(None)
            continue
        if watch is not None:  # in 16 bits where the input was read so
            watch(one, role, ctx.casts.rule.input if source.dtype is not one.dtype else None)
        found.append(one.to(source.dtype))
    return found
