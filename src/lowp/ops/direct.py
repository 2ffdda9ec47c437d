"""Contractions straight from their arguments: a call of the C++ library forward, one backward, one autograd Function.

They have the bits of `products.contract`, the definition, which runs all other calls: those that torch transforms or an
observer sees, on other devices, under casts that no program has, and all gradients of gradients. What depends on the
rule is decided once, what depends on shapes, strides and dtypes once for each of them (`prepared`).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowp.casts import parse
from lowp.compat import applied_at_once, real_tensors, remembered_by_identity
from lowp.exponents import SiteScales
from lowp.formats import ScaledFormat
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.choose.hardware import multiplies
from lowp.kernels.int16.integer_run import NotFinite
from lowp.kernels.products.programs import WAYS, is_here, rounds
from lowp.kernels.tracing import is_quiet
from lowp.ops.backward import Found
from lowp.ops.call import KeptCasts, QuickRegion, RoleCasts, accumulation, sums_bytes
from lowp.ops.casting import carried, clips, end_of, native_dtype, own_dtype
from lowp.ops.matrices import FACTOR, FACTOR_SCALES, VALUE, VALUE_SCALES
from lowp.ops.prepared import UNKNOWN, Given, Prepared
from lowp.ops.products import gradients
from lowp.ops.shields import shielded
from lowp.ops.trilinear import FIRST, SECOND, Form, Linear, is_small
from lowp.ops.ways import prepare
from lowp.policy import Rule

FormOf = Callable[[tuple[int, ...], tuple[int, ...]], "Form | None"]
LEAST_ROWS = 256
_MOST = 4096  # calls that are known under a rule
_INT8 = parse("int8")
_requires_grad = attrgetter("requires_grad")


class Direct:
    """How the contractions of a rule run: its casts, and what is known of its calls by shapes, strides and dtypes."""

    __slots__ = ("bytes_of_rows", "is_delayed", "is_torchs", "prepared", "rule", "sums_bytes")

    def __init__(self, rule: Rule) -> None:
        self.rule, self.sums_bytes, self.is_delayed = rule, sums_bytes(rule), rule.is_delayed
        # whether torch's own kernels run it, but for small linear layers (`is_small`)
        self.is_torchs = any(multiplies("cpu", dtype) for dtype in dtypes_of_products(rule))
        self.bytes_of_rows = rule.input == rule.weight == _INT8
        self.prepared: dict[Hashable, Prepared | None] = {}

    def linear(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion
    ) -> Tensor | None:
        """Return F.linear(input, weight, bias=None) in a region, as a `Quick`."""
        if kwargs or not 2 <= len(args) <= 3:
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        return self.contract(None, linear_form, x, weight, bias, region.weights)

    def contract(
        self,
        key: Hashable,
        form_of: FormOf,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: KeptCasts | None,
        scales: SiteScales | None = None,
    ) -> Tensor | None:
        """Return the contraction of x and weight, plus bias; None, with nothing done, for what the definition runs.

        `key` tells the forms of these shapes apart, which `form_of` makes of the shapes; None: a linear layer. `kept`:
        the region's casts. `scales`: those of casts under delayed scales.
        """
        if chosen() not in WAYS or not is_quiet():
            return None
        operands = (x, weight) if bias is None else (x, weight, bias)
        memory = cpu.addresses(operands)
        if memory is None or (self.is_torchs and self._is_left_to_torch(key, x, weight)):
            return None
        is_recorded = torch.is_grad_enabled() and any(map(_requires_grad, operands))
        # by the op that made x
        is_saved = is_recorded and key is not None and hasattr(type(x.grad_fn), "_saved_result")
        about = x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype
        of_bias = None if bias is None else (bias.shape, bias.dtype, bias.is_contiguous())
        whole = key, is_recorded, is_saved, *about, of_bias
        prepared: Prepared | None = self.prepared.get(whole, UNKNOWN)
        if prepared is UNKNOWN:
            prepared = self._learnt(whole, form_of, bias)
        if prepared is None:
            return None
        given = [x, weight, bias, None, None, None, None, None], [*memory, 0, 0, 0, 0, 0, 0][:8], kept
        entries = self._entries(given[1], scales) if self.is_delayed else ()  # some live as long as this name
        if entries is None:
            return None
        try:
            if not is_recorded:
                return prepared.run(given, False, False)
            rounds_x, rounds_weight = prepared.rounds
            # where the gradients of gradients go of operands that are rounded
            ends = end_of(x) if rounds_x else None, end_of(weight) if rounds_weight else None
            return _apply(x, weight, bias, prepared, given, ends, scales)  # type: ignore[no-any-return]
        except NotFinite:
            return None

    @staticmethod
    def _is_left_to_torch(key: Hashable, x: Tensor, weight: Tensor) -> bool:
        """Whether torch's own 16-bit kernel runs a call: not small linear layers, nor where one is forced."""
        return chosen() is None and not (key is None and is_small(x.numel(), weight.numel()))

    def _entries(self, memory: list[int], scales: SiteScales | None) -> Sequence[Tensor | None] | None:
        """Return the entries of delayed scales, whose addresses are added to others; None if one has no scale yet."""
        entries = None if scales is None else scales.entries((self.rule.input, self.rule.weight))
        memory.extend(0 if one is None else one.data_ptr() for one in entries or ())
        return entries

    def _learnt(self, whole: tuple[Any, ...], form_of: FormOf, bias: Tensor | None) -> Prepared | None:
        """Return what is known of a call from now on."""
        _, is_recorded, is_saved, *about, _ = whole
        shape, weight_shape = tuple(about[0]), tuple(about[3])
        in_bytes = self.sums_bytes or (self.bytes_of_rows and not is_recorded and _has_rows(shape))
        with real_tensors():
            found = prepare(self.rule, form_of(shape, weight_shape), tuple(about), bias, in_bytes, is_saved)
        if len(self.prepared) >= _MOST:
            self.prepared.clear()
        self.prepared[whole] = found
        return found


def _has_rows(shape: tuple[int, ...]) -> bool:
    """Whether x has rows enough for a product of bytes where a rule sums in fp32 and no gradient is recorded."""
    return len(shape) > 0 and math.prod(shape[:-1]) >= LEAST_ROWS


def linear_form(first: tuple[int, ...], second: tuple[int, ...]) -> Linear | None:
    """Return the form of a linear layer; None where torch raises its own error."""
    return Linear(first, second) if first and 1 <= len(second) <= 2 and first[-1] == second[-1] else None


@remembered_by_identity
def direct(rule: Rule) -> Direct | None:
    """Return how contractions run straight under a rule; None for rules whose casts or sums no program has."""
    sums = accumulation(rule)
    if rule.is_empty or rule.saved is not None or not (sums is None or sums.format == "fp32"):
        return None
    if not is_here() or (rule.is_delayed and rule.has_products):
        return None
    if not all(rounds(one) and not clips(one) and own_dtype(one) is not torch.float64 for one in rule.casts):
        return None
    if rule.output is not None and isinstance(rule.output.format, ScaledFormat):
        return None
    return Direct(rule)


def dtypes_of_products(rule: Rule) -> set[torch.dtype]:
    """Return the 16-bit dtypes to which a rule rounds both operands and the result of one of the three products."""
    if not rule.has_products:
        return {one} if (one := one_dtype(rule)) is not None else set()
    casts, found = RoleCasts(rule), set()
    products = [(rule.input, rule.weight)]
    for target, other in ((FIRST, rule.weight), (SECOND, rule.input)):
        own = casts.of_product(target)
        products.append((own.other or other, own.grad or rule.grad or rule.output))
    for pair in products:
        dtypes = {None if one is None else native_dtype(one) for one in (*pair, rule.output)}
        found |= dtypes if len(dtypes) == 1 else set()
    return {one for one in found if one in (torch.float16, torch.bfloat16)}


def one_dtype(rule: Rule) -> torch.dtype | None:
    """Return the one 16-bit dtype to which a rule rounds a product; None for other rules."""
    if rule.has_products or rule.saved is not None:
        return None
    casts = [rule.input, rule.weight, rule.output, rule.output if rule.grad is None else rule.grad]
    dtypes = {None if one is None else native_dtype(one) for one in casts}
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    one = dtypes.pop() if len(dtypes) == 1 else None
    return one if one in (torch.float16, torch.bfloat16) and sums_in_fp32 else None


class _Direct(torch.autograd.Function):
    """A contraction; saves the values that the gradients asked for need.

    `ends`: where the gradients of gradients go of operands that are rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        prepared: Prepared,
        given: Given,
        ends: Any,
        scales: Any,
    ) -> Tensor:
        first, second, *_ = ctx.needs_input_grad
        out, tensors = prepared.run(given, second, first), given[0]
        rounds_x, rounds_weight = prepared.rounds
        values: Found = [None, None]
        if second:
            values[0] = tensors[VALUE] if rounds_x else x
        if first:
            values[1] = tensors[FACTOR] if rounds_weight else weight
        if prepared.has_scales:
            values += [tensors[VALUE_SCALES] if second else None, tensors[FACTOR_SCALES] if first else None]
        ctx.save_for_backward(*values)
        ends = ends[0] if first else None, ends[1] if second else None  # an operand without gradient is not kept
        ctx.about = prepared, None if bias is None else bias.dtype, ends, scales
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *shielded(_gradients, gradient, ctx), None, None, None, None


_apply = applied_at_once(_Direct)


def _gradients(gradient: Tensor, ctx: Any) -> Sequence[Tensor | None]:
    (prepared, bias_dtype, ends, scales), needs, values = ctx.about, ctx.needs_input_grad[:3], ctx.saved_tensors
    rule: Rule = prepared.rule
    if not torch.is_grad_enabled() and chosen() in WAYS and is_quiet():
        entries = [None] if scales is None else scales.entries([rule.grad], ["grad"])
        found = None if entries is None else prepared.gradients(gradient, values, needs, bias_dtype, entries[0])
        if found is not None:
            return found  # type: ignore[no-any-return]
    casts = RoleCasts(rule, accumulation(rule), scales=scales)
    if prepared.x.repeats and (x := values[0]) is not None:
        values, ends = (carried(x.detach(), rule.input, axis=prepared.x.axis), values[1]), (end_of(x), ends[1])
    return gradients(prepared.form, casts, needs, bias_dtype, gradient, values, ends)
