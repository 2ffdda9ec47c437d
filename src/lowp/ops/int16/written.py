"""Linear layers and convolutions under shared exponents: one call of the C++ library forward, and one backward.

The result is that of `integer_contraction`, with the same exponents and observations. Calls that the library does not
serve take the general path: first writes at a site, checkpoints that run again, observers, listeners, second words,
double backward, and numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.compat import applied_at_once
from lowp.exponents import SiteWriter
from lowp.kernels.int16 import payloads
from lowp.kernels.int16 import written as int16_written
from lowp.kernels.int16.low_words import FEATURES
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.int16.written import LayerMantissas
from lowp.ops.call import Call, Quick, QuickRegion, RoleCasts
from lowp.ops.casting import end_of, functorch_is_active, shielded
from lowp.ops.int16.contraction import (
    Contraction,
    Results,
    bias_gradient,
    gradients_from,
    gradients_given,
    incoming_of,
    reading,
    summed_gradients,
    words_of,
)
from lowp.ops.int16.linear import are_plain, contracted
from lowp.ops.int16.nodes import BIAS_GRADIENT, INPUT_GRADIENT, OUTPUT_ROLE, WEIGHT_GRADIENT
from lowp.ops.products import integer_gradients
from lowp.ops.trilinear import Form, Linear
from lowp.policy import Rule

__all__ = ["of_form", "quick"]


_FEW = 1 << 12  # elements of an input that the graph may keep alive: an edge in its place takes longer than the product
_FIRST_ROLES = {True: (WEIGHT_GRADIENT, f"{WEIGHT_GRADIENT} 2"), False: (INPUT_GRADIENT, WEIGHT_GRADIENT)}


def quick(rule: Rule, general: Callable[[Call], Any]) -> Quick:
    """Return the function that runs F.linear under a rule whose results are written at sites.

    `general` runs a call that has its writer.
    """
    run_form = of_form(rule, general)

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        if kwargs or not 2 <= len(args) <= 3 or region.spots is None or not _are_operands(args):
            return None
        x, weight, *_ = args
        return run_form(Linear(tuple(x.shape), tuple(weight.shape)), "linear", function, args, region)

    return run


def of_form(rule: Rule, general: Callable[[Call], Any]) -> Callable[..., Tensor | None]:
    """Return the function that runs contractions of plain fp32 tensors, not empty, under such a rule.

    It takes the form, the op, the function of the call and its arguments, which begin with the operands and an optional
    bias, and the region, which has sites.
    """
    casts, run_contraction = RoleCasts(rule, rule.accumulate), contracted(rule)
    pair = cast(Cast, rule.input), cast(Cast, rule.weight)
    at_once = all(map(int16_written.serves, (*pair, cast(Cast, rule.grad))))

    def run(form: Form, op: str, function: Any, args: tuple[Any, ...], region: QuickRegion) -> Tensor | None:
        x, weight, bias = args[:3] if len(args) > 2 else (*args, None)
        if not (at_once and torch.is_grad_enabled() and (isinstance(form, Linear) or form.plain_shape is not None)):
            return run_contraction(form, op, (x, weight, bias), region)
        writer = region.writer(op, rule)
        found = _written(form, (x, weight, bias), pair, writer)
        if found is None:
            return cast(Tensor, general(Call(op, function, args, {}, rule, writer=writer)))
        results = Results(writer, _roles(x, weight))
        first = x if x.numel() <= _FEW else end_of(x)
        product = Contraction(form, casts, integer_gradients, op)
        return cast(Tensor, _apply(first, end_of(weight), bias, *found, product, results))

    return run


def _are_operands(args: tuple[Any, ...]) -> bool:
    """Whether the arguments are x[..., k] and w[n, k] in fp32, not empty, and an optional bias [n]."""
    x, weight, *bias = args
    if not are_plain(*(args if bias and bias[0] is not None else args[:2])):
        return False
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return False
    if bias and bias[0] is not None and bias[0].shape != weight.shape[:1]:
        return False
    return bool(x.numel() > 0 and weight.numel() > 0)


def _roles(x: Tensor, weight: Tensor) -> tuple[str, str]:
    """Return the roles of both gradients, as `gradient_roles` names them."""
    if isinstance(weight, nn.Parameter):
        return _FIRST_ROLES[isinstance(x, nn.Parameter)]
    return (WEIGHT_GRADIENT, INPUT_GRADIENT) if isinstance(x, nn.Parameter) else (INPUT_GRADIENT, f"{INPUT_GRADIENT} 2")


def _written(
    form: Form, tensors: tuple[Tensor, Tensor, Tensor | None], casts: tuple[Cast, Cast], writer: SiteWriter
) -> tuple[Tensor, LayerMantissas] | None:
    """Return the output, written, and what backward reads; None where the general path has to write."""
    # what a checkpointed function saves has to be the same when it runs again, at exponents that it knows
    entry = writer.sum_entry(OUTPUT_ROLE) if writer.trail is None else None
    if entry is None:
        return None
    x = tensors[0]
    kept = payloads.kept(x, casts[0].format)
    known = None if kept is None else (kept, True)
    if known is None and x.grad_fn is not None:
        words = payloads.rounded(x, casts[0])  # which keeps them, for other ops that read x
        known = None if words is None else (words, False)
    if known is not None and not known[0].payload.is_contiguous():
        return None
    given, shape = (tensors, casts, known, writer.cast, entry.exponent), form.plain_shape
    found = int16_written.linear(*given) if shape is None else int16_written.convolution(*given, shape)
    if found is None:
        return None
    written, layer = found
    return entry.wrote(written), layer


class _WrittenLinear(torch.autograd.Function):
    """The node of a layer with a given output; saves the mantissas of both operands, and their exponents."""

    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        bias: Tensor | None,
        result: Tensor,
        layer: LayerMantissas,
        product: Contraction,
        results: Results,
    ) -> Tensor:
        needs_first, needs_second, *_ = ctx.needs_input_grad
        ctx.edges = first if needs_first else None, second if needs_second else None
        ctx.product, ctx.results, ctx.bias_dtype = product, results, torch.float32
        ctx.save_for_backward(*layer)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *shielded(_gradients, gradient, ctx), None, None, None, None


_apply = applied_at_once(_WrittenLinear)


def _gradients(gradient: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    layer, product, results = LayerMantissas(*ctx.saved_tensors), ctx.product, ctx.results
    if torch.is_grad_enabled() or functorch_is_active():
        return gradients_from(gradient, ctx, _saved(layer, product.form.second))
    rule: Rule = product.casts.rule
    may_stay, _ = reading(rule)
    output = cast(Cast, rule.output)
    has_one_word = gradient.shape[-1] < FEATURES or not isinstance(product.form, Linear)
    kept = payloads.kept(gradient, output.format) if may_stay and has_one_word else None
    if kept is not None and (found := _at_once(gradient, kept, layer, ctx)) is not None:
        return found
    gradient, incoming = incoming_of(gradient, product, results)
    if incoming is None:
        return gradients_given(gradient, None, ctx, _saved(layer, product.form.second))
    words = words_of(gradient, incoming, product)
    if len(words) == 1 and incoming.payload.is_contiguous():
        found = _at_once(None, incoming, layer, ctx)
        if found is not None:
            return found
    return summed_gradients(ctx, _saved(layer, product.form.second), words, results)


def _saved(layer: LayerMantissas, weight: Sequence[int]) -> list[Mantissas]:
    payloads_of = layer.first, int16_written.weight_of(layer, weight)
    return [Mantissas(*one) for one in zip(payloads_of, int16_written.exponents_of(layer), strict=True)]


def _at_once(
    gradient: Tensor | None, incoming: Mantissas, layer: LayerMantissas, ctx: Any
) -> list[Tensor | None] | None:
    """Return the gradients that are needed, written; None, with nothing done, where the general path has to write.

    `gradient`: with it the mantissas `incoming` are to be compared; None if they are known to be its own.
    """
    form, results = ctx.product.form, ctx.results
    writer: SiteWriter = results.writer
    needs = list(ctx.needs_input_grad[:3])
    is_long = needs[2] and form.second[0] >= FEATURES  # that gradient may need a second word
    needs[2] = needs[2] and not is_long
    roles = [one for one, needed in zip((*results.gradients, BIAS_GRADIENT), needs, strict=True) if needed]
    entries = writer.sum_entries(roles)
    if entries is None:
        return None
    shapes, of_entries = (form.first, form.second, form.second[:1]), iter(entries)
    wanted = [(one, next(of_entries).exponent) if needed else None for one, needed in zip(shapes, needs, strict=True)]
    given, shape = (gradient, incoming, layer, wanted, writer.cast), form.plain_shape
    found = int16_written.gradients(*given) if shape is None else int16_written.convolution_gradients(*given, shape)
    if found is None:
        return None
    of_entries = iter(entries)
    made = [None if one is None else next(of_entries).wrote(one) for one in found]
    if is_long:
        made[2] = writer.write(bias_gradient(form, [incoming]), BIAS_GRADIENT)
    return made
