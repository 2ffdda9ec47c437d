"""Contractions of int16 mantissas: DFP-16's chains and exact sums, forward and both gradients.

The operands of a rule with ``accumulate = int32`` (chains of int32, flushed to fp32) or ``exact`` (one rounding) are
written as int16 mantissas under one exponent per tensor, and saved as such for backward. The same values are computed
in fp32 inside torch.func and torch.compile, in double backward, and on a CPU for operands with an infinity or a NaN,
which integers cannot represent and which must reach the result. On other devices, whose values are not read back, an
infinity or a NaN makes the whole result NaN.

Source: Das et al. 2018, arXiv 1802.00930 (DFP-16); Koester et al. 2017, arXiv 1711.02213 (exact sums).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp.casts import Cast
from lowp.compat import remembered_by_identity, widest_float
from lowp.exponents import SiteWriter
from lowp.kernels.choose.dispatch import answers_at_once
from lowp.kernels.int16 import low_words, payloads
from lowp.kernels.int16.integer_reference import summed_to_odd
from lowp.kernels.int16.layer import Known, LayerPlan
from lowp.kernels.int16.mantissas import Mantissas, has_mantissas, int16_element, power, sums
from lowp.kernels.products import contract
from lowp.kernels.tracing import functorch_is_active, is_sharded
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import end_of, passed_on, with_derivatives
from lowp.ops.int16.nodes import (
    BIAS_GRADIENT,
    INPUT_GRADIENT,
    OUTPUT_GRADIENT,
    OUTPUT_ROLE,
    WEIGHT_GRADIENT,
    fp64_contraction,
    written_gradient,
)
from lowp.ops.shields import shielded
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Form, Linear
from lowp.policy import Accumulation, Rule

Gradients = Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]


def integer_contraction(
    form: Form, call: Call, casts: RoleCasts, tensors: tuple[Tensor, Tensor, Tensor | None], in_fp32: Gradients
) -> Tensor | None:
    """Return the output of a contraction of mantissas, part of the autograd graph; None if it must run in fp32.

    `in_fp32` computes the gradients of the same values in fp32, for cases in backward that integers cannot represent.
    """
    if functorch_is_active():
        return None
    if is_sharded(tensors[0]) or is_sharded(tensors[1]):  # values, which a writer refuses
        return None if call.writer is None else fp64_contraction(form, casts, call.writer, *tensors)
    return in_parts(Contraction(form, casts, in_fp32, call.op), tensors, call.writer)


@dataclass(frozen=True, slots=True, eq=False)  # of a NamedTuple the interpreter looks up each field anew
class Contraction:
    """The form, the casts and the fp32 gradients of a contraction of mantissas.

    `plan`: of a layer whose gradients one call of the C++ library computes.
    """

    form: Form
    casts: RoleCasts
    in_fp32: Gradients
    op: str
    plan: LayerPlan | None = None


class Results(NamedTuple):
    """The writer of the results of one contraction, and the roles of the gradients of both operands."""

    writer: SiteWriter
    gradients: tuple[str, str]

    @classmethod
    def of(cls, writer: SiteWriter, first: Tensor, second: Tensor) -> Results:
        """Return the results of the next product of an op."""
        return cls(writer.part(), GRADIENTS[isinstance(first, Parameter), isinstance(second, Parameter)])


GRADIENTS = {  # of a first and a second operand that are parameters or not, as `gradient_roles` names them
    (False, True): (INPUT_GRADIENT, WEIGHT_GRADIENT),
    (True, False): (WEIGHT_GRADIENT, INPUT_GRADIENT),
    (True, True): (WEIGHT_GRADIENT, f"{WEIGHT_GRADIENT} 2"),
    (False, False): (INPUT_GRADIENT, f"{INPUT_GRADIENT} 2"),
}


def in_parts(
    product: Contraction, tensors: tuple[Tensor, Tensor, Tensor | None], writer: SiteWriter | None
) -> Tensor | None:
    """Return the output of a contraction whose operands are rounded one after the other, part of the graph.

    Operands that integers cannot represent are multiplied in fp64 for a writer, and for others nothing is done.
    """
    (first, second, bias), casts, form = tensors, product.casts, product.form
    to_first, to_second = casts.of(casts.roles[0]), casts.of(casts.roles[1])
    assert to_first is not None and to_second is not None  # the rule requires integers
    a = payloads.rounded(first, to_first, casts.seed)
    b = payloads.rounded(second, to_second, casts.seed)
    if a is None or b is None:
        return None if writer is None else fp64_contraction(form, casts, writer, *tensors)
    if casts.watch is not None:
        casts.tell(first, casts.roles[0])
        casts.tell(second, casts.roles[1])
    with torch.no_grad():
        if writer is None:
            results, rule = None, casts.rule
            finish = None if rule.output is None and casts.watch is None else partial(casts.cast, role="output")
            result = contract(form, OUTPUT, (a, b), casts.accumulate, rule.output, bias, finish)
        else:  # rounded once, including the bias
            results = Results.of(writer, first, second)
            result = _write_sum(form, OUTPUT, casts.accumulate, results.writer, OUTPUT_ROLE, [(a, b)], bias)
    # a checkpoint's recomputation may write under other exponents
    saved = [a.payload, b.payload, torch.stack((a.exponent, b.exponent))]
    apply: Callable[..., Tensor] = IntegerProduct.apply
    return apply(end_of(first), end_of(second), bias, (result, saved), product, results)


class IntegerProduct(torch.autograd.Function):
    """The output of a contraction of mantissas; saves int16 payloads, two bytes per element, and their exponents.

    It is given the output, which is computed, and what backward reads: both payloads, and their exponents.
    """

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        done: tuple[Tensor, Sequence[Tensor]],
        product: Contraction,
        results: Results | None,
    ) -> Tensor:
        needs_first, needs_second, *_ = ctx.needs_input_grad
        ctx.edges = first if needs_first else None, second if needs_second else None
        ctx.product, ctx.results, ctx.bias_dtype = product, results, None if bias is None else bias.dtype
        ctx.save_for_backward(*done[1])
        return done[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *shielded(_gradients, gradient, ctx), None, None, None


def _gradients(gradient: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    """Return the gradients of both operands, whose mantissas are saved, and of the bias.

    Those of create_graph=True are the same numbers, with the derivatives of products in fp32.

    `ctx` has the product, its results, the edges of the operands and the dtype of the bias.
    """
    product: Contraction = ctx.product
    results: Results | None = ctx.results
    is_batched, is_graph = functorch_is_active(), torch.is_grad_enabled()
    has_plan = product.plan is not None and not (is_batched or is_graph)
    has_rows = gradient.dim() == 2 or isinstance(product.form, Linear)  # whether its columns are features
    has_one_word = gradient.shape[-1:] < (low_words.FEATURES,) or not has_rows
    if has_plan and has_one_word:
        kept = None if results is None else _kept(gradient, product.casts.rule)
        if (results is None or kept is not None) and (found := _at_once(gradient, kept, ctx)) is not None:
            return found
    with nullcontext() if is_batched else torch.no_grad():
        written, incoming = _incoming(gradient, product, results, is_batched)
        words = [] if incoming is None else [incoming] if has_one_word else _words(written, incoming, product)
    if has_plan and incoming is not None and len(words) == 1:
        whole = incoming._replace(payload=incoming.payload.contiguous())
        if (found := _at_once(written, (whole, False), ctx)) is not None:
            return found
    first, second, exponents = ctx.saved_tensors
    saved = [Mantissas(first, exponents[0]), Mantissas(second, exponents[1])]
    if is_batched or not is_graph:
        return _given(written, words, ctx, saved)
    with torch.no_grad():
        exact = _given(written, words, ctx, saved)
    in_fp32 = _in_fp32(passed_on(gradient, written), ctx, saved, product.casts.before_writer())
    return with_derivatives(exact, in_fp32)


def _kept(gradient: Tensor, rule: Rule) -> Known | None:
    """Return the mantissas that were kept of a gradient and that it may stay, not yet compared with it."""
    may_stay, _ = _reading(rule)
    kept = payloads.kept(gradient, cast(Cast, rule.output).format) if may_stay else None
    return None if kept is None else (kept, True)


def _at_once(gradient: Tensor, known: Known | None, ctx: Any) -> list[Tensor | None] | None:
    """Return the gradients that are needed from one call; None, with nothing done, where the general path has to run.

    `known`: the mantissas of the gradient; None to make them.
    """
    product, results, needs = ctx.product, ctx.results, list(ctx.needs_input_grad[:3])
    if results is None:
        made = product.plan.backward(gradient, known, ctx.saved_tensors, None, [0 if one else None for one in needs])
        return None if made is None else [None if one is None else one.values for one in made]
    axis = product.form.bias_axis() if needs[2] else 0
    if axis is None:  # of a layer whose input is a single vector
        return None
    is_long = needs[2] and gradient.shape[axis] >= low_words.FEATURES  # that gradient may need a second word
    needs[2] = needs[2] and not is_long
    roles = (*results.gradients, BIAS_GRADIENT)
    if (known_places := results.writer.places_of(tuple(compress(roles, needs)))) is None:
        return None
    table, wanted = known_places
    places: list[int | None] = [None, None, None]
    for place, at in zip(wanted, compress((0, 1, 2), needs), strict=True):
        places[at] = place
    made = product.plan.backward(gradient, known, ctx.saved_tensors, table.block, places)
    if made is None:
        return None
    table.written |= dict.fromkeys(wanted, True)
    found = payloads.keep_own(made, table.cast.format)
    if is_long and known is not None:
        found[2] = results.writer.write(_bias_gradient(product.form, [known[0]]), BIAS_GRADIENT).values
    return found


def _given(gradient: Tensor, words: list[Mantissas], ctx: Any, saved: list[Mantissas]) -> Sequence[Tensor | None]:
    """Return the gradients, given that of the result and its words; none where no integers stand for it."""
    product: Contraction = ctx.product
    results: Results | None = ctx.results
    if not words:
        in_fp32 = _in_fp32(gradient, ctx, saved, product.casts if results is None else product.casts.before_writer())
        if results is None:
            return in_fp32
        return [
            None if one is None else written_gradient(one, results.writer, role, unless_exact=False)[0]
            for one, role in zip(in_fp32, _roles(product, results), strict=True)
        ]
    form, accumulate, roles = product.form, product.casts.accumulate, _roles(product, results)
    found: list[Tensor | None] = [None, None, None]
    for index, target in enumerate((FIRST, SECOND)):
        if ctx.needs_input_grad[index]:
            pairs = [(saved[1 - index], one) for one in words]
            if results is None:
                parts = [contract(form, target, pair, accumulate) for pair in pairs]
                found[index] = sum(parts[1:], parts[0])
            else:
                found[index] = _write_sum(form, target, accumulate, results.writer, roles[index], pairs)
    if ctx.needs_input_grad[2]:
        bias = _bias_gradient(form, words)
        found[2] = bias.float() if results is None else results.writer.write(bias, BIAS_GRADIENT).values
    if results is None:
        if product.casts.rule.output is not None or product.casts.watch is not None:
            found = [None if x is None else product.casts.cast(x, role) for x, role in zip(found, roles, strict=True)]
        found[2] = None if found[2] is None else found[2].to(ctx.bias_dtype)
    return found


def _in_fp32(gradient: Tensor, ctx: Any, saved: list[Mantissas], casts: RoleCasts) -> Sequence[Tensor | None]:
    """Return the gradients as products of the same values in fp32, which can be differentiated."""
    given = ctx.needs_input_grad[:3], ctx.bias_dtype, gradient, [one.values for one in saved], ctx.edges
    return cast(Contraction, ctx.product).in_fp32(ctx.product.form, replace(casts, accumulate=None), *given)


def _roles(product: Contraction, results: Results | None) -> tuple[str, ...]:
    """Return the roles of the gradients of both operands and of the bias."""
    first, second = (f"{role} gradient" for role in product.casts.roles) if results is None else results.gradients
    return first, second, BIAS_GRADIENT


def _incoming(
    gradient: Tensor, product: Contraction, results: Results | None, is_graph: bool
) -> tuple[Tensor, Mantissas | None]:
    """Return the written gradient and its mantissas; None if it is part of a graph or has no mantissas."""
    casts, is_told, found = product.casts, False, None
    if results is not None:
        may_stay, is_read_as_written = _reading(casts.rule)
        found = payloads.exact(gradient, cast(Cast, casts.rule.output)) if may_stay and not is_graph else None
        if found is None:
            unless_exact = is_graph or (may_stay and not answers_at_once(gradient))  # on a device the kernel decides
            gradient, written = written_gradient(gradient, results.writer, OUTPUT_GRADIENT, unless_exact)
            found, is_told = written if is_read_as_written and not is_graph else None, True
    if found is None and not is_graph and (to := casts.rule.grad) is not None and has_mantissas(to):
        found = payloads.rounded(gradient, to, casts.seed)
    if found is not None and casts.watch is not None and not is_told:
        casts.tell(gradient, "grad")
    return gradient, found


def _words(gradient: Tensor, high: Mantissas, product: Contraction) -> list[Mantissas]:
    """Return a gradient with many columns as the word it was rounded to, or as two if one would lose some of them."""
    cast = product.casts.rule.grad
    assert cast is not None
    if not low_words.has_low_word(cast):
        if not cast.is_stochastic:
            what = f"the gradient of {product.op}, {list(gradient.shape)}"
            low_words.warn_of_loss(gradient, high.values, cast, what)
        return [high]
    if answers_at_once(gradient) and not low_words.is_coarse(gradient, high.exponent):
        return [high]
    return [high, low_words.low_word(gradient, high, cast)]


@remembered_by_identity
def _reading(rule: Rule) -> tuple[bool, bool]:
    """Whether a gradient that is already in the format of outputs is not written again, and how gradients are read.

    The latter is whether the mantissas that were written are those that the rule's cast makes of a gradient.
    """
    grad, output = rule.grad, rule.output
    if grad is None or output is None or grad.format != output.format or not has_mantissas(output):
        return False, False
    return True, kept_as(grad)


def kept_as(to: Cast) -> bool:
    """Whether a cast leaves what is in its format under an exponent as it is, so that kept mantissas are its own."""
    return not to.is_stochastic and payloads.is_free(to)


def _write_sum(
    form: Form,
    slot: int,
    accumulate: Accumulation | None,
    writer: SiteWriter,
    role: str,
    words: list[tuple[Mantissas, Mantissas]],
    bias: Tensor | None = None,
) -> Tensor:
    """Return the product that fills a slot, and bias, written under a role; an exact sum straight from the integers.

    `words`: the operands, or the words of one beside the other.
    """
    is_single = len(words) == 1 and accumulate is not None and accumulate.format == "exact"
    operands = words[0]
    entry = writer.entry(role) if is_single and answers_at_once(operands[0].payload) else None
    if entry is not None and entry.has_begun:
        exponent = entry.table.exponent(entry.place)
        found = form.mantissas(slot, *operands, exponent, int16_element(entry.table.cast).symmetric, bias)
        if found is not None:
            return entry.write(found, exponent)
    return writer.write(_sum(form, slot, accumulate, words, bias), role).values


def _sum(
    form: Form,
    slot: int,
    accumulate: Accumulation | None,
    words: list[tuple[Mantissas, Mantissas]],
    bias: Tensor | None = None,
) -> Tensor:
    """Return the sum of the products of an operand's words with the other operand, and bias, in fp64.

    On a device without fp64 the sum is in fp32, rounded to odd, so that writing it in 16 bits rounds it once.
    """
    wide = widest_float(words[0][0].payload.device)
    is_exact = accumulate is not None and accumulate.format == "exact" and form.is_integer_sum(slot)
    if wide is not torch.float64 and is_exact:
        sums = [contract(form, slot, pair, accumulate, dtype=torch.int64) for pair in words]
        exponents = [left.exponent + right.exponent for left, right in words]
        return summed_to_odd(sums, exponents, None if bias is None else form.spread(bias.float()))
    parts = [contract(form, slot, pair, accumulate, dtype=wide) for pair in words]
    result: Tensor = sum(parts[1:], parts[0])
    if bias is None:
        return result
    result, added = result.to(wide), form.spread(bias.to(wide))
    return result.add_(added) if result.is_contiguous() else result + added


def _bias_gradient(form: Form, incoming: list[Mantissas]) -> Tensor:
    """Return the gradient of the bias: the sum of the mantissas in fp64, exact within its 53 bits.

    On a device without fp64 it is in fp32, rounded to odd.
    """
    axis, wide = form.bias_axis(), widest_float(incoming[0].payload.device)
    if axis is None:
        wholes = [one.values for one in incoming]  # whose sum fp32 holds
        return form.bias_gradient(sum(wholes[1:], wholes[0]).to(wide))
    parts = [sums(one.payload, axis) for one in incoming]
    if wide is not torch.float64:
        return summed_to_odd(parts, [one.exponent for one in incoming])
    scaled = [part.double().mul_(power(one.exponent)) for part, one in zip(parts, incoming, strict=True)]
    return sum(scaled[1:], scaled[0])
