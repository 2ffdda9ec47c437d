"""Functions whose results are written at sites, and the tensors they save for backward: int16 mantissas and masks.

A function between the contractions reads tensors of the format, computes in fp32, and its result is written once.
torch's own graph would save fp32 tensors: the inputs, or the result before rounding. Here the inputs are saved as
mantissas, in the payloads that were made when they were written and that other ops share, and backward computes from
the same values; a result that it needs is computed again. Dropout saves one byte per element, ReLU the mantissas of its
result, which the next contraction reads as well, and a pooling the indices of its maxima in the smallest dtype.

Double backward runs torch's own functions on the same values, as part of the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import private, real_tensors
from lowp.exponents import SiteWriter
from lowp.kernels.choose.dispatch import answers_at_once
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.cpu_int16 import memory_of
from lowp.kernels.int16.mantissas import values
from lowp.nested import tensors_of
from lowp.ops.call import Call
from lowp.ops.casting import end
from lowp.ops.fp32 import Fp32Function, Tensors
from lowp.ops.generic import changed, is_out_of_place
from lowp.ops.int16.nodes import OUTPUT_GRADIENT, OUTPUT_ROLE, gradient_roles, written_gradient
from lowp.ops.observing import role_of
from lowp.ops.shields import shielded

with real_tensors():
    _EMPTY = torch.empty(0, dtype=torch.float32, device="cpu")  # in the place of a tensor; `changed` passes over fp64

# -- functions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Again(Fp32Function):
    """Any call, as a function of the tensors among its arguments; empty tensors stand in for them in between.

    `derivative`: torch's function of the gradient and its one tensor, if there is one: nothing is computed again.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    derivative: Callable[..., Tensor] | None

    def held(self) -> list[Tensor]:
        return [one for one in tensors_of((self.args, self.kwargs)) if one.numel()]

    def plain(self, *tensors: Any) -> Tensor:
        given = iter(tensors)

        def fill(_: Tensor) -> Any:
            return next(given)

        return cast(Tensor, self.function(*changed(self.args, fill), **changed(self.kwargs, fill)))

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        if self.derivative is None:
            return super().backward(gradient, small, *tensors, wanted=wanted)
        settings = {name: value for name, value in self.kwargs.items() if name != "input"}
        return [self.derivative(gradient, tensors[0], **settings)]


_nll = torch.ops.aten.nll_loss_forward.default
_nll_derivative = torch.ops.aten.nll_loss_backward.default
_log_softmax_derivative = cast(Any, private("torch.ops.aten._log_softmax_backward_data")).default
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # as torch's operations number them
_DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda gradient, x, approximate="none": torch.ops.aten.gelu_backward(gradient, x, approximate=approximate),
    "silu": lambda gradient, x, inplace=False: torch.ops.aten.silu_backward(gradient, x),
}


@dataclass(frozen=True, eq=False)
class _CrossEntropy(_Again):
    """Cross entropy of logits [n, classes] and class indices [n]: the operations of torch's own function and graph."""

    target: Tensor
    reduction: int
    ignored: int

    def forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        logarithms = torch.log_softmax(tensors[0], 1)
        result, weight = _nll(logarithms, self.target, None, self.reduction, self.ignored)
        return result, (weight,)

    def held(self) -> list[Tensor]:
        return [self.target]

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        logarithms = torch.log_softmax(tensors[0], 1)
        settings = self.target, None, self.reduction, self.ignored, small[0]
        return [_log_softmax_derivative(_nll_derivative(gradient, logarithms, *settings), logarithms, 1, torch.float32)]


class _Product(_Again):
    """A product of two tensors; the gradient of each reads only the other."""

    def reads(self, wanted: Sequence[bool]) -> list[bool]:
        return [wanted[1], wanted[0]]

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        x, y = tensors
        return None if y is None else gradient * y, None if x is None else gradient * x

    differentiable = backward


@dataclass(frozen=True)
class _Dropout(Fp32Function):
    """Dropout: elements are zero with probability p, the others divided by 1 - p (Srivastava et al. 2014)."""

    p: float

    def plain(self, *tensors: Any) -> Tensor:
        return torch.dropout(tensors[0], self.p, True)

    def forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = tensors[0]
        mask = torch.empty_like(x).bernoulli_(1 - self.p)  # draws the same numbers as torch's own function
        return x * (mask / (1 - self.p)), (mask.bool(),)

    def reads(self, wanted: Sequence[bool]) -> list[bool]:
        return [False]

    def backward(self, gradient: Tensor, small: Tensors, *tensors: Any, wanted: Sequence[bool]) -> Tensors:
        return [gradient * (cast(Tensor, small[0]).to(gradient.dtype) / (1 - self.p))]

    differentiable = backward


def as_function(call: Call) -> tuple[Fp32Function, list[Tensor]] | None:
    """Return a call as a function of its tensors that saves mantissas, or a mask; None if it saves nothing."""
    if call.func is F.cross_entropy and (settings := _of_indices(call)) is not None:
        x, target = call.args
        return _CrossEntropy(call.func, (_EMPTY, target), call.kwargs, None, *settings), [x]
    if (found := _followed(call)) is None or call.op == "dropout":
        return None if found is None else dropout_function(call)
    tensors, args, kwargs = found
    if call.op in ("mul", "div") and len(tensors) < 2:  # by a number: torch saves nothing
        return None
    kind = _Product if call.op == "mul" else _Again
    return kind(call.func, args, kwargs, _DERIVATIVES.get(call.op)), tensors


def _of_indices(call: Call) -> tuple[Tensor, int, int] | None:
    """Return target, reduction and ignored index of a call of F.cross_entropy [n, classes] by class indices [n].

    None with weights, smoothed labels, the deprecated arguments, and for arguments that torch may refuse.
    """
    if len(call.args) != 2:
        return None
    (x, target), given = call.args, call.kwargs
    for name in ("weight", "size_average", "reduce", "label_smoothing"):
        if (value := given.get(name)) is not None and not (name == "label_smoothing" and value == 0):
            return None
    if type(x) is not Tensor or type(target) is not Tensor or target.dtype is not torch.int64:
        return None
    if x.dtype is not torch.float32 or not (x.requires_grad and torch.is_grad_enabled()):
        return None
    if (
        x.dim() != 2
        or target.dim() != 1
        or not answers_at_once(x)
        or target.device != x.device
        or len(x) != len(target)
        or x.numel() == 0
    ):
        return None
    reduction = _REDUCTIONS.get(given.get("reduction", "mean"))
    return None if reduction is None else (target, reduction, given.get("ignore_index", -100))


def _followed(call: Call) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]] | None:
    """Return the tensors of a call, and its arguments without them; None if nothing is to be saved or can be."""
    tensors: list[Tensor] = []

    def collect(x: Tensor) -> Tensor:
        tensors.append(x)
        return _EMPTY

    args, kwargs = changed(call.args, collect), changed(call.kwargs, collect)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors) or not is_out_of_place(call):
        return None
    if not all(answers_at_once(x) and x.dtype is torch.float32 for x in tensors):
        return None
    return tensors, args, kwargs


def dropout_function(call: Call) -> tuple[Fp32Function, list[Tensor]] | None:
    """Return dropout as a function that saves its mask; None in place, and if all or no elements are dropped."""
    given = dict(zip(("input", "p", "training", "inplace"), call.args, strict=False))
    given |= {"training" if name == "train" else name: value for name, value in call.kwargs.items()}
    x, p = given.get("input"), given.get("p", 0.5)
    if not isinstance(x, Tensor) or not given.get("training", True) or given.get("inplace") or x.numel() == 0:
        return None
    return (_Dropout(p), [x]) if isinstance(p, float) and 0 < p < 1 else None


# -- saved tensors ------------------------------------------------------------------------------------------------


def _saved(x: Tensor | None, to: Cast) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return x as it is saved; of mantissas also their exponent, and an edge to the graph of x.

    Parameters and data, which the caller holds, are saved unchanged. Exponents are saved beside the mantissas because a
    checkpoint's recomputation may write under other exponents.
    """
    if x is None or (x.is_leaf and payloads.hint(x, to.format) is None):
        return x, None, None
    found = payloads.exact(x, to)
    if found is None:
        return x, None, None
    return found.payload, found.exponent, end(x) if x.requires_grad else None


def _again(saved: Tensor | None, exponent: Tensor | None, edge: Tensor | None) -> Tensor | None:
    """Return a saved tensor, as part of the graph if an edge is given."""
    if saved is None or exponent is None:
        return saved
    result = values(saved, exponent)
    return result if edge is None else result + edge


# -- the node of the graph ----------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """A function, the writer and roles of its result and gradients, and its saved tensors."""

    fused: Fp32Function
    writer: SiteWriter
    out: SiteWriter
    roles: list[str]
    shapes: list[torch.Size | None]
    edges: list[Tensor | None]


def computed_and_rounded(fused: Fp32Function, call: Call, tensors: Tensors) -> Tensor:
    """Return the result of a function of fp32 tensors, written by the call's writer; part of the graph."""
    assert call.writer is not None and call.rule.output is not None
    if call.watch is not None:
        for x in tensors:
            if x is not None:
                call.watch(x, role_of(x), None)
    gradient_role, follows = gradient_roles(), torch.is_grad_enabled()
    plan = _Plan(fused, call.writer, call.writer.part(), [], [], [])
    wanted, exponents, saved = list[bool](), list[Tensor | None](), list[Tensor | None]()
    for x in tensors:
        plan.roles.append("" if x is None else gradient_role(x))
        plan.shapes.append(None if x is None else x.shape)
        wanted.append(follows and x is not None and x.requires_grad)
    for x, is_read in zip(tensors, fused.reads(wanted), strict=True):
        one, exponent, edge_of = _saved(x, call.rule.output) if is_read and any(wanted) else (None, None, None)
        saved.append(one)
        exponents.append(exponent)
        plan.edges.append(edge_of)
    return cast(Tensor, _Computed.apply(plan, [*saved, *exponents], *tensors))  # type: ignore[no-untyped-call]


class _Computed(torch.autograd.Function):
    """A function in fp32 of tensors of the format; its result and each of its gradients are written once."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, saved: list[Tensor | None], *tensors: Tensor | None) -> Tensor:
        result, small = plan.fused.forward(*tensors)
        ctx.plan = plan
        ctx.save_for_backward(*saved, *small, *plan.fused.held())
        # by a runner, which is shielded
        return plan.out.write(result, OUTPUT_ROLE, in_place=_is_alone(result, [*tensors, *small])).values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *shielded(_gradients_of_inputs, gradient, ctx)


def _gradients_of_inputs(gradient: Tensor, ctx: Any) -> list[Tensor | None]:
    plan: _Plan = ctx.plan
    gradient, _ = written_gradient(gradient, plan.out, OUTPUT_GRADIENT, unless_exact=True)
    graph, wanted, count = torch.is_grad_enabled(), list(ctx.needs_input_grad[2:]), len(plan.edges)
    saved = ctx.saved_tensors  # once: a checkpoint computes them at the first access
    edges = plan.edges if graph else [None] * count
    tensors = list(map(_again, saved[:count], saved[count : 2 * count], edges))
    compute = plan.fused.differentiable if graph else plan.fused.backward
    found = compute(gradient, saved[2 * count :], *tensors, wanted=wanted)
    read = [gradient, *saved, *tensors]
    leaving = list[Tensor | None]()
    for index, (one, want) in enumerate(zip(found, wanted, strict=True)):
        others = [*read, *found[:index], *found[index + 1 :]]
        leaving.append(_leaving(one, plan, index, others) if want and one is not None else None)
    return leaving


LEAST_IN_PLACE = 1 << 10  # elements of a tensor for whose memory it is worth while to look at the others


def _leaving(gradient: Tensor, plan: _Plan, index: int, others: Tensors) -> Tensor:
    """Return a gradient, reduced to the shape of a tensor that may have been broadcast, and written.

    `others`: tensors with which the gradient may share its memory.
    """
    shape = plan.shapes[index]
    assert shape is not None
    gradient = gradient if gradient.shape == shape else gradient.sum_to_size(shape)
    in_place = _is_alone(gradient, others)
    return written_gradient(gradient, plan.writer, plan.roles[index], unless_exact=True, in_place=in_place)[0]


def _is_alone(x: Tensor, others: Tensors) -> bool:
    """Whether x, contiguous on a CPU, is its whole storage and shares it with none of the other tensors.

    False of small tensors, which are not worth the question.
    """
    if x.numel() < LEAST_IN_PLACE or x._base is not None or memory_of(x) is None:
        return False
    memory = x.untyped_storage()
    if memory.nbytes() != x.numel() * x.element_size():
        return False
    place = memory.data_ptr()
    for one in others:
        if one is not None and one.untyped_storage().data_ptr() == place:
            return False
    return True
