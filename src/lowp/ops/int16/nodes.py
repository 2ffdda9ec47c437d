"""Nodes of the graph that write results and gradients under the shared exponents of sites."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowp.errors import Misuse
from lowp.exponents import SiteWriter
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.numbers.floats import need_fp64
from lowp.kernels.products import contract
from lowp.ops.call import RoleCasts
from lowp.ops.casting import is_irregular, rounded
from lowp.ops.shields import shield, shielded
from lowp.ops.trilinear import OUTPUT, Form

OUTPUT_ROLE, OUTPUT_GRADIENT = "output", "output gradient"
INPUT_GRADIENT, WEIGHT_GRADIENT, BIAS_GRADIENT = "input gradient", "weight gradient", "bias gradient"


def fp64_contraction(
    form: Form, casts: RoleCasts, writer: SiteWriter, first: Tensor, second: Tensor, bias: Tensor | None
) -> Tensor:
    """Return a contraction of operands that integers cannot represent: infinities and NaNs on a CPU, or fp64 tensors.

    The same values are multiplied in fp64, where sums of int16 products are exact; infinities and NaNs propagate.
    """
    need_fp64(first, "a contraction under shared exponents")
    writer, role_of = writer.part(), gradient_roles()
    x, y = (
        read_by(_operand(one, casts, role), writer, role_of(one), torch.float64)
        for one, role in zip((first, second), casts.roles, strict=True)
    )
    result = contract(form, OUTPUT, (x, y))
    if bias is not None:
        result = form.with_bias(result, read_by(bias, writer, BIAS_GRADIENT, torch.float64))
    return rounded_by(result, writer, OUTPUT_ROLE, OUTPUT_GRADIENT)


def _operand(x: Tensor, casts: RoleCasts, role: str) -> Tensor:
    """Return x rounded to the format, unchanged if it is in it; infinities and NaNs stay."""
    casts.tell(x, role)
    cast = casts.of(role)
    return x if cast is None else torch.where(x.isfinite(), rounded(torch.nan_to_num(x, 0.0, 0.0, 0.0), cast), x)


def gradient_roles() -> Callable[[Tensor], str]:
    """Return a function that names the gradients of an op's inputs in order: input gradient, weight gradient 2 ..."""
    count = {WEIGHT_GRADIENT: 0, INPUT_GRADIENT: 0}

    def role_of(x: Tensor) -> str:
        role = WEIGHT_GRADIENT if isinstance(x, nn.Parameter) else INPUT_GRADIENT
        count[role] += 1
        return role if count[role] == 1 else f"{role} {count[role]}"

    return role_of


# -- nodes of the graph -------------------------------------------------------------------------------------------


class _Write(torch.autograd.Function):
    """Write a tensor under a role; its gradient is written under another role, or passes unchanged."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, writer: SiteWriter, role: str, gradient_role: str | None, unless_exact: bool
    ) -> Tensor:
        ctx.writer, ctx.role, ctx.dtype = writer, gradient_role, x.dtype
        with shield():
            return writer.write(x.detach(), role, unless_exact).values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.to(ctx.dtype) if ctx.role is None else shielded(_written, gradient, ctx), None, None, None, None


class _Read(torch.autograd.Function):
    """The identity in a dtype; the gradient of this input is written when it leaves the op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, writer: SiteWriter, role: str, dtype: torch.dtype) -> Tensor:
        ctx.writer, ctx.role, ctx.dtype = writer, role, x.dtype
        return x.view_as(x) if x.dtype is dtype else x.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_written, gradient, ctx), None, None, None


def _written(gradient: Tensor, ctx: Any) -> Tensor:
    return written_gradient(gradient, ctx.writer, ctx.role, unless_exact=True)[0].to(ctx.dtype)


def rounded_by(
    x: Tensor, writer: SiteWriter, role: str, gradient_role: str | None, unless_exact: bool = False
) -> Tensor:
    """Return x written under a role, part of the graph; the rounding is straight-through for gradients."""
    result: Tensor = _Write.apply(x, writer, role, gradient_role, unless_exact)  # type: ignore[no-untyped-call]
    return result


def read_by(x: Tensor, writer: SiteWriter, role: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return x as an input of an op, without a node if it requires no gradient."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.to(dtype)
    result: Tensor = _Read.apply(x, writer, role, dtype)  # type: ignore[no-untyped-call]
    return result


def written_gradient(
    gradient: Tensor, writer: SiteWriter, role: str, unless_exact: bool, in_place: bool = False
) -> tuple[Tensor, Mantissas | None]:
    """Return a gradient written under a role, and the mantissas that were written if they are all of it.

    It is differentiable if a graph of the backward is created. `in_place`: the gradient has no other reader, so that
    without such a graph its memory may be overwritten.
    """
    if is_irregular(gradient):
        raise Misuse(
            f"a gradient is sparse ({gradient.layout}), and shared exponents need dense tensors: create the "
            "embedding with sparse=False, or train in dfp16, which leaves its gradient in fp32"
        )
    if torch.is_grad_enabled() and gradient.requires_grad:
        return rounded_by(gradient, writer, role, None, unless_exact), None
    written = writer.write(gradient, role, unless_exact, in_place)
    return written.values, written.mantissas
