"""Activations, dropout and max-pooling beside contractions of integers: backward keeps one bit per element, or indices.

A contraction of integers keeps its operands as integers, so that the fp32 result of a ReLU, which torch's graph saves,
would serve only the gradient of the ReLU. That gradient needs one bit per element. The bits are kept packed, eight per
byte; results and gradients have the bits of torch's own functions, which run in all other cases: other dtypes, devices
and subclasses, torch.func, torch.compile and forward-mode derivatives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from lowp.formats import IntFormat, ScaledFormat
from lowp.kernels.choose.dispatch import has_integer_kernels
from lowp.kernels.int16.masks import Mask, nonzero, packed, passed, unpacked
from lowp.ops.call import Call
from lowp.ops.casting import functorch_is_active, shield
from lowp.ops.contraction import function_name
from lowp.ops.int16.pooling import pool
from lowp.ops.int16.saved import Fp32Function, dropout_function
from lowp.ops.observed import told
from lowp.ops.observing import role_of
from lowp.ops.signature import Mismatch, bound, plain, require
from lowp.policy import Policy, Rule


def has_integer_operands(policy: Policy) -> bool:
    """Whether a policy's contractions keep integers for backward: scaled integers as operands, fp32 results."""
    return any(_is_integer(rule) for rule in policy.rules)


def _is_integer(rule: Rule) -> bool:
    format = None if rule.input is None or rule.output is not None else rule.input.format
    return isinstance(format, ScaledFormat) and isinstance(format.element, IntFormat)


Runner = Callable[[Call], Any]


def runner(masked: Callable[[Call, Tensor], Tensor]) -> Runner:
    """Return a runner that calls torch's own function unless only backward follows the call, and informs observers."""

    def run(call: Call, x: Any) -> Any:
        if functorch_is_active() or not isinstance(x, Tensor) or "out" in call.kwargs or not _is_followed(x):
            return plain(call)
        try:
            return masked(call, x)
        except Mismatch:
            return plain(call)

    @wraps(masked)
    def outer(call: Call) -> Any:
        x = call.args[0] if call.args else call.kwargs.get("input")
        if call.watch is None or not isinstance(x, Tensor):
            return run(call, x)
        call.watch(x, role_of(x), None)
        return told(run(call, x), call.watch)

    return outer


def _is_followed(x: Tensor) -> bool:
    """Whether the graph records a plain fp32 tensor for backward only."""
    if not (x.requires_grad and torch.is_grad_enabled()) or type(x) not in (Tensor, nn.Parameter):
        return False
    if x.dtype is not torch.float32 or not has_integer_kernels(x) or x.layout is not torch.strided or x.is_nested:
        return False
    return unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]


# -- activations --------------------------------------------------------------------------------------------------


class _Masked(ABC):
    """A function whose gradient depends on its result only through a mask."""

    is_in_place = False

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        """Return the result, and its mask."""

    @abstractmethod
    def backward(self, gradient: Tensor, mask: Mask) -> Tensor:
        """Return the gradient."""


class _MaskedNode(torch.autograd.Function):
    """The node of such a function; saves the mask with eight elements per byte."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masked: _Masked) -> Tensor:
        if masked.is_in_place:
            ctx.mark_dirty(x)
        result, mask = masked.forward(x)
        bits, *ctx.layout = mask
        ctx.masked = masked
        ctx.save_for_backward(bits)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors  # a checkpoint may run its region now
        with shield():
            return ctx.masked.backward(gradient, Mask(bits, *ctx.layout)), None


def _applied(x: Tensor, masked: _Masked) -> Tensor:
    return cast(Tensor, _MaskedNode.apply(x, masked))  # type: ignore[no-untyped-call]


@dataclass
class _Gate(_Masked):
    """An activation whose gradient passes where `passes` is true of the result."""

    run: Callable[[Tensor], Tensor]
    passes: Callable[[Tensor], Mask]
    through: Callable[[Tensor, Mask], Tensor]
    is_in_place: bool

    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        result = self.run(x)
        return result, self.passes(result)

    def backward(self, gradient: Tensor, mask: Mask) -> Tensor:
        return self.through(gradient, mask)


def _stopped(gradient: Tensor, mask: Mask) -> Tensor:
    """Return a gradient with zeros where it does not pass; elements that pass, including NaN, keep their bits."""
    if torch.is_grad_enabled() or functorch_is_active() or type(gradient) is not Tensor or gradient.is_neg():
        return cast(Tensor, torch.ops.aten.threshold_backward(gradient, unpacked(mask).to(gradient.dtype), 0))
    return passed(gradient, mask)


def _gated(x: Tensor, gate: _Gate) -> Tensor:
    # in place torch refuses leaves, and rewrites the graph of views
    require(not gate.is_in_place or (not x.is_leaf and x._base is None))
    return _applied(x, gate)


def _is_in_place(call: Call, given: bool) -> bool:
    return bool(given) or function_name(call).endswith("_")


@runner
def relu(call: Call, x: Tensor) -> Tensor:
    """F.relu(input, inplace=False), torch.relu, Tensor.relu and relu_; a NaN passes."""
    _, given = bound(call, "input", inplace=False)
    in_place = _is_in_place(call, given)
    run = torch.relu_ if in_place else torch.relu
    return _gated(x, _Gate(run, nonzero, _stopped, in_place))


@runner
def relu6(call: Call, x: Tensor) -> Tensor:
    """F.relu6(input, inplace=False)."""
    _, given = bound(call, "input", inplace=False)
    return _clipped(x, 0.0, 6.0, _is_in_place(call, given))


@runner
def hardtanh(call: Call, x: Tensor) -> Tensor:
    """F.hardtanh(input, min_val=-1, max_val=1, inplace=False) and hardtanh_."""
    _, low, high, given = bound(call, "input", min_val=-1.0, max_val=1.0, inplace=False)
    return _clipped(x, low, high, _is_in_place(call, given))


def _clipped(x: Tensor, low: float, high: float, in_place: bool) -> Tensor:
    def passes(y: Tensor) -> Mask:
        return packed((y <= low).logical_or_(y >= high).logical_not_())

    return _gated(x, _Gate(lambda x: F.hardtanh(x, low, high, in_place), passes, _stopped, in_place))


@runner
def leaky_relu(call: Call, x: Tensor) -> Tensor:
    """F.leaky_relu(input, negative_slope=0.01, inplace=False) and leaky_relu_."""
    _, slope, given = bound(call, "input", negative_slope=0.01, inplace=False)
    in_place = _is_in_place(call, given)
    require(slope >= 0)  # otherwise the result does not determine the sign, and in place torch refuses the call

    def backward(gradient: Tensor, mask: Mask) -> Tensor:
        signs = unpacked(mask).to(gradient.dtype)
        return cast(Tensor, torch.ops.aten.leaky_relu_backward(gradient, signs, slope, False))

    def run(x: Tensor) -> Tensor:
        return F.leaky_relu(x, slope, in_place)

    return _gated(x, _Gate(run, lambda y: packed(y > 0), backward, in_place))


# -- dropout ------------------------------------------------------------------------------------------------------


@dataclass
class _Dropout(_Masked):
    """Dropout with the mask of the function that draws it."""

    function: Fp32Function

    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        result, (mask,) = self.function.forward([x])
        return result, packed(mask)

    def backward(self, gradient: Tensor, mask: Mask) -> Tensor:
        (result,) = self.function.backward(gradient, [unpacked(mask)], [None], [True])
        return cast(Tensor, result)


@runner
def dropout(call: Call, x: Tensor) -> Tensor:
    """F.dropout(input, p=0.5, training=True, inplace=False) and torch.dropout(input, p, train); in place like torch."""
    found = None if function_name(call).endswith("_") else dropout_function(call)
    if found is None:
        raise Mismatch
    return _applied(x, _Dropout(found[0]))


max_pool2d, max_pool3d = runner(pool(2)), runner(pool(3))
