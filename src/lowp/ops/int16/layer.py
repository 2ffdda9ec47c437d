"""Linear layers and convolutions of int16 on a CPU, run from their arguments: one call of the library each way.

The result is that of `integer_contraction`, with the same exponents and observations; decisions that depend only on the
rule are made once, and what depends on shapes is a plan. Calls that the library does not serve take the general path:
first writes at a site, checkpoints that run again, observers, listeners, second words, double backward, and numbers
that are not finite.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.compat import applied_at_once
from lowp.exponents import ExponentTable, SiteWriter, is_flexpoint
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.cpu_int16 import memory_of
from lowp.kernels.int16.layer import Known, LayerPlan, serves
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.ops.call import Call, Quick, QuickRegion, RoleCasts
from lowp.ops.casting import end_of
from lowp.ops.int16.contraction import Contraction, Done, IntegerProduct, Results, kept_as, summed
from lowp.ops.int16.nodes import INPUT_GRADIENT, OUTPUT_ROLE, WEIGHT_GRADIENT
from lowp.ops.products import integer_gradients
from lowp.ops.trilinear import Form, Linear
from lowp.policy import Rule

_apply = applied_at_once(IntegerProduct)
_OUTPUT = (OUTPUT_ROLE,)
_FEW = 1 << 12  # elements of an input that the graph may keep alive: an edge in its place takes longer than the product
_MANY = 1 << 15  # elements of an operand from which its readers share what it is rounded to, which is memory
_MOST_SHAPES = 256
_FIRST_ROLES = {True: (WEIGHT_GRADIENT, f"{WEIGHT_GRADIENT} 2"), False: (INPUT_GRADIENT, WEIGHT_GRADIENT)}

Operands = tuple[Tensor, Tensor, "Tensor | None"]
FormOf = Callable[..., "Form | None"]


def sums_integers(rule: Rule) -> bool:
    """Whether a rule multiplies int16 under one exponent per tensor, rounded to nearest, and sums integers.

    The sums are chains of int32 with fp32 results, or exact sums whose results are written at sites.
    """
    casts, sums = (rule.input, rule.weight, rule.grad), None if rule.accumulate is None else rule.accumulate.format
    if not all(one is not None and has_mantissas(one) and not one.is_stochastic for one in casts):
        return False
    return sums == "int32" if rule.output is None else sums == "exact" and is_flexpoint(rule.output)


def quick(rule: Rule, form_of: FormOf, general: Callable[[Call], Any]) -> Quick:
    """Return the function that runs F.linear, or convolutions, under such a rule.

    `form_of` returns the form of a function's name, the shapes of operands and bias, and further arguments; None for
    calls that are left to a runner. `general` runs a call that has its writer.
    """
    return _Layers(rule, form_of, general).run


class _Layers:
    """The layers of a rule, and what is known of them by function, shapes and further arguments."""

    def __init__(self, rule: Rule, form_of: FormOf, general: Callable[[Call], Any]) -> None:
        self.rule, self.form_of, self.general = rule, form_of, general
        self.casts, self.has_plans = (
            RoleCasts(rule, rule.accumulate),
            all(map(serves, (rule.input, rule.weight, rule.grad))),
        )
        self.is_written, self.stays = rule.output is not None, kept_as(cast(Cast, rule.input))
        self.products: dict[tuple[Any, ...], Contraction | None] = {}

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        """Run a call; None, with nothing done, for what is left to a runner."""
        is_written, products = self.is_written, self.products
        if kwargs or len(args) < 2 or (is_written and region.spots is None) or list in map(type, args[3:]):
            return None
        x, weight, bias = tensors = args[:3] if len(args) > 2 else (*args, None)
        if (memory := memory_of(*(tensors if bias is not None else args[:2]))) is None:
            return None
        key = function.__name__, x.shape, weight.shape, None if bias is None else bias.shape, args[3:]
        product = products[key] if key in products else self._learnt(key)
        if product is None:
            return None
        follows, op, rule = torch.is_grad_enabled(), product.op, self.rule
        if product.plan is None or (is_written and not follows):
            results = Results.of(region.writer(op, rule), x, weight) if is_written else None
            return _in_parts(product, tensors, rule, results)
        writer = region.writer(op, rule) if is_written else None
        done = _done(product, x, memory, writer, self.stays, follows)
        if done is not None:
            return _recorded(product, tensors, done, writer) if follows else done.result
        if writer is None:
            return None
        return cast(Tensor, self.general(Call(op, function, args, {}, rule, writer=writer)))

    def _learnt(self, key: tuple[Any, ...]) -> Contraction | None:
        """Return what is known of a call from now on."""
        if len(self.products) >= _MOST_SHAPES:
            self.products.clear()
        form, found = self.form_of(*key), None
        if form is not None:
            layer = _plan(form, self.rule) if self.has_plans else None
            found = Contraction(form, self.casts, integer_gradients, key[0], layer)
        self.products[key] = found
        return found


def _recorded(product: Contraction, tensors: Operands, done: Done, writer: SiteWriter | None) -> Tensor:
    """Return a result as part of the graph."""
    x, weight, bias = tensors
    results = None if writer is None else Results(writer, _roles(x, weight))
    first = x if x.numel() <= _FEW else end_of(x)
    return cast(Tensor, _apply(first, weight if weight.is_leaf else end_of(weight), bias, done, product, results))


def _in_parts(product: Contraction, tensors: Operands, rule: Rule, results: Results | None) -> Tensor | None:
    """Return the output of a contraction whose operands are rounded one after the other; None for infinities."""
    x, weight, bias = tensors
    a, b = payloads.rounded(x, cast(Any, rule.input)), payloads.rounded(weight, cast(Any, rule.weight))
    if a is None or b is None:
        return None
    if not torch.is_grad_enabled():
        return summed(product, a, b, bias, results)
    return cast(Tensor, _apply(end_of(x), end_of(weight), bias, (a, b), product, results))


def _plan(form: Form, rule: Rule) -> LayerPlan | None:
    """Return the plan of a layer's calls; None of other contractions."""
    if not (isinstance(form, Linear) or form.plain_shape is not None):
        return None
    if not LayerPlan.is_possible(form.first, form.second, form.plain_shape):
        return None
    casts = [cast(Any, one) for one in (rule.input, rule.weight, rule.grad)]
    return LayerPlan(form.first, form.second, form.plain_shape, casts, rule.output)


def _roles(x: Tensor, weight: Tensor) -> tuple[str, str]:
    """Return the roles of both gradients, as `gradient_roles` names them."""
    if isinstance(weight, nn.Parameter):
        return _FIRST_ROLES[isinstance(x, nn.Parameter)]
    return (WEIGHT_GRADIENT, INPUT_GRADIENT) if isinstance(x, nn.Parameter) else (INPUT_GRADIENT, f"{INPUT_GRADIENT} 2")


def _done(
    product: Contraction, x: Tensor, memory: list[int], writer: SiteWriter | None, stays: bool, keeps: bool
) -> Done | None:
    """Return the output, and what backward reads; None where the general path has to run.

    `stays`: mantissas that were kept of x are those that the rule's cast makes of it.
    """
    # what a checkpointed function saves has to be the same when it runs again, at exponents that it knows
    entry: tuple[ExponentTable, int] | None = None
    if writer is not None and writer.trail is None:
        known_place = writer.places_of(_OUTPUT)
        entry = writer.entry(OUTPUT_ROLE) if known_place is None else (known_place[0], known_place[1][0])
    if product.plan is None or (writer is not None and entry is None):
        return None
    to = cast(Cast, product.casts.rule.input)
    known: Known | None = None
    if stays and (kept := payloads.kept(x, to.format)) is not None:
        known = kept, True
    elif x.grad_fn is not None and (writer is not None or x.numel() > _MANY):
        words = payloads.rounded(x, to)  # which keeps them, for other ops that read x
        known = None if words is None else (words, False)
    if known is not None and not known[0].payload.is_contiguous():
        return None
    table, place = (None, 0) if entry is None else entry
    found = product.plan.forward(memory, known, (None if table is None else table.block, place), keeps)
    if found is None:
        return None
    made, *saved = found
    if table is not None:
        table.written[place] = True
        payloads.keep_own((made,), table.cast.format)
    return Done(made.values, saved)
