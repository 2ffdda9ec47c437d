"""ReLU and max-pooling of tensors under shared exponents, which select elements and save little for backward.

The result keeps the exponent of the input and is not written. ReLU saves the mantissas of its result, the payload that
the next contraction also saves; a pooling saves the indices of its maxima, in the smallest sufficient integer dtype.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import Mantissas
from lowp.nested import tensors_of
from lowp.ops.call import Call
from lowp.ops.observed import told
from lowp.ops.observing import role_of
from lowp.ops.rows import Row
from lowp.ops.shields import shielded
from lowp.ops.signature import Mismatch, bound, plain, require


def selected(call: Call, runner: Callable[[Call, Tensor], Tensor] | None = None) -> Any:
    """Run an op that selects elements, by `runner` if possible, which saves less than torch; inform observers."""
    if call.watch is not None:
        for one in tensors_of((call.args, call.kwargs)):
            call.watch(one, role_of(one), None)
    assert call.rule.output is not None
    x: Any = call.args[0] if call.args else call.kwargs.get("input")
    is_known = runner is not None and isinstance(x, Tensor) and "out" not in call.kwargs
    found = payloads.hint(x, call.rule.output.format) if is_known else None
    is_followed = runner is not None and found is not None and x.requires_grad and torch.is_grad_enabled()
    try:
        result = cast(Any, runner)(call, x) if is_followed else plain(call)
    except Mismatch:
        result = plain(call)
    if found is not None and isinstance(result, Tensor) and result is not x:
        if payloads.hint(result, call.rule.output.format) is None:
            payloads.keep(result, *found)
    return result if call.watch is None else told(result, call.watch)


def _relu(call: Call, x: Tensor) -> Tensor:
    """F.relu(input, inplace=False), torch.relu, Tensor.relu and relu_."""
    given = list(call.args[1:]) + [value for name, value in call.kwargs.items() if name != "input"]
    is_in_place = any(given) or str(getattr(call.func, "__name__", "")).endswith("_")
    assert call.rule.output is not None
    found = payloads.relu(x, call.rule.output, with_values=not is_in_place)
    require(found is not None)
    assert found is not None
    result = cast(Tensor, _Relu.apply(x, found, is_in_place))  # type: ignore[no-untyped-call]
    payloads.keep(result, call.rule.output.format, found[0].exponent, found[0].payload)
    return result


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: tuple[Mantissas, Tensor | None], is_in_place: bool) -> Tensor:
        mantissas, values = found  # in a tuple: an input that is returned would become a view
        ctx.save_for_backward(mantissas.payload)
        if not is_in_place:
            return torch.relu(x) if values is None else values
        ctx.mark_dirty(x)
        return torch.relu_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(payloads.passed_where_positive, gradient, *ctx.saved_tensors), None, None


@cache
def pool(dims: int) -> Callable[[Call, Tensor], Tensor]:
    """Return the runner of max-pooling over 2 or 3 dimensions, for tensors recorded by the graph."""
    forward = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices")
    backward = getattr(torch.ops.aten, f"max_pool{dims}d_with_indices_backward")

    def run(call: Call, x: Tensor) -> Tensor:
        """F.max_pool2d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False), and 3d."""
        x, *settings, indices = bound(
            call, "input", "kernel_size", stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
        )
        require(not indices and x.dim() in (dims + 1, dims + 2))
        listed = [_sizes(one) for one in settings[:4]]
        listed[0] = listed[0] * dims if len(listed[0]) == 1 else listed[0]
        return cast(Tensor, _Pool.apply(x, forward, backward, (*listed, settings[4])))  # type: ignore[no-untyped-call]

    return run


def _sizes(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


class _Pool(torch.autograd.Function):
    """Max-pooling; saves only the indices of the maxima and the shape of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, settings: tuple[Any, ...]) -> Tensor:
        result, indices = forward(x, *settings)
        places = math.prod(x.shape[-len(settings[0]) :])
        ctx.run, ctx.settings, ctx.shape, ctx.stride = backward, settings, x.shape, x.stride()
        ctx.save_for_backward(indices.to(_smallest(places)))
        return cast(Tensor, result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return shielded(_pooled, gradient, ctx, *ctx.saved_tensors), None, None, None


def _pooled(gradient: Tensor, ctx: Any, indices: Tensor) -> Tensor:
    """Return the gradient of the input of a `_Pool` from the indices of the maxima."""
    like = gradient.new_empty_strided(ctx.shape, ctx.stride)  # its shape and strides are read, no element
    return cast(Tensor, ctx.run(gradient, like, *ctx.settings, indices.to(torch.int64)))


def _smallest(places: int) -> torch.dtype:
    """Return the smallest dtype that holds an index below `places`."""
    return next(
        dtype for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64) if places <= torch.iinfo(dtype).max + 1
    )


def _at_site(runner: Callable[[Call, Tensor], Tensor] | None) -> Callable[[Row, Call], Any]:
    return lambda row, call: selected(call, runner)


# by torch's own function; saving the mantissas of the result, or the indices of the maxima
selecting, relu, max_pool2d, max_pool3d = map(_at_site, (None, _relu, pool(2), pool(3)))
