"""Linear layers and convolutions of int16 on a CPU, run from their arguments: one call of the library each way.

Decisions that depend only on the rule are made once, and what depends on shapes is a plan. Calls that the plan does not
serve run in parts, with the same result, exponents and observations: first writes at a site, checkpoints that run
again, observers, listeners, second words, double backward, and numbers that are not finite.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp.casts import Cast
from lowp.compat import applied_at_once
from lowp.exponents import SiteWriter, is_flexpoint
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.cpu_int16 import memory_of
from lowp.kernels.int16.layer import LayerPlan, serves
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.ops.call import QuickRegion, RoleCasts
from lowp.ops.casting import end_of
from lowp.ops.int16.contraction import GRADIENTS, Contraction, IntegerProduct, Results, in_parts, kept_as
from lowp.ops.int16.nodes import OUTPUT_ROLE
from lowp.ops.products import integer_gradients
from lowp.ops.trilinear import Form, Linear
from lowp.policy import Rule

_apply = applied_at_once(IntegerProduct)
_OUTPUT = (OUTPUT_ROLE,)
_FEW = 1 << 12  # elements of an input that the graph may keep alive: an edge in its place takes longer than the product
_MANY = 1 << 15  # elements of an operand from which its readers share what it is rounded to, which is memory
_MOST_SHAPES = 256

FormOf = Callable[..., "Form | None"]


def sums_integers(rule: Rule) -> bool:
    """Whether a rule multiplies int16 under one exponent per tensor, rounded to nearest, and sums integers.

    The sums are chains of int32 with fp32 results, or exact sums whose results are written at sites.
    """
    casts, sums = (rule.input, rule.weight, rule.grad), None if rule.accumulate is None else rule.accumulate.format
    if not all(one is not None and has_mantissas(one) and not one.is_stochastic for one in casts):
        return False
    return sums == "int32" if rule.output is None else sums == "exact" and is_flexpoint(rule.output)


class Layers:
    """The layers of a rule that `sums_integers`, and what is known of them by function, shapes and further arguments.

    `form_of` returns the form of a function's name, the shapes of operands and bias, and further arguments; None for
    calls that are left to a runner.
    """

    def __init__(self, rule: Rule, form_of: FormOf) -> None:
        self.rule, self.form_of, self.casts = rule, form_of, RoleCasts(rule, rule.accumulate)
        self.has_plans = all(map(serves, (rule.input, rule.weight, rule.grad)))
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
        writer = region.writer(product.op, self.rule) if is_written else None
        done = None if product.plan is None else self._planned(product, x, memory, writer)
        if done is None:  # the plan's backward would read exponents that tell of infinities, too
            return in_parts(replace(product, plan=None), tensors, writer)
        if not torch.is_grad_enabled():
            return done[0]
        results = None  # `Results.of` the first product, in no function
        if writer is not None:
            results = Results(writer, GRADIENTS[isinstance(x, Parameter), isinstance(weight, Parameter)])
        ends = x if x.numel() <= _FEW else end_of(x), weight if weight.is_leaf else end_of(weight)
        return cast(Tensor, _apply(*ends, bias, done, product, results))

    def _learnt(self, key: tuple[Any, ...]) -> Contraction | None:
        """Return what is known of a call from now on."""
        if len(self.products) >= _MOST_SHAPES:
            self.products.clear()
        form, found = self.form_of(*key), None
        if form is not None:
            found = Contraction(form, self.casts, integer_gradients, key[0], self._plan(form))
        self.products[key] = found
        return found

    def _plan(self, form: Form) -> LayerPlan | None:
        """Return the plan of a layer's calls; None of other contractions."""
        if not self.has_plans or not (isinstance(form, Linear) or form.plain_shape is not None):
            return None
        if not LayerPlan.is_possible(form.first, form.second, form.plain_shape):
            return None
        casts = [cast(Any, one) for one in (self.rule.input, self.rule.weight, self.rule.grad)]
        return LayerPlan(form.first, form.second, form.plain_shape, casts, self.rule.output)

    def _planned(
        self, product: Contraction, x: Tensor, memory: list[int], writer: SiteWriter | None
    ) -> tuple[Tensor, Sequence[Tensor]] | None:
        """Return the output, and what backward reads, by the plan; None where the call has to run in parts."""
        table, place = None, 0
        if writer is not None:
            if writer.trail is not None:
                return None  # what a checkpoint saves has to be the same when it runs again, at exponents it knows
            known_place = writer.places_of(_OUTPUT)
            entry = writer.entry(OUTPUT_ROLE) if known_place is None else (known_place[0], known_place[1][0])
            if entry is None:
                return None
            table, place = entry
        to, known = cast(Cast, self.rule.input), None
        if self.stays and (kept := payloads.kept(x, to.format)) is not None:
            known = kept, True
        elif x.grad_fn is not None and (writer is not None or x.numel() > _MANY):
            words = payloads.rounded(x, to)  # which keeps them, for other ops that read x
            known = None if words is None else (words, False)
        if known is not None and not known[0].payload.is_contiguous():
            return None
        target = None if table is None else table.block, place
        found = cast(LayerPlan, product.plan).forward(memory, known, target, torch.is_grad_enabled())
        if found is None:
            return None
        made, *saved = found
        if table is not None:
            table.written[place] = True
            payloads.keep_own((made,), table.cast.format)
        return made.values, cast(Sequence[Tensor], saved)
