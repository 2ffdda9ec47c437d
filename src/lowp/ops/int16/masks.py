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
from torch import Tensor
from torch.nn import Parameter

from lowp.compat import applied_at_once
from lowp.formats import IntFormat, ScaledFormat
from lowp.kernels.choose.dispatch import answers_at_once
from lowp.kernels.int16.masks import Mask, nonzero, packed, passed, unpacked
from lowp.kernels.tracing import functorch_is_active, is_wrapped
from lowp.ops.call import Call
from lowp.ops.contraction import function_name
from lowp.ops.fp32 import Fp32Function
from lowp.ops.int16.pooling import pool
from lowp.ops.int16.saved import dropout_function
from lowp.ops.observed import told
from lowp.ops.observing import role_of
from lowp.ops.shields import shielded
from lowp.ops.signature import Mismatch, bound, plain, require
from lowp.policy import Policy


def has_integer_operands(policy: Policy) -> bool:
    """Whether a policy's contractions keep integers for backward: scaled integers as operands, fp32 results."""
    formats = (rule.input.format for rule in policy.rules if rule.input is not None and rule.output is None)
    return any(isinstance(one, ScaledFormat) and isinstance(one.element, IntFormat) for one in formats)


Runner = Callable[[Call], Any]


def runner(masked: Callable[[Call, Tensor], Tensor]) -> Runner:
    """Return a runner that calls torch's own function unless only backward follows the call, and informs observers."""

    @wraps(masked)
    def outer(call: Call) -> Any:
        x: Any = call.args[0] if call.args else call.kwargs.get("input")
        watch = call.watch if isinstance(x, Tensor) else None
        if watch is not None:
            watch(x, role_of(x), None)
        try:
            is_masked = isinstance(x, Tensor) and "out" not in call.kwargs and _is_followed(x)
            result = masked(call, x) if is_masked else plain(call)
        except Mismatch:
            result = plain(call)
        return result if watch is None else told(result, watch)

    return outer


def _is_followed(x: Tensor) -> bool:
    """Whether the graph records a plain fp32 tensor for backward only."""
    if functorch_is_active() or not (x.requires_grad and torch.is_grad_enabled()) or type(x) not in (Tensor, Parameter):
        return False
    if x.dtype is not torch.float32 or x.layout is not torch.strided or x.is_nested or is_wrapped(x):
        return False
    return answers_at_once(x)


@dataclass(frozen=True)
class _Masked(ABC):
    """A function whose gradient depends on its result only through a mask."""

    is_in_place: bool

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        """Return the result, and its mask."""

    def backward(self, gradient: Tensor, mask: Mask) -> Tensor:
        """Return the gradient: zeros where it does not pass; elements that pass, including NaN, keep their bits."""
        if torch.is_grad_enabled() or functorch_is_active() or type(gradient) is not Tensor or gradient.is_neg():
            return cast(Tensor, torch.ops.aten.threshold_backward(gradient, unpacked(mask).to(gradient.dtype), 0))
        return passed(gradient, mask)

    def applied(self, x: Tensor) -> Tensor:
        """Return the result, part of the graph. In place torch refuses leaves, and rewrites the graph of views."""
        require(not self.is_in_place or (not x.is_leaf and x._base is None))
        return cast(Tensor, _apply(x, self))


class _MaskedNode(torch.autograd.Function):
    """The node of such a function; saves the mask with eight elements per byte."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, masked: _Masked) -> Tensor:
        if masked.is_in_place:
            ctx.mark_dirty(x)
        result, (bits, *ctx.layout) = masked.forward(x)
        ctx.masked = masked
        ctx.save_for_backward(bits)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(ctx.masked.backward, gradient, Mask(*ctx.saved_tensors, *ctx.layout)), None


_apply = applied_at_once(_MaskedNode)


# -- activations --------------------------------------------------------------------------------------------------


class _Relu(_Masked):
    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        result = torch.relu_(x) if self.is_in_place else torch.relu(x)
        return result, nonzero(result)


@dataclass(frozen=True)
class _Clipped(_Masked):
    """Elements between two bounds, of which those within have a gradient."""

    low: float
    high: float

    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        y = F.hardtanh(x, self.low, self.high, self.is_in_place)
        return y, packed((y <= self.low).logical_or_(y >= self.high).logical_not_())


@dataclass(frozen=True)
class _LeakyRelu(_Masked):
    slope: float

    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        result = F.leaky_relu(x, self.slope, self.is_in_place)
        return result, packed(result > 0)

    def backward(self, gradient: Tensor, mask: Mask) -> Tensor:
        signs = unpacked(mask).to(gradient.dtype)
        return cast(Tensor, torch.ops.aten.leaky_relu_backward(gradient, signs, self.slope, False))


def _is_in_place(call: Call, given: bool) -> bool:
    return bool(given) or function_name(call).endswith("_")


@runner
def relu(call: Call, x: Tensor) -> Tensor:
    """F.relu(input, inplace=False), torch.relu, Tensor.relu and relu_; a NaN passes."""
    _, given = bound(call, "input", inplace=False)
    return _Relu(_is_in_place(call, given)).applied(x)


@runner
def relu6(call: Call, x: Tensor) -> Tensor:
    """F.relu6(input, inplace=False)."""
    _, given = bound(call, "input", inplace=False)
    return _Clipped(_is_in_place(call, given), 0.0, 6.0).applied(x)


@runner
def hardtanh(call: Call, x: Tensor) -> Tensor:
    """F.hardtanh(input, min_val=-1, max_val=1, inplace=False) and hardtanh_."""
    _, low, high, given = bound(call, "input", min_val=-1.0, max_val=1.0, inplace=False)
    return _Clipped(_is_in_place(call, given), low, high).applied(x)


@runner
def leaky_relu(call: Call, x: Tensor) -> Tensor:
    """F.leaky_relu(input, negative_slope=0.01, inplace=False) and leaky_relu_."""
    _, slope, given = bound(call, "input", negative_slope=0.01, inplace=False)
    require(slope >= 0)  # otherwise the result does not determine the sign, and in place torch refuses the call
    return _LeakyRelu(_is_in_place(call, given), slope).applied(x)


# -- dropout ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dropout(_Masked):
    """Dropout with the mask of the function that draws it."""

    function: Fp32Function

    def forward(self, x: Tensor) -> tuple[Tensor, Mask]:
        result, (mask,) = self.function.forward(x)
        return result, packed(mask)

    def backward(self, gradient: Tensor, mask: Mask) -> Tensor:
        (result,) = self.function.backward(gradient, [unpacked(mask)], None, wanted=[True])
        return cast(Tensor, result)


@runner
def dropout(call: Call, x: Tensor) -> Tensor:
    """F.dropout(input, p=0.5, training=True, inplace=False) and torch.dropout(input, p, train); in place like torch."""
    found = None if function_name(call).endswith("_") else dropout_function(call)
    if found is None:
        raise Mismatch
    return _Dropout(False, found[0]).applied(x)


max_pool2d, max_pool3d = runner(pool(2)), runner(pool(3))
