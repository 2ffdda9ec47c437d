"""Runners of ops that are not products: wide, promote, pointwise, and substitutes for special runners.

A rule's casts apply to floating-point tensors of up to 32 bits, also within lists and tuples; fp64, integers and
complex numbers stay unchanged. In-place and out= forms compute out of place and copy the result back, so that a tensor
keeps its dtype.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.compat import remembered, with_tangents
from lowp.errors import Misuse
from lowp.nested import rebuilt, tensors_of
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import is_castable, is_irregular, native_dtype
from lowp.ops.shields import shield
from lowp.ops.signature import can_hold, into_out, plain, without_out
from lowp.policy import Rule

_Change = Callable[[Tensor], Tensor]
_UP_TO_32 = (torch.float32, torch.float16, torch.bfloat16)
_SUMS = ("add", "sub", "__add__", "__sub__")  # functions whose derivative needs no operand


def wide(call: Call) -> Any:
    """Cast the inputs by the rule, run the op, cast the result and the incoming gradient by the rule: any other op."""
    return _run(call, call.casts.read)


def quick_wide(rule: Rule) -> Callable[..., Any] | None:
    """Return the fast path of an op of one tensor under a rule that only widens it to fp32; None for other rules.

    The fast path returns None for a call with more than one tensor, in place or in a list; see `Row.quick`.
    """
    if rule.input is None or native_dtype(rule.input) is not torch.float32 or not (rule.output is rule.grad is None):
        return None

    writes: dict[Callable[..., Any], bool] = {}  # `is_in_place`

    def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Any:
        if (is_writing := writes.get(function)) is None:
            is_writing = writes[function] = is_in_place(function)
        if is_writing or not args:
            return None
        x, *others = args
        if type(x) is not Tensor or x.dtype not in _UP_TO_32 or x.layout is not torch.strided or x.is_nested:
            return None  # no plain tensor in one strided block to which rules apply
        if not others and not kwargs:
            return function(x.float())
        if any(map(_may_be_cast, (*others, *kwargs.values()))):
            return None
        return function(x.float(), *others, **kwargs)

    return run


def _may_be_cast(value: Any) -> bool:
    """Whether an argument is a tensor to which rules may apply, or may hold one."""
    if isinstance(value, Tensor):
        return type(value) is not Tensor or value.is_floating_point() or value.is_complex()
    return isinstance(value, (list, tuple, dict)) and type(value) is not torch.Size


def promote(call: Call) -> Any:
    """Convert the floating-point inputs to the widest dtype among them; a rule may then cast them and the result."""
    dtypes = {x.dtype for x in tensors_of((call.args, call.kwargs)) if is_castable(x)}
    widest = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    if len(dtypes) < 2 and call.rule.is_empty:
        return call.func(*call.args, **call.kwargs)
    read = call.casts.read
    return _run(call, lambda x: read(x.to(widest)))


def quick_promote(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> Any:
    """Run an op whose tensors have one dtype, so that nothing is promoted; None for other calls. See `Row.quick`."""
    dtype = None
    for one in args:
        if isinstance(one, Tensor):
            if dtype is not None and one.dtype is not dtype:
                return None
            dtype = one.dtype
        elif isinstance(one, (list, tuple, dict)):
            return None
    return None if kwargs else function(*args)


def inside(call: Call) -> Any:
    """Read by the rule's `input`, compute in fp32, write by its `output`: norms and softmax without a runner."""
    read = call.casts.read
    return _run(call, lambda x: _widened(read(x)))


def lowered(call: Call) -> Any:
    """Cast operands by their roles, compute in fp32, cast the result and the gradient: for products by fused functions.

    Parameters have the role `weight`, all other floating-point tensors the role `input`.
    """
    return _run(call, _by_role(call))


def _by_role(call: Call) -> _Change:
    casts = call.casts

    def change(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            return _widened(casts.cast(x, "input"))
        casts.tell(x, "weight")
        return _widened(x if call.rule.weight is None else call.weight_cast(x, call.rule.weight))

    return change


def irregular(call: Call) -> Any:
    """Run a product of sparse or nested tensors in fp32, with rounded operands and a rounded result.

    A bias is added unrounded. The gradients are those that torch computes in fp32 from the rounded operands. Operands
    have no sites: each is rounded under the scale of its own maximum.
    """
    rule = call.rule.current
    if rule.output is not None and call.writer is not None:  # at no site, under the exponent of its own maximum
        rule = replace(rule, output=Cast(rule.output.format, rule.output.rounding))
    args, bias = _with_own_bias(call)
    alone = call.inner(call.func, args, call.kwargs, call.op, rule)
    cast_by_role = _by_role(alone)
    return _run(alone, lambda x: _widened(x) if x is bias else cast_by_role(x))


def _with_own_bias(call: Call) -> tuple[tuple[Any, ...], Tensor | None]:
    """Return the arguments with an alias of the tensor that a product adds to its sum, and the alias, if any."""
    index = 2 if call.op == "linear" else 0 if call.op.startswith(("add", "badd")) else len(call.args)
    if index >= len(call.args) or not isinstance(call.args[index], Tensor):
        return call.args, None
    bias = call.args[index]
    alias = bias if is_irregular(bias) or _out_of_place(call.func) else bias.view_as(bias)
    return (*call.args[:index], alias, *call.args[index + 1 :]), alias


def has_irregular(value: Any) -> bool:
    """Whether the arguments contain a sparse, nested or MKLDNN tensor."""
    return not torch.compiler.is_compiling() and _has_irregular(value)


def _has_irregular(value: Any) -> bool:
    for one in value.values() if isinstance(value, dict) else value:  # every op asks: without lists and generators
        if isinstance(one, Tensor):
            if one.layout is not torch.strided or one.is_nested:
                return True
        elif isinstance(one, (list, tuple, dict)) and one and _has_irregular(one):
            return True
    return False


def refused(call: Call) -> Any:
    """Refuse binary_cross_entropy unless a rule names it: its probabilities are rounded to 0 and 1.

    That rule must also name the sigmoid before it, or the probabilities are rounded anyway. Raises Misuse, a
    RuntimeError, as torch.autocast does on CUDA.
    """
    if call.op in call.rule.ops:
        return wide(call)
    raise Misuse(
        f"{call.op} inside a low-precision region is unsafe: a sigmoid rounded to 16 bits becomes 0 or 1. Use "
        "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, which take the logits; or "
        f"compute the sigmoid in fp32 as well, by a rule for both, Rule.of('sigmoid', {call.op!r}, input='fp32'), or "
        "outside of the region from the logits in fp32"
    )


def linear_cross_entropy(call: Call) -> Any:
    """F.linear_cross_entropy: the linear layer under the rule, the loss in fp32."""
    from lowp.ops import contraction

    kwargs = dict(call.kwargs)
    names = ("input", "linear_weight", "target")
    values = {**dict(zip(names, call.args, strict=False)), **kwargs}
    operands = (values.pop("input"), values.pop("linear_weight"), values.pop("linear_bias", None))
    target = values.pop("target")
    values.pop("options", None)
    if values.get("ignore_index", 0) is None:
        values.pop("ignore_index")
    linear = call.inner(F.linear, operands)
    return F.cross_entropy(contraction.linear(linear).float(), target, **values)


# -- how they run -------------------------------------------------------------------------------------------------


def _run(call: Call, change: _Change) -> Any:
    """Run the function on changed tensors, and cast the result by the rule's `output` and `grad`."""
    rule = call.rule
    if rule.output is None and rule.grad is None and call.watch is None:
        return run_changed(call, change)
    casts = call.casts
    return run_changed(call, change, lambda y: finished(y, casts))


def run_changed(call: Call, change: _Change, finish: _Change | None = None) -> Any:
    """Run the function on changed tensors, also in-place and out= forms, and apply `finish` to the result."""
    function, target = call.func, None
    if (outside := _out_of_place(call.func)) is not None and call.args:
        function, target = outside, call.args[0]
    inner, out = without_out(call)
    args = changed(inner.args, change)
    kwargs = changed(inner.kwargs, change)
    if (
        target is not None
        and torch.is_grad_enabled()
        and function.__name__ not in _SUMS
        and args[0].dtype is target.dtype
    ):
        args = (args[0].clone(), *args[1:])  # its derivative may need the numbers that are overwritten here
    result = function(*args, **kwargs)
    if finish is not None:
        result = changed(result, finish)
    if target is not None:
        # torch refuses to write floats into integers, or complex numbers into real ones, which `copy_` would cut
        return target.copy_(result) if can_hold(target.dtype, result.dtype) else plain(call)
    if "out" not in call.kwargs or out is None:
        return result
    if isinstance(out, (tuple, list)):
        return type(result)(into_out(call, one, to) for one, to in zip(result, out, strict=True))
    return into_out(call, result, out)


def is_out_of_place(call: Call) -> bool:
    """Whether a call returns a new tensor."""
    return "out" not in call.kwargs and _out_of_place(call.func) is None


def not_in_place(call: Call) -> tuple[Call, Tensor | None]:
    """Return a call with ``inplace=True`` as one without, on a copy of its tensor, and the tensor; or None."""
    index = _index_of_inplace(call.func)
    is_given = index is not None and index < len(call.args)
    if index is None or not call.args or not (call.args[index] if is_given else call.kwargs.get("inplace")):
        return call, None
    x, *rest = call.args
    kwargs = {name: value for name, value in call.kwargs.items() if name != "inplace"}
    args = (x.clone(), *rest[: index - 1], *([False] if is_given else []), *rest[index:])
    return call.given(args, kwargs), x


@remembered
def _index_of_inplace(function: Callable[..., Any]) -> int | None:
    """Return the index of the argument `inplace` of a torch.nn.functional function, or None."""
    if getattr(function, "__module__", "") != F.__name__:
        return None
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def finished(y: Tensor, casts: RoleCasts) -> Tensor:
    """Return the result of an op, rounded as it is written, with the incoming gradient rounded too."""
    y = casts.cast(y, "output")
    if casts.watch is None and casts.rule.grad is not None and native_dtype(casts.rule.grad) is y.dtype:
        return y  # the incoming gradient already has this dtype
    if casts.rule.grad is not None and y.requires_grad and not is_irregular(y):
        return cast(Tensor, _gradient_cast(y, casts))  # in its own dtype
    if casts.watch is not None:
        casts.watch.gradient(y)
    return y


class _GradientCast(torch.autograd.Function):
    """The identity in forward; rounds the gradient in backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, casts: RoleCasts) -> Tensor:
        return x.clone()  # not a view: torch forbids writing to this one in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.casts = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with shield():
            return ctx.casts.cast(gradient, "grad").to(gradient.dtype), None

    @staticmethod
    def tangent(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()


_gradient_cast = with_tangents(_GradientCast)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


_NUMBERS = (int, float, bool, str, type(None))  # what holds no tensor


def changed(value: Any, change: _Change) -> Any:
    """Change the castable tensors in arguments or results, at any nesting."""
    if isinstance(value, Tensor):
        return change(value) if is_castable(value) else value
    if isinstance(value, dict):
        return {key: one if type(one) in _NUMBERS else changed(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        items = [one if type(one) in _NUMBERS else changed(one, change) for one in value]
        for new, old in zip(items, value, strict=True):  # a generator takes longer
            if new is not old:
                return items if isinstance(value, list) else rebuilt(value, items)
    return value


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function writes its first argument."""
    return _out_of_place(function) is not None


@remembered
def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the out-of-place counterpart of an in-place function, or None for other functions."""
    name = str(getattr(function, "__name__", ""))
    if name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"):
        return getattr(Tensor, f"__{name[3:]}")  # type: ignore[no-any-return]
    if not name.endswith("_") or name.endswith("__"):
        return None
    for namespace in (torch, Tensor, F):
        if (found := getattr(namespace, name[:-1], None)) is not None:
            return found  # type: ignore[no-any-return]
    return None


def sixteen_bit(to: Cast | None) -> bool:
    """Whether a cast writes a tensor of a 16-bit dtype."""
    return to is not None and native_dtype(to) in (torch.float16, torch.bfloat16)
