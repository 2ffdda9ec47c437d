"""A contraction consists of three products: the output, and the gradient of each operand. All contractions share them.

Every contraction is a trilinear form T(a, b, c): the output is its derivative with respect to c, the two gradients
those with respect to a and b. The three slots are closed under differentiation, so one autograd Function serves them
all, and double backward is the same Function again.

Numerics (the definition for every path): the operands are rounded by their roles, their product is summed in fp32
(products of significands of up to 12 bits are exact there), the bias is added in fp32, and the result is rounded ONCE
by the rule's `output`. The incoming gradient is rounded by `grad` and is an operand like the others.

The gradients read the values that forward has rounded, also where scales of blocks ran along another dimension. Where
a rule names a cast for the operand of one of these products (`input_gradient`, `weight_gradient`), that operand is kept
as it came, in its own dtype, and is rounded in backward along the dimension that this product sums; of the rows of a
linear layer, however many dimensions they have. With `hadamard` both operands are rotated there before their casts, by
the same signs. The bias sums the gradient as `grad` rounds it. Gradients of gradients are those of the products of what
was rounded; their own incoming gradients are rounded by `grad`.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowp import kernels
from lowp.compat import with_tangents
from lowp.errors import Unavailable
from lowp.kernels.products.scratch import Scratch
from lowp.kernels.tracing import functorch_is_active
from lowp.ops import coded
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import Operand, carrier_dtype, depends_on_axis, edge, operand, rounded
from lowp.ops.coded import Coded, has_codes, instead, with_scales
from lowp.ops.incoming import Incoming
from lowp.ops.int16.contraction import integer_contraction
from lowp.ops.int16.nodes import fp64_contraction
from lowp.ops.kept import keeping
from lowp.ops.shields import shielded
from lowp.ops.trilinear import FIRST, OTHERS, OUTPUT, SECOND, Einsum, Form, Linear
from lowp.policy import Rule

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Saved = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]


def summed(casts: RoleCasts) -> RoleCasts:
    """Return how products of values are rounded and summed; integers that run as such values are summed in fp32."""
    return replace(casts, accumulate=None) if casts.sums_integers else casts


def contract(form: Form, call: Call, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the output of a contraction whose operands are cast by the call's rule, each by its role."""
    casts = call.casts
    if casts.accumulate is not None and casts.sums_integers:
        if casts.roles == ("input", "weight") or call.rule.input == call.rule.weight:
            result = integer_contraction(form, call, casts, (first, second, bias), gradients)
            if result is not None:
                return result
        casts = summed(casts if call.writer is None else casts.before_writer())
    elif call.writer is not None:
        return fp64_contraction(form, casts, call.writer, first, second, bias)
    if casts.rule.has_products:
        _check_rotations(form, casts)
    left, right = _operand(call, casts, first, form, FIRST), _operand(call, casts, second, form, SECOND)
    if has_codes(form, call.rule):
        left, right = with_scales(left, first), with_scales(right, second)
    if casts.rule.saved is None or not torch.is_grad_enabled():
        return product(form, OUTPUT, casts, left, right, bias)
    inputs = [one for one, role in zip((left, right), casts.roles, strict=True) if role == "input"]
    with keeping(call, [one.plain if one.raw is None else one.raw for one in inputs]):
        return product(form, OUTPUT, casts, left, right, bias)


def _check_rotations(form: Form, casts: RoleCasts) -> None:
    """Raise Unavailable where a rule rotates the operands of a product that no rotation leaves as it is."""
    for target in (FIRST, SECOND):
        size = casts.of_product(target).hadamard
        if size and form.rotated(target, size) is None:
            raise Unavailable(
                f"hadamard={size} of the {casts.roles[target]} gradient: {type(form).__name__.lower()} of "
                f"{list(form.first)} and {list(form.second)} sums along no dimension in which both operands can be "
                "rotated: give a rule without hadamard to this op"
            )


def _operand(call: Call, casts: RoleCasts, x: Tensor, form: Form, slot: int) -> Operand:
    """Return x, rounded by its role, as operand of a product."""
    role, axis = casts.roles[slot], form.contracted[OUTPUT][slot]
    to, dtype = casts.of(role), casts.gradient_dtype
    is_followed = x.requires_grad and torch.is_grad_enabled() and not functorch_is_active()
    if casts.rule.has_products and casts.of_product(SECOND if slot == FIRST else FIRST).other is not None:
        is_transformed = functorch_is_active()
        with nullcontext() if is_transformed else torch.no_grad():
            value = cast_operand(call, casts, x, role, axis).detach()
        is_followed = is_followed or is_transformed
        return Operand(edge(x, dtype), value, raw=x.detach()) if is_followed else Operand(value, raw=x)
    if not is_followed or to is None or carrier_dtype(to) is x.dtype:
        return operand(x, cast_operand(call, casts, x, role, axis), dtype)
    with torch.no_grad():  # the gradient uses the edge: the cast needs no node
        value = cast_operand(call, casts, x, role, axis)
    return Operand(edge(x, dtype), value)


def cast_operand(call: Call, casts: RoleCasts, x: Tensor, role: str, axis: int = -1) -> Tensor:
    """Return an operand rounded by its role; a leaf parameter by the region, which may have cached its cast."""
    to = casts.of(role)
    if to is not None and to.is_delayed:
        casts.tell(x, role)
        return casts.operand(x, to, role)
    if to is not None and x.is_leaf and x.requires_grad and (axis == -1 or not depends_on_axis(to)):
        casts.tell(x, role)
        return call.weight_cast(x, to)
    return casts.carry(x, role, axis)


def product(
    form: Form, slot: int, casts: RoleCasts, first: Operand, second: Operand, bias: Tensor | None = None
) -> Tensor:
    """Return the product that fills a slot of the form, rounded by its role; part of the autograd graph."""
    values = first.value, second.value, first.scale, second.scale, first.raw, second.raw
    if torch.is_grad_enabled() or functorch_is_active():
        return _product(form, slot, casts, first.edge, second.edge, bias, *values)  # type: ignore[no-any-return]
    return _Product.forward(form, slot, casts, first.edge, second.edge, bias, *values)  # no graph, no node


class _Product(torch.autograd.Function):
    """One product; saves its rounded operands, or those as they came that backward rounds anew."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        form: Form,
        slot: int,
        casts: RoleCasts,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        first_value: Tensor | None,
        second_value: Tensor | None,
        first_scale: Tensor | None,
        second_scale: Tensor | None,
        first_raw: Tensor | None,
        second_raw: Tensor | None,
    ) -> Tensor:
        left = first if first_value is None else first_value
        right = second if second_value is None else second_value
        if first_scale is not None and second_scale is not None:
            codes = Coded(left, first_scale), Coded(right, second_scale)
            return coded.multiply(cast(Linear, form), casts, *codes, bias)
        return computed(form, slot, casts, left, right, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.form, ctx.slot, ctx.casts, first, second, bias, first_value, second_value, *rest = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        operands = first, second, first_value, second_value
        if functorch_is_active():
            # torch.func.vmap keeps one list of batched dimensions: both directions save the same.
            ctx.edges = None
            ctx.save_for_backward(*operands, *rest)
        else:
            scales = rest[:2]
            values, ctx.edges = _for_backward(operands, ctx.needs_input_grad[3:5], rest[2:])
            # An edge has no storage; saved, it would be counted by saved-tensor hooks as a tensor of its shape.
            ctx.save_for_backward(*values, *(scales if scales[0] is not None else ()))
        ctx.save_for_forward(*operands, *rest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = shielded(_of_product, gradient, ctx, ctx.saved_tensors)
        return None, None, None, *found, None, None, None, None, None, None

    @staticmethod
    def tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
        first, second, first_value, second_value, *_ = ctx.saved_tensors  # in this direction, those saved for it
        exact = RoleCasts(Rule())
        parts: list[Tensor] = []
        for tangent, other, mine in ((tangents[3], second_value, 0), (tangents[4], first_value, 1)):
            if tangent is not None:
                saved = (second, first)[mine] if other is None else other
                pair = (tangent, saved) if mine == 0 else (saved, tangent)
                parts.append(computed(ctx.form, ctx.slot, exact, *pair))
        if tangents[5] is not None:
            shape = computed(ctx.form, ctx.slot, exact, first, second)
            parts.append(ctx.form.with_bias(torch.zeros_like(shape), tangents[5].float()))
        return sum(parts[1:], parts[0]).to(ctx.casts.gradient_dtype)


_product = with_tangents(_Product)


def _of_product(gradient: Tensor, ctx: Any, values: Sequence[Tensor | None]) -> Gradients:
    """Return the gradients of both operands of a `_Product` and of its bias. `values`: what it saved."""
    edges = ctx.edges
    if edges is None:
        kept, edges = _for_backward(values[:4], ctx.needs_input_grad[3:5], values[6:])
        values = *kept, *values[4:6]
    first, second, bias = ctx.needs_input_grad[3:6]
    wanted = _Wanted((first, second), bias, ctx.bias_dtype)
    return _gradients(ctx.form, ctx.slot, ctx.casts, wanted, gradient, (values, edges))


def _for_backward(
    operands: Sequence[Tensor | None], needs: tuple[bool, ...], raw: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return the operands' values that the gradients asked for need, and the edges of the graph apart from values.

    `raw`: the operands that backward rounds anew, which stand for their values.
    """
    pairs = list(zip(operands[:2], operands[2:], strict=True))
    read = [edge if value is None else value for edge, value in pairs]
    values = [one if anew is None else anew for one, anew in zip(read, raw, strict=True)]
    kept = [value if needed else None for value, needed in zip(values, reversed(needs), strict=True)]
    return kept, [None if value is None else edge for edge, value in pairs]


class _Wanted(NamedTuple):
    """Which gradients are required, of the two operands and of the bias, and the dtype of the bias."""

    operands: tuple[bool, bool]
    bias: bool
    bias_dtype: torch.dtype | None


def _gradients(form: Form, slot: int, casts: RoleCasts, wanted: _Wanted, gradient: Tensor, saved: Saved) -> Gradients:
    """Return the gradients of both operands and of the bias. `saved`: the operands' values, and edges of the graph.

    Behind the values are scales, where the product summed codes.
    """
    if any(one is not None for one in saved[0][2:]):
        return _gradients_of_codes(cast(Linear, form), casts, wanted, gradient, saved)
    casts = casts if slot == OUTPUT else casts.current  # gradients of gradients have no sites
    values, edges, shapes = saved[0][:2], saved[1], (form.first, form.second)
    is_apart = casts.rule.has_products and slot == OUTPUT  # whether products have casts of their own
    if is_apart and isinstance(form, Linear) and len(form.second) == 2:
        form, gradient, values, edges = _of_rows(form, gradient, values, edges)
    graph = torch.is_grad_enabled() or functorch_is_active()  # they are part of it, and nothing of them may be lent
    result: list[Tensor | None] = [None, None]
    with nullcontext() if graph else Scratch() as scratch:
        keeps = wanted.bias and isinstance(form, Einsum)  # the sum for its bias may be the gradient itself
        incoming = Incoming(form, casts, gradient, scratch, keeps, {}, [])
        for index, target in enumerate(OTHERS[slot]):
            if not wanted.operands[index]:
                continue
            other_slot, edge = OTHERS[slot][1 - index], edges[1 - index]
            value = cast(Tensor, values[1 - index])  # kept, since this gradient was going to be needed
            other = Operand(value) if edge is None else Operand(edge, value)
            if is_apart:
                pair = incoming.operands(target, other)
            else:
                axis = form.contracted[target][OTHERS[target].index(slot)]
                pair = {slot: incoming.along(axis, casts.rule.grad), other_slot: other}
            left, right = (pair[one] for one in OTHERS[target])
            if graph:
                found = product(form, target, casts.once if is_apart else casts, left, right)
            else:
                found = computed(form, target, casts, left.plain, right.plain)
            result[index] = found.reshape(shapes[index]) if is_apart else found
        bias = None
        if wanted.bias:
            wide = incoming.along(-1, casts.rule.grad).connected
            bias = casts.cast(form.bias_gradient(wide), "bias gradient").to(wanted.bias_dtype)
        return result[0], result[1], bias


def _of_rows(
    form: Linear, gradient: Tensor, values: Sequence[Tensor | None], edges: Sequence[Tensor | None]
) -> tuple[Linear, Tensor, Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Return a linear layer of the rows of a matrix, the gradient of its result, and its operands."""
    rows = Linear((math.prod(form.first[:-1]), form.first[-1]), form.second)
    shapes = rows.first, rows.second
    values, edges = (
        [None if one is None else one.reshape(shape) for one, shape in zip(pair, shapes, strict=True)]
        for pair in (values, edges)
    )
    return rows, gradient.reshape(rows.first[0], form.second[0]), values, edges


def _gradients_of_codes(form: Linear, casts: RoleCasts, wanted: _Wanted, gradient: Tensor, saved: Saved) -> Gradients:
    """Return the gradients of a layer that sums codes. Gradients of gradients are those of the operands' values."""
    (*codes, first, second), edges = saved
    pairs = zip(codes, (first, second), strict=True)
    operands = [None if one is None else Coded(one, cast(Tensor, scale)) for one, scale in pairs]
    result = coded.gradients(form, casts, wanted.operands, gradient, operands)
    is_graph = torch.is_grad_enabled() or (functorch_is_active() and not torch.compiler.is_compiling())
    is_fp8, bias = any(one is not None and one.is_fp8 for one in operands), None
    asked = _Wanted(wanted.operands if is_graph else (False, False), wanted.bias and is_fp8, wanted.bias_dtype)
    if any((*asked.operands, asked.bias)):
        shapes = zip(operands, (form.first, form.second), strict=True)
        values = [None if one is None else one.values.reshape(shape) for one, shape in shapes]
        quiet = replace(casts, watch=None)
        *of_values, bias = _gradients(form, OUTPUT, quiet, asked, gradient, (values, edges))
        result = [one if other is None else instead(other, one) for one, other in zip(result, of_values, strict=True)]
    if wanted.bias and not is_fp8:
        bias = casts.cast(form.bias_gradient(gradient.float()), "bias gradient").to(wanted.bias_dtype)
    return result[0], result[1], bias


def gradients(
    form: Form,
    casts: RoleCasts,
    needs: tuple[bool, bool, bool],
    bias_dtype: torch.dtype | None,
    gradient: Tensor,
    values: Sequence[Tensor | None],
    edges: Sequence[Tensor | None] = (None, None),
) -> Gradients:
    """Return the gradients of a contraction from its rounded operands, differentiable if a graph is recorded."""
    return _gradients(form, OUTPUT, casts, _Wanted(needs[:2], needs[2], bias_dtype), gradient, (values, edges))


def computed(
    form: Form, slot: int, casts: RoleCasts, left: Tensor, right: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return a product of rounded operands, summed as the rule says and rounded once."""
    output = casts.rule.output
    if casts.watch is not None:
        return _observed(form, slot, casts, left, right, bias)
    finish = None if output is None else lambda x: rounded(x, output, casts.seed)
    return kernels.contract(form, slot, (left, right), casts.accumulate, output, bias, finish)


def _observed(
    form: Form, slot: int, casts: RoleCasts, left: Tensor, right: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return the same, and tell observers of the sum; of a native product, which rounds by itself, of the result."""
    role = "output" if slot == OUTPUT else f"{casts.roles[slot]} gradient"
    is_told = False

    def finish(x: Tensor) -> Tensor:
        nonlocal is_told
        is_told = True
        return casts.cast(x, role)

    result = kernels.contract(form, slot, (left, right), casts.accumulate, casts.rule.output, bias, finish)
    if not is_told:
        casts.tell(result, role)
    return result
