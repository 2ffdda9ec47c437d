"""Contractions of int16 on a CPU, run from their arguments or their form: one call of the library each way.

Decisions that depend only on the rule are made once, and what depends on shapes and strides is a plan. Calls that the
plan does not serve run in parts, with the same result, exponents and observations: first writes at a site, checkpoints
that run again, observers, listeners, second words, double backward, and numbers that are not finite.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp.casts import Cast
from lowp.compat import applied_at_once, remembered_by_identity
from lowp.exponents import SiteWriter, is_flexpoint
from lowp.kernels.casts.run import is_dense
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.cpu_int16 import memory_of
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.layer import Known, LayerPlan, MatrixProduct, MatrixProducts, serves
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.kernels.products.programs import Memory, strides_of
from lowp.kernels.tracing import is_quiet
from lowp.ops.call import Quick, QuickRegion, RoleCasts
from lowp.ops.casting import end_of
from lowp.ops.int16.contraction import GRADIENTS, Contraction, IntegerProduct, Results, in_parts, kept_as
from lowp.ops.int16.nodes import OUTPUT_ROLE
from lowp.ops.matrices import matrices
from lowp.ops.products import gradients
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Form
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
    """The contractions of a rule that `sums_integers`, and what is known of them."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.casts = rule, RoleCasts(rule, rule.accumulate)
        self.has_plans = all(map(serves, (rule.input, rule.weight, rule.grad)))
        self.is_written = rule.output is not None
        self.read = tuple((cast(Cast, one), kept_as(cast(Cast, one))) for one in (rule.input, rule.weight))
        self.products: dict[Hashable, Contraction | None] = {}

    def run(
        self, form_of: FormOf, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion
    ) -> Tensor | None:
        """Run a call from its arguments; None, with nothing done, for what is left to a runner.

        `form_of` returns the form of a function's name, the shapes of operands and bias, and further arguments; None
        for calls that are left to a runner.
        """
        if kwargs or len(args) < 2 or (self.is_written and region.spots is None) or list in map(type, args[3:]):
            return None
        if type(args[0]) is Parameter:  # which may be the weight
            return None
        x, weight, bias = tensors = args[:3] if len(args) > 2 else (*args, None)
        if (memory := memory_of(*(args[:2] if bias is None else tensors), as_they_lie=True)) is None:
            return None
        of_bias = None if bias is None else (bias.shape, bias.stride())
        key = function.__name__, x.shape, x.stride(), weight.shape, weight.stride(), of_bias, args[3:]
        if key not in self.products:
            op = function.__name__.strip("_")  # __matmul__ is matmul
            form = form_of(op, tuple(x.shape), tuple(weight.shape), of_bias and of_bias[0], args[3:])
            self._learn(key, op, form, tensors)
        if (product := self.products[key]) is None:
            return None
        return self._contracted(
            product, tensors, memory, region.writer(product.op, self.rule) if self.is_written else None
        )

    def contract(
        self, form: Form, op: str, tensors: tuple[Tensor, Tensor, Tensor | None], writer: SiteWriter | None
    ) -> Tensor | None:
        """Return a contraction whose form is known; None, with nothing done, for what its definition runs."""
        x, weight, bias = tensors
        if (writer is not None) is not self.is_written or not is_quiet():
            return None
        if (memory := memory_of(*(tensors[:2] if bias is None else tensors), as_they_lie=True)) is None:
            return None
        key = op, form, x.stride(), weight.stride(), None if bias is None else bias.stride()
        if key not in self.products:
            self._learn(key, op, form, tensors)
        product = self.products[key]
        if product is None or product.plan is None:
            return None
        return self._contracted(product, tensors, memory, None if writer is None else writer.part())

    def _learn(self, key: Hashable, op: str, form: Form | None, tensors: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Note what is known of a call from now on."""
        if len(self.products) >= _MOST_SHAPES:
            self.products.clear()
        self.products[key] = None
        if form is not None:
            x, weight, bias = tensors
            has_plan = self.has_plans and form.fits(bias) and (bias is None or bias.is_contiguous())
            plan = plan_of(form, x.stride(), weight.stride(), self.rule) if has_plan else None
            self.products[key] = Contraction(form, self.casts, gradients, op, plan)

    def _contracted(
        self,
        product: Contraction,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        memory: list[int],
        writer: SiteWriter | None,
    ) -> Tensor:
        """Return a contraction, part of the graph; `writer`: that of its results alone."""
        x, weight, bias = tensors
        done = None if product.plan is None else self._planned(product.plan, (x, weight), memory, writer)
        if done is None:  # the plan's backward would read exponents that tell of infinities, too
            anew = None if writer is None else replace(writer)  # which counts its parts from the first
            return cast(Tensor, in_parts(replace(product, plan=None), tensors, anew))
        if not torch.is_grad_enabled():
            return done[0]
        results = None  # `Results.of` the first product, in no function
        if writer is not None:
            results = Results(writer, GRADIENTS[isinstance(x, Parameter), isinstance(weight, Parameter)])
        first = x if x.is_leaf or x.numel() <= _FEW else end_of(x)
        second = weight if weight.is_leaf or weight.numel() <= _FEW else end_of(weight)
        return cast(Tensor, _apply(first, second, bias, done, product, results))

    def _planned(
        self, plan: LayerPlan, operands: tuple[Tensor, Tensor], memory: list[int], writer: SiteWriter | None
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
        known: list[Known | None] = []
        for x, (to, stays) in zip(operands, self.read, strict=True):
            found: Known | None = None
            if stays and type(x) is Tensor and (kept := payloads.kept(x, to.format)) is not None:
                found = kept, True
            elif x.grad_fn is not None and (writer is not None or x.numel() > _MANY):
                words = payloads.rounded(x, to)  # which keeps them, for other ops that read x
                found = None if words is None else (words, False)
            if found is not None and found[0].payload.stride() != x.stride():
                return None
            known.append(found)
        target = None if table is None else table.block, place
        made_of = plan.forward(memory, known, target, torch.is_grad_enabled())
        if made_of is None:
            return None
        made, *saved = made_of
        if table is not None:
            table.written[place] = True
            payloads.keep_own((made,), table.cast.format)
        return made.values, cast(Sequence[Tensor], saved)


@remembered_by_identity
def layers(rule: Rule) -> Layers | None:
    """Return the contractions of a rule; None of a rule that does not sum integers."""
    return Layers(rule) if sums_integers(rule) else None


def quick(rule: Rule, form_of: FormOf) -> Quick | None:
    """Return what runs contractions from their arguments alone, see `Layers.run`; None for rules that have none."""
    found = layers(rule)
    return None if found is None else partial(found.run, form_of)


def plan_of(form: Form, first: tuple[int, ...], second: tuple[int, ...], rule: Rule) -> LayerPlan | None:
    """Return the plan of contractions whose operands have these strides; None where there is none."""
    lies = (form.first, first), (form.second, second)
    shape = form.plain_shape
    if 0 in (*form.first, *form.second) or not all(is_dense(*one) for one in lies):
        return None
    if shape is not None:
        is_possible = all(strides == strides_of(whole) for whole, strides in lies) and LayerPlan.is_possible(shape)
        found: ConvolutionShape | MatrixProducts | None = shape if is_possible else None
    else:
        found = products_of(form, first, second)
    casts = [cast(Cast, one) for one in (rule.input, rule.weight, rule.grad)]
    return None if found is None else LayerPlan(*lies, found, casts, rule.output)


def products_of(form: Form, first: tuple[int, ...], second: tuple[int, ...]) -> MatrixProducts | None:
    """Return the products of a contraction as matrices that lie as its operands; None where one is another product."""
    if not form.are_matrices:
        return None
    x, weight = Memory(FIRST, form.first, first, torch.int16), Memory(SECOND, form.second, second, torch.int16)
    result: tuple[int, ...] = ()
    products = list[MatrixProduct]()
    for slot in (OUTPUT, FIRST, SECOND):
        y = Memory(OUTPUT, result, strides_of(result), torch.int16)
        operands = {OUTPUT: (x, weight), FIRST: (weight, y), SECOND: (x, y)}[slot]
        found = matrices(form, slot, *operands) if form.is_integer_sum(slot) else None
        if found is None or found.finish is not None:
            return None
        left, right = (found.left, found.right)
        # the order of a convolution's operands: of the gradient of x that of the result comes first
        is_turned = left.place != (OUTPUT if slot == FIRST else FIRST)
        products.append(MatrixProduct((left.shape, left.strides), (right.shape, right.strides), is_turned))
        result = found.shape if slot == OUTPUT else result
    return MatrixProducts(result, (products[0], products[1], products[2]))
