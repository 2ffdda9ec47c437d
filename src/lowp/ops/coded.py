"""Linear layers whose products sum codes and are scaled afterwards: int8 by rows, and fp8 on chips that multiply it.

Of int8 the sums are exact: this is the definition of what the C++ library computes in one call (`ways.InBytes`). Of fp8
torch's scaled product sums in fp32; torch has none of batches and no convolution. A byte a number is kept for backward.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lowp.compat import remembered_by_identity, with_tangents
from lowp.kernels.packed.byte_products import multiply_codes
from lowp.kernels.products.fp8_products import Fp8Matrix, encoded, is_eight_bits, multiplied, multiplies_fp8
from lowp.ops.call import RoleCasts, sums_bytes
from lowp.ops.casting import Operand, end_of
from lowp.ops.trilinear import FIRST, SECOND, Einsum, Form, Linear
from lowp.policy import Rule

_HIGHEST = 127.0  # of format int8


class Coded(NamedTuple):
    """An operand as codes of fp8 or int8, or as the values of a cast to int8; and its scale, or that of each row."""

    numbers: Tensor
    scale: Tensor

    @property
    def is_fp8(self) -> bool:
        """Whether these are codes of fp8, under one scale."""
        return self.numbers.is_floating_point() and self.numbers.element_size() == 1

    @property
    def rows(self) -> Tensor:
        """The codes of int8 as whole numbers in fp32; infinities and NaN stay."""
        rows = self.numbers.reshape(self.scale.shape[0], -1)
        return rows.float() if rows.dtype is torch.int8 else (rows / self.scale[:, None]).round()

    @property
    def values(self) -> Tensor:
        """The values in fp32 [rows, k]."""
        return self.numbers.float() * self.scale if self.is_fp8 else self.rows * self.scale[:, None]


def has_codes(form: Form, rule: Rule) -> bool:
    """Whether a contraction under a rule sums integers of 8 bits."""
    if not (isinstance(form, Linear) and len(form.second) == 2) or 0 in form.first + form.second:
        return False
    return sums_bytes(rule)


def with_scales(operand: Operand, x: Tensor) -> Operand:
    """Return the operand that x is cast to, with the scales of its rows as format int8 has them."""
    is_inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    x = x if is_inference else x.detach()  # there a DTensor cannot be detached
    return operand._replace(scale=_scales(x.float().reshape(-1, x.shape[-1])))


def _scales(rows: Tensor) -> Tensor:
    largest = torch.where(rows.isfinite(), rows.abs(), 0.0).amax(-1)
    return torch.where(largest == 0, 1.0, (largest / _HIGHEST).clamp(min=torch.finfo(torch.float32).smallest_normal))


def multiply(form: Linear, casts: RoleCasts, left: Coded, right: Coded, bias: Tensor | None) -> Tensor:
    """Return a linear layer: of int8 an exact sum, rounded once, by the scales of columns and then rows, plus bias."""
    if left.is_fp8:
        result = multiplied(Fp8Matrix(*left), Fp8Matrix(*right), bias)
    else:
        result = multiply_codes(left.rows, right.rows) * right.scale * left.scale[:, None]
        result = result if bias is None else result + bias.float()
    casts.tell(result, "output")
    return result.reshape(*form.first[:-1], form.second[0])


def gradients(
    form: Linear, casts: RoleCasts, needs: tuple[bool, bool], gradient: Tensor, operands: Sequence[Coded | None]
) -> list[Tensor | None]:
    """Return the gradients of both operands, detached from the graph.

    Where the scales of rows of int8 lie along the sum of a gradient, they multiply the incoming gradient before it is
    rounded, so that every sum is one of integers.
    """
    casts.tell(gradient, "grad")
    quiet, found = replace(casts, watch=None), cast("list[Tensor | None]", [None, None])
    incoming = gradient.detach().reshape(-1, form.second[0]).float()
    in_fp8: Fp8Matrix | None = None
    for slot in (FIRST, SECOND):
        other = operands[1 - slot]
        if not needs[slot] or other is None:
            continue
        with torch.no_grad():
            if other.is_fp8:
                in_fp8 = encoded(incoming, cast(Any, casts.rule.grad)) if in_fp8 is None else in_fp8
                left = in_fp8 if slot == FIRST else Fp8Matrix(in_fp8.numbers.t(), in_fp8.scale)
                result = multiplied(left, Fp8Matrix(other.numbers.t(), other.scale))
            else:
                scaled = incoming * other.scale if slot == FIRST else (incoming * other.scale[:, None]).t().contiguous()
                codes = Coded(quiet.carry(scaled, "grad"), _scales(scaled))
                result = multiply_codes(codes.rows, other.rows.t()) * codes.scale[:, None]
        casts.tell(result, f"{casts.roles[slot]} gradient")
        found[slot] = result.reshape(form.first if slot == FIRST else form.second)
    return found


class _Instead(torch.autograd.Function):
    """The numbers of one tensor with the derivatives of another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


instead = with_tangents(_Instead)


# -- fp8 ----------------------------------------------------------------------------------------------------------


@remembered_by_identity
def is_fp8(rule: Rule) -> bool:
    """Whether a rule casts all operands to fp8 and writes fp32; torch has no product of two e5m2 tensors."""
    operands = (rule.input, rule.weight, rule.grad)
    if (
        rule.output is not None
        or rule.has_products
        or rule.saved is not None
        or not all(is_eight_bits(one) for one in operands)
    ):
        return False
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    forward = [str(one.element) for one in operands[:2] if one is not None]
    return sums_in_fp32 and all("e5m2" not in name for name in forward)


def in_fp8(
    form: Form, rule: Rule, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Linear, Operand, Operand] | None:
    """Return a linear layer, or x times a matrix, as a layer of codes of fp8; None for what is not multiplied so."""
    is_matrix = isinstance(form, Einsum) and form.call in (torch.matmul, torch.mm) and bias is None
    if not (isinstance(form, Linear) or is_matrix) or weight.dim() != 2 or not multiplies_fp8(x):
        return None
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not all(type(one) in (Tensor, nn.Parameter) and one.dtype is torch.float32 for one in operands):
        return None
    weight = weight.t() if is_matrix else weight
    if x.dim() < 1 or x.shape[-1] != weight.shape[1] or not x.numel() * weight.numel():
        return None
    coded = []
    for one, to in ((x, rule.input), (weight, rule.weight)):
        matrix = encoded(one.detach().reshape(-1, one.shape[-1]), cast(Any, to))
        coded.append(Operand(end_of(one), matrix.numbers, matrix.scale))
    return Linear(tuple(x.shape), tuple(weight.shape)), coded[0], coded[1]
