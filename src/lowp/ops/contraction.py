"""Runners of the matrix products: linear, matmul and its relatives, einsum, and chains of them.

A runner takes a `Call`, reads it by the public signature of its function and runs it under the rule. The first operand
has the role `input`, the second `weight`; a parameter is the weight also if it comes first (``weight @ x``). Tensors in
fp64, integers and complex numbers are passed to the function itself, and so is a call that the function would refuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.compat import remembered_by_identity
from lowp.kernels.tracing import functorch_is_active, unwrapped
from lowp.ops.call import Call, KeptCasts, Quick, QuickRegion, sums_bytes
from lowp.ops.coded import in_fp8, is_fp8
from lowp.ops.direct import direct
from lowp.ops.equations import Equation, parse_einsum, parse_tensordot
from lowp.ops.generic import has_irregular, irregular
from lowp.ops.int16 import layer
from lowp.ops.observing import role_of
from lowp.ops.products import contract, product
from lowp.ops.signature import Empty, Mismatch, bound, check, into_out, is_mixed, plain, require, without_out
from lowp.ops.trilinear import OUTPUT, Einsum, Form, Linear
from lowp.policy import Rule

Runner = Callable[[Call], Any]
Shape = tuple[int, ...]


def runner(run: Callable[[Call], Any]) -> Runner:
    """Decorate a runner: a call that does not fit its signature goes to the function itself; `out=` is supported."""

    @wraps(run)
    def outer(call: Call) -> Any:
        try:
            if "out" not in call.kwargs:
                return run(call)
            inner, out = without_out(call)
            result = run(inner)
        except Mismatch as reason:
            is_irregular = isinstance(reason, Empty) or has_irregular((call.args, call.kwargs)) or is_mixed(call)
            return irregular(call) if is_irregular else plain(call)
        return into_out(call, result, out)

    return outer


def multiply(form: Form, call: Call, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a contraction: straight from its operands where nothing else sees the call, or by its definition."""
    if call.scales is not None:
        call = replace(call, scales=call.scales.part())
    is_alone = call.watch is None and not functorch_is_active()
    if is_alone and (known := layer.layers(call.rule)) is not None:
        has_order = call.roles is None or call.rule.input == call.rule.weight
        result = known.contract(form, call.op, (first, second, bias), call.writer) if has_order else None
        if result is not None:
            return result
    if is_alone and call.writer is None:
        first, second, bias = unwrapped(first), unwrapped(second), None if bias is None else unwrapped(bias)
        rule: Rule | None = call.rule
        result = None
        if call.roles is not None:
            rule = None if torch.compiler.is_compiling() else _in_order(call.rule, call.roles)
        elif is_fp8(call.rule) and (codes := in_fp8(form, call.rule, first, second, bias)) is not None:
            result = product(codes[0], OUTPUT, call.casts, codes[1], codes[2], bias)
        if result is None and rule is not None and (how := direct(rule)) is not None:
            kept = cast(KeptCasts, call.weight_cast) if hasattr(call.weight_cast, "look") else None
            result = how.contract(form, lambda *shapes: form, first, second, bias, kept, call.scales)
        if result is not None:
            return result
    return contract(form, call, first, second, bias)


@remembered_by_identity
def _orders(rule: Rule) -> dict[tuple[str, str], Rule | None]:
    return {}


def _in_order(rule: Rule, roles: tuple[str, str]) -> Rule | None:
    """Return the rule whose input and weight are operands in these roles; None where more depends on the roles."""
    known = _orders(rule)
    if roles not in known:
        one = replace(rule, input=getattr(rule, roles[0]), weight=getattr(rule, roles[1]))
        known[roles] = None if rule.has_products or rule.is_delayed or sums_bytes(rule) else one
    return known[roles]


@runner
def linear(call: Call) -> Tensor:
    """F.linear(input, weight, bias=None)."""
    x, weight, bias = bound(call, "input", "weight", bias=None)
    check(x, weight, bias)
    require(1 <= weight.dim() <= 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[-1])
    return multiply(Linear(tuple(x.shape), tuple(weight.shape)), call, x, weight, bias)


def _linear_form(op: str, first: Shape, second: Shape, bias: Shape | None, more: tuple[Any, ...]) -> Linear | None:
    """Return the form of F.linear with x[..., k] and w[n, k], not empty, and an optional bias [n]; None for others."""
    fits = len(first) > 1 and len(second) == 2 and first[-1] == second[-1] and 0 not in first + second
    return Linear(tuple(first), tuple(second)) if fits and bias in (None, second[:1]) and not more else None


def quick_linear(rule: Rule) -> Quick | None:
    """Return what runs F.linear under a rule from its arguments alone, see `Row.quick`; None for other rules."""
    if (integers := layer.quick(rule, _linear_form)) is not None:
        return integers
    how = direct(rule)
    return None if how is None else how.linear


def quick_matmul(rule: Rule) -> Quick | None:
    """Return what runs matmul, mm and bmm under a rule from their arguments alone; None for other rules."""
    if (integers := layer.quick(rule, _form_of_name)) is not None:
        return integers
    how = direct(rule)
    if how is None:
        return None

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion) -> Tensor | None:
        if kwargs or len(args) != 2 or type(args[0]) is not Tensor or not isinstance(args[1], Tensor):
            return None  # a parameter that comes first is the weight
        return how.contract(function, _MATRICES.get(function, _no_form), *args, None, region.weights)

    return run


# the functions that take operands of these dimensions alone
_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, int]]] = {
    "mm": (torch.mm, (2, 2)),
    "mv": (torch.mv, (2, 1)),
    "bmm": (torch.bmm, (3, 3)),
    "dot": (torch.dot, (1, 1)),
    "vdot": (torch.vdot, (1, 1)),
}


def _form_of_matrices(function: Callable[..., Tensor], dims: int, first: Shape, second: Shape) -> Einsum | None:
    """Return the form of a product of matrices; None where torch broadcasts, or raises its own error."""
    if min(len(first), len(second)) < 1 or (dims and not len(first) == len(second) == dims):
        return None
    try:
        equation = Equation.of_matmul(first, second)
    except Mismatch:
        return None
    return None if equation.is_squeezed else Einsum(equation.terms, first, second, function)


def _form_of_name(op: str, first: Shape, second: Shape, bias: Shape | None, more: tuple[Any, ...]) -> Einsum | None:
    """Return the form of matmul, mm and bmm of two operands; None of other calls, which are left to a runner."""
    made = None if bias is not None or more else _MATRICES.get(getattr(torch, op, _no_form))
    return None if made is None else made(first, second)


def _no_form(first: Shape, second: Shape) -> None:
    return None


# functions of two operands, the dimensions that both must have (0: any), and how the product is called
_MATRICES: dict[Callable[..., Any], Callable[[Shape, Shape], Einsum | None]] = {
    spelled: partial(_form_of_matrices, function, dims)
    for function, dims, spellings in (
        (torch.matmul, 0, (torch.matmul, Tensor.matmul, Tensor.__matmul__)),
        (torch.mm, 2, (torch.mm, Tensor.mm)),
        (torch.bmm, 3, (torch.bmm, Tensor.bmm)),
    )
    for spelled in spellings
}


@runner
def matmul(call: Call) -> Tensor:
    """torch.matmul, @, mm, mv, bmm, dot and vdot: two operands, shapes by torch's rules."""
    second_name = next((name for name in ("other", "mat2", "vec", "tensor") if name in call.kwargs), "other")
    first, second = bound(call, "self" if "self" in call.kwargs else "input", second_name)
    check(first, second)
    function, dims = _FUNCTIONS.get(call.op, (torch.matmul, None))
    require(dims is None or (first.dim(), second.dim()) == dims)
    result = _matmul(call, first, second, function)
    return first.copy_(result) if function_name(call) == "__imatmul__" else result


def function_name(call: Call) -> str:
    """Return the bare name of a call's function, also for functions of torch.ops.aten."""
    return str(getattr(call.func, "__name__", "")).partition(".")[0]


@runner
def reversed_matmul(call: Call) -> Tensor:
    """Tensor.__rmatmul__(self, other): other @ self."""
    second, first = bound(call, "self", "other")
    return _matmul(call, first, second, torch.matmul)


def _matmul(call: Call, first: Tensor, second: Tensor, function: Callable[..., Tensor]) -> Tensor:
    check(first, second)
    require(first.dim() >= 1 and second.dim() >= 1)
    equation = Equation.of_matmul(tuple(first.shape), tuple(second.shape))
    if equation.is_squeezed:  # one operand is broadcast along a batch dimension of the other
        require(call.op != "bmm")
        function = _Unsqueezed(function, equation.squeezes)
    return _pair(call, equation, *equation.squeezed(first, second), function)


@dataclass(frozen=True)
class _Unsqueezed:
    """A function of two tensors from which dimensions of size 1 were removed."""

    function: Callable[..., Tensor]
    squeezes: tuple[tuple[int, ...], tuple[int, ...]]

    def __call__(self, *operands: Tensor) -> Tensor:
        whole = list(operands)
        for index, dims in enumerate(self.squeezes):
            for dim in dims:
                whole[index] = whole[index].unsqueeze(dim)
        return self.function(*whole)


def _pair(
    call: Call,
    equation: Equation,
    first: Tensor,
    second: Tensor,
    function: Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    scale: float = 1,
    bias_scale: float = 1,
) -> Tensor:
    """Contract two operands by an equation under the call's rule."""
    shape = None if bias is None else tuple(bias.shape)
    form = Einsum(equation.terms, tuple(first.shape), tuple(second.shape), function, scale, bias_scale, shape)
    if call.roles is None and isinstance(first, nn.Parameter):
        call = replace(call, roles=("weight", role_of(second)))
    return multiply(form, call, first, second, bias)


# -- addmm and its relatives: beta * input + alpha * (first @ second) --------------------------------------------

_ADDED: dict[str, tuple[str, str, tuple[str, str, str], Callable[..., Tensor]]] = {
    "addmm": ("mat1", "mat2", ("mk", "kn", "mn"), torch.addmm),
    "addmv": ("mat", "vec", ("mk", "k", "m"), torch.addmv),
    "addr": ("vec1", "vec2", ("m", "n", "mn"), torch.addr),
    "addbmm": ("batch1", "batch2", ("bmk", "bkn", "mn"), torch.addbmm),
    "baddbmm": ("batch1", "batch2", ("bmk", "bkn", "bmn"), torch.baddbmm),
}


@runner
def added(call: Call) -> Tensor:
    """addmm, addmv, addr, addbmm, baddbmm; in place if the function's name ends in an underscore."""
    name = call.op.rstrip("_")
    first_name, second_name, terms, function = _ADDED[name]
    if len(call.args) > 3 or (len(call.args) > 1 and not isinstance(call.args[0], Tensor)):
        raise Mismatch  # torch's older order: beta, input, alpha, first, second
    bias, first, second, beta, alpha = bound(call, "input", first_name, second_name, beta=1, alpha=1)
    check(bias, first, second)
    require(all(x.dim() == len(term) for x, term in zip((first, second), terms, strict=False)))
    sizes = dict(zip(terms[0] + terms[1], (*first.shape, *second.shape), strict=True))
    require((*first.shape, *second.shape) == tuple(sizes[letter] for letter in terms[0] + terms[1]))
    if beta == 0:  # torch then ignores the input, NaN included
        result = _pair(call, Equation(terms), first, second, None, None, alpha)
    else:
        result = _pair(call, Equation(terms), first, second, function, bias, alpha, beta)
    if function_name(call).endswith("_"):
        return cast(Tensor, bias.copy_(result))
    return result


# -- einsum and relatives ---------------------------------------------------------------------------------------


@runner
def einsum(call: Call) -> Tensor:
    """torch.einsum(equation, *operands), also with operands in a list or given with lists of indices.

    More than two operands are contracted in pairs from left to right. Each intermediate result is rounded as an output
    and is an operand of the next product.
    """
    if call.kwargs:
        raise Mismatch
    equation, operands = parse_einsum(call.args)
    check(*operands)
    if len(operands) < 2:
        raise Mismatch
    result = operands[0]
    for index, operand in enumerate(operands[1:], start=1):
        pair = equation.pair(index)
        result = _pair(call, pair, *pair.squeezed(result, operand))
    return result


@runner
def tensordot(call: Call) -> Tensor:
    """torch.tensordot(a, b, dims=2)."""
    first, second, dims = bound(call, "a", "b", dims=2)
    check(first, second)
    equation = parse_tensordot(first, second, dims)
    return _pair(call, equation, *equation.squeezed(first, second))


@runner
def outer(call: Call) -> Tensor:
    """torch.outer and ger (input, vec2)."""
    first, second = bound(call, "input", "vec2")
    check(first, second)
    require(first.dim() == second.dim() == 1)
    return _pair(call, Equation(("m", "n", "mn")), first, second)


@runner
def inner(call: Call) -> Tensor:
    """torch.inner(input, other): the last dimensions are contracted."""
    first, second = bound(call, "input", "other")
    check(first, second)
    require(first.dim() >= 1 and second.dim() >= 1 and first.shape[-1] == second.shape[-1])
    equation = parse_tensordot(first, second, ([first.dim() - 1], [second.dim() - 1]))
    return _pair(call, equation, *equation.squeezed(first, second))


@runner
def vecdot(call: Call) -> Tensor:
    """torch.linalg.vecdot(x, y, dim=-1)."""
    first, second, dim = bound(call, "x", "y", dim=-1)
    check(first, second)
    dim = dim if dim < 0 else dim - max(first.dim(), second.dim())  # counted from the end, as both are broadcast
    require(first.dim() >= -dim and second.dim() >= -dim > 0)
    first, second = first.movedim(dim, -1).unsqueeze(-2), second.movedim(dim, -1).unsqueeze(-1)
    if first.shape[-1] == 1:  # which torch broadcasts, too
        first = first.expand(*first.shape[:-1], second.shape[-2])
    elif second.shape[-2] == 1:
        second = second.expand(*second.shape[:-2], first.shape[-1], 1)
    equation = Equation.of_matmul(tuple(first.shape), tuple(second.shape))
    return _pair(call, equation, *equation.squeezed(first, second)).squeeze(-1).squeeze(-1)


@runner
def bilinear(call: Call) -> Tensor:
    """F.bilinear(input1, input2, weight, bias=None): input1 times weight first, then input2 times the result."""
    first, second, weight, bias = bound(call, "input1", "input2", "weight", bias=None)
    check(first, second, weight, bias)
    require(first.dim() == second.dim() >= 1 and weight.dim() == 3 and first.shape[:-1] == second.shape[:-1])
    require((first.shape[-1], second.shape[-1]) == weight.shape[1:])
    rows, columns = first.reshape(-1, first.shape[-1]), second.reshape(-1, second.shape[-1])
    half = _pair(call, Equation(("bi", "oij", "boj")), rows, weight)
    result = _pair(call, Equation(("bj", "boj", "bo")), columns, half, bias=bias)
    return result.reshape(*first.shape[:-1], weight.shape[0])


@runner
def chain(call: Call) -> Tensor:
    """torch.chain_matmul(*matrices) and torch.linalg.multi_dot(tensors), in the order of fewest multiplications."""
    given = call.args[0] if len(call.args) == 1 and not isinstance(call.args[0], Tensor) else call.args
    if call.kwargs.keys() - {"tensors"} or (call.kwargs and call.args):
        raise Mismatch
    matrices = list(call.kwargs.get("tensors", given))
    check(*matrices)
    if len(matrices) < 2 or any(matrix.dim() != 2 for matrix in matrices[1:-1]):
        raise Mismatch
    left, right = matrices[0].dim() == 1, matrices[-1].dim() == 1
    if left:
        matrices[0] = matrices[0].unsqueeze(0)
    if right:
        matrices[-1] = matrices[-1].unsqueeze(1)
    require(all(matrix.dim() == 2 for matrix in matrices))
    sizes = [matrices[0].shape[0], *(matrix.shape[1] for matrix in matrices)]
    require(all(matrix.shape == tuple(sizes[i : i + 2]) for i, matrix in enumerate(matrices)))
    result = _chained(call, matrices, _cheapest_splits(sizes), 0, len(matrices) - 1)
    result = result.squeeze(0) if left else result
    return result.squeeze(-1) if right else result


def _cheapest_splits(sizes: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return, for each run of matrices (first, last), where to split it (Cormen et al., matrix-chain order)."""
    count = len(sizes) - 1
    cost = {(i, i): 0 for i in range(count)}
    split: dict[tuple[int, int], int] = {}
    for length in range(2, count + 1):
        for first in range(count - length + 1):
            last = first + length - 1
            costs = {
                k: cost[first, k] + cost[k + 1, last] + sizes[first] * sizes[k + 1] * sizes[last + 1]
                for k in range(first, last)
            }
            split[first, last] = min(costs, key=lambda k: costs[k])
            cost[first, last] = costs[split[first, last]]
    return split


def _chained(call: Call, matrices: list[Tensor], split: dict[tuple[int, int], int], first: int, last: int) -> Tensor:
    if first == last:
        return matrices[first]
    middle = split[first, last]
    left = _chained(call, matrices, split, first, middle)
    right = _chained(call, matrices, split, middle + 1, last)
    return _pair(call, Equation(("mk", "kn", "mn")), left, right, torch.mm)
