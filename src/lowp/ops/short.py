"""Fast paths of a linear layer: one 16-bit dtype throughout, or operands in another format and results in fp32.

They compute the same bits as `products.contract` without describing the call or the casts. Everything that depends only
on the rule is decided once, when a region plans the op, and `kernels.products` chooses how the product runs. All other
calls, including higher derivatives, take the general path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import applied_at_once, remembered_by_identity
from lowp.formats import ScaledFormat
from lowp.kernels.dispatch import forced
from lowp.kernels.fp32_products import linear as linear_in_library
from lowp.kernels.functions import quantize_operand
from lowp.kernels.hardware import is_on_host
from lowp.kernels.low_words import FEATURES
from lowp.kernels.products import (
    NARROW,
    gradients_of_product,
    linear_in_fp32,
    linear_sixteen_bits,
    multiplies_int8,
    sixteen_bits_run_in,
)
from lowp.ops.bytes import is_int8, linear_in_bytes
from lowp.ops.call import Call, Quick, QuickRegion, RoleCasts, WeightCast
from lowp.ops.casting import (
    carrier_dtype,
    end_of,
    functorch_is_active,
    is_only_rounding,
    is_plain,
    native_dtype,
    shielded,
)
from lowp.ops.contraction import linear as long_linear
from lowp.ops.eight_bits import is_fp8, linear_in_fp8
from lowp.ops.int16 import linear as integer_linear
from lowp.ops.int16 import written as written_linear
from lowp.ops.products import gradients_of_linear
from lowp.ops.trilinear import SECOND, Linear
from lowp.policy import Rule

__all__ = ["linear", "one_dtype", "quick", "short_linear", "under"]

SMALL = 1024  # elements of a weight that is rounded where it is read, without gradients, instead of being kept
Runner = Callable[[Call], Any]


@remembered_by_identity
def under(rule: Rule) -> Runner | None:
    """Return the runner of F.linear with a fast path under a rule in 16 bits, fp8 or int8; None for other rules."""
    dtype = one_dtype(rule)
    in_bytes = linear_in_fp8 if is_fp8(rule) else linear_in_bytes if is_int8(rule) else None
    if dtype is None and in_bytes is None:
        return None

    def run(call: Call) -> Any:
        if torch.compiler.is_compiling():
            return long_linear(call)
        if in_bytes is not None:
            result = in_bytes(call)
        elif call.kwargs or not _is_usual(call) or functorch_is_active():
            return long_linear(call)
        else:
            runs_in = sixteen_bits_run_in(call.args[0], cast(torch.dtype, dtype))
            result = short_linear(call.rule, runs_in, call.args, call.weight_cast)
        return long_linear(call) if result is None else result

    return run


@remembered_by_identity
def quick(rule: Rule) -> Quick | None:
    """Return what runs F.linear under a rule from its arguments alone, see `Row.quick`; None for other rules.

    Those are of 16 bits throughout, and those that round the operands alone, to nearest; and sums of integers.
    """
    dtype = one_dtype(rule)
    if dtype is None:
        if integer_linear.sums_integers(rule):
            is_written = rule.output is not None
            return written_linear.quick(rule, long_linear) if is_written else integer_linear.quick(rule)
        return _quick_rounded(rule) if _rounds_operands(rule) else None

    casts = cast(Cast, rule.input), cast(Cast, rule.weight), None

    def run(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        if kwargs or (runs_in := sixteen_bits_run_in(args[0], dtype)) is dtype:  # where torch's own dispatcher runs it
            return None
        if len(args) == 3 and not torch.is_grad_enabled() and args[1].numel() <= SMALL and runs_in is torch.float32:
            if (result := linear_in_library(*args, dtype, casts)) is not None:
                return result
        return short_linear(rule, runs_in, args, region.weights.narrowed)

    return run


def linear(call: Call) -> Tensor:
    """F.linear(input, weight, bias=None) as a part of another op, by the fastest path under the call's rule."""
    shortest = None if torch.compiler.is_compiling() else under(call.rule)
    return cast(Tensor, (shortest or long_linear)(call))


def short_linear(rule: Rule, runs_in: torch.dtype, args: tuple[Any, ...], weight_cast: WeightCast) -> Tensor | None:
    """Return F.linear(input, weight, bias) under a rule of 16 bits; None if it must take the general path.

    `runs_in` is the result of `sixteen_bits_run_in` for the input.
    """
    if not _fits(args):
        return None
    x, weight, bias = args if len(args) == 3 else (*args, None)
    to = cast(Cast, rule.weight)
    narrow = NARROW[cast(torch.dtype, native_dtype(to))]
    factor = weight_cast(weight, to) if weight.requires_grad and weight.is_leaf else narrow(weight)
    if torch.is_grad_enabled():
        result: Tensor = _apply_short(narrow(x), factor, bias, rule, runs_in)
        return result
    return linear_sixteen_bits(narrow(x), factor, bias, runs_in)


def _is_usual(call: Call) -> bool:
    """Whether a call has no observers, the operand roles of every linear layer, and no site for its result."""
    return call.writer is None and call.watch is None and call.roles is None


def _fits(args: tuple[Any, ...]) -> bool:
    """Whether these are an input, a weight and optionally a bias, all plain, with shapes that F.linear takes."""
    if len(args) == 3:
        x, weight, bias = args
        if not (is_plain(x, weight) if bias is None else is_plain(x, weight, bias)):
            return False
    elif len(args) == 2 and is_plain(*args):
        x, weight = args
    else:
        return False
    rows, columns = x.shape, weight.shape
    return len(rows) >= 1 and 1 <= len(columns) <= 2 and bool(rows[-1] == columns[-1])


def one_dtype(rule: Rule) -> torch.dtype | None:
    """Return the one 16-bit dtype to which a rule rounds a product; None for other rules."""
    casts = [rule.input, rule.weight, rule.output, rule.output if rule.grad is None else rule.grad]
    dtypes = {None if one is None else native_dtype(one) for one in casts}
    sums_in_fp32 = rule.accumulate is None or rule.accumulate.format == "fp32"
    one = dtypes.pop() if len(dtypes) == 1 else None
    return one if one in (torch.float16, torch.bfloat16) and sums_in_fp32 else None


class _Short(torch.autograd.Function):
    """The product of a rounded input and a rounded weight; saves both, as the general path does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule, runs_in: torch.dtype) -> Tensor:
        first, second, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if second else None, weight if first else None)
        ctx.about = (x.shape, weight.shape), rule, None if bias is None else bias.dtype
        return linear_sixteen_bits(x, weight, bias, runs_in)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_gradients, gradient, ctx)


_apply_short = applied_at_once(_Short)


def _gradients(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    (x, weight), (needs_x, needs_weight, needs_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
    shapes, rule, bias_dtype = ctx.about
    if torch.is_grad_enabled() or functorch_is_active():
        form, casts = Linear(*shapes), RoleCasts(rule, rule.accumulate)
        needs = (needs_x, needs_weight, needs_bias)
        return *gradients_of_linear(form, casts, needs, bias_dtype, gradient, (x, weight)), None, None
    of_x, of_weight, of_bias = gradients_of_product(Linear(*shapes), (x, weight), gradient, needs_bias)
    of_bias = None if of_bias is None else of_bias.to(bias_dtype)
    return of_x, of_weight, of_bias, None, None


# -- operands in other formats, results in fp32 -------------------------------------------------------------------


def _rounds_operands(rule: Rule) -> bool:
    """Whether a rule rounds operands, each by one call of the library that draws nothing, and sums in fp32."""
    if rule.output is not None or not (rule.accumulate is None or rule.accumulate.format == "fp32"):
        return False
    return all(one is not None and is_only_rounding(one) for one in (rule.input, rule.weight, rule.grad))


def _quick_rounded(rule: Rule) -> Quick:
    to_input, to_weight = cast(Cast, rule.input), cast(Cast, rule.weight)
    input_dtype, weight_dtype = carrier_dtype(to_input), carrier_dtype(to_weight)
    casts = to_input, to_weight, None
    are_of_elements, sums_bytes = not any(isinstance(one.format, ScaledFormat) for one in casts[:2]), is_int8(rule)

    def run(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        if kwargs:
            return None
        if are_of_elements and len(args) == 3 and not torch.is_grad_enabled() and args[1].numel() <= SMALL:
            if (result := linear_in_library(*args, torch.float32, casts)) is not None:
                return result
        if not _fits(args):
            return None
        for one in args:  # a generator would be as many calls again
            if one is not None and not (one.dtype is torch.float32 and is_on_host(one)):
                return None
        if forced() == "reference" or args[1].dim() != 2:  # summed in fp64, or by the matrices of the general path
            return None
        x, weight, bias = args if len(args) == 3 else (*args, None)
        if sums_bytes and multiplies_int8(x, weight):
            if not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in args)):
                return None
        value = quantize_operand(x.detach() if x.requires_grad else x, to_input, 0, False, input_dtype)
        if weight.is_leaf and weight.requires_grad:
            factor = region.weights.rounded(weight, to_weight, weight_dtype)
        else:
            factor = quantize_operand(weight.detach(), to_weight, 0, False, weight_dtype)
        if not torch.is_grad_enabled():
            return linear_in_fp32(value, factor, bias, torch.float32)
        return cast(Tensor, _apply_rounded(end_of(x), end_of(weight), bias, value, factor, rule))

    return run


class _Rounded(torch.autograd.Function):
    """The product of operands whose rounded values are given apart from the graph; saves these.

    Gradients go to the operands as they are, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, value: Tensor, factor: Tensor, rule: Rule
    ) -> Tensor:
        first, second, *_ = ctx.needs_input_grad
        ctx.save_for_backward(value if second else None, factor if first else None)
        ctx.edges, ctx.rule = (x if first else None, weight if second else None), rule
        ctx.shapes = x.shape, weight.shape
        return linear_in_fp32(value, factor, bias, torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_rounded_gradients, gradient, ctx)


_apply_rounded = applied_at_once(_Rounded)


def _rounded_gradients(gradient: Tensor, ctx: Any) -> tuple[Tensor | None, ...]:
    values, needs, form = ctx.saved_tensors, ctx.needs_input_grad[:3], Linear(*ctx.shapes)
    rule: Rule = ctx.rule
    to = cast(Cast, rule.grad)
    scope = to.format.scope.kind if isinstance(to.format, ScaledFormat) else "number"
    may_lose = scope == "tensor" and gradient.shape[-1:] >= (FEATURES,)  # of many features some
    is_long = forced() == "reference" or may_lose
    if is_long or torch.is_grad_enabled() or functorch_is_active():
        edges = cast("tuple[Tensor | None, Tensor | None]", ctx.edges)
        casts = RoleCasts(rule, rule.accumulate)
        return *gradients_of_linear(form, casts, needs, torch.float32, gradient, values, edges), None, None, None
    dtype, (x, weight) = carrier_dtype(to), cast("tuple[Tensor | None, Tensor | None]", values)
    if x is None or scope in ("number", "tensor"):
        incoming = quantize_operand(gradient, to, 0, False, dtype)
        return *gradients_of_product(form, (x, weight), incoming, needs[2], torch.float32), None, None, None
    of_x = of_bias = None
    if weight is not None or needs[2]:
        incoming = quantize_operand(gradient, to, 0, False, dtype)
        of_x, _, of_bias = gradients_of_product(form, (None, weight), incoming, needs[2], torch.float32)
    incoming = quantize_operand(gradient, to, 0, False, dtype, form.contracted[SECOND][1])
    of_weight = gradients_of_product(form, (x, None), incoming, False, torch.float32)[1]
    return of_x, of_weight, of_bias, None, None, None
