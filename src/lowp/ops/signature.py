"""Reads a call by the public signature of its function, and writes into the call's `out=`."""

from typing import Any

import torch
from torch import Tensor

from lowp.ops.call import Call


class Mismatch(Exception):
    """The arguments do not fit the signature: the function itself raises the error."""


class Empty(Mismatch):
    """An operand has no elements: the function itself takes the rounded operands, and gives the shapes of torch."""


_REQUIRED = object()


def bound(call: Call, *names: str, **defaults: Any) -> list[Any]:
    """Return the values of the named parameters, in order. Raises Mismatch if the call does not fit.

    `names` are required, `defaults` follow them; a name that ends in an underscore stands for a Python keyword.
    """
    if not call.kwargs and len(call.args) == len(names) + len(defaults):
        return list(call.args)
    values = dict.fromkeys(names, _REQUIRED)
    values.update(defaults)
    if len(call.args) > len(values):
        raise Mismatch
    values.update(zip(values, call.args, strict=False))
    given = list(values)[: len(call.args)]
    for name, value in call.kwargs.items():
        if name not in values or name in given:
            raise Mismatch
        values[name] = value
    if any(value is _REQUIRED for value in values.values()):
        raise Mismatch
    return list(values.values())


def without_out(call: Call) -> tuple[Call, Tensor | None]:
    """Return the call without `out=`, and the tensor given as `out`."""
    out = call.kwargs.get("out")
    if "out" not in call.kwargs:
        return call, None
    kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
    return call.given(call.args, kwargs), out


def can_hold(own: torch.dtype, other: torch.dtype) -> bool:
    """Whether torch writes results of a dtype into tensors of `own`: `torch.can_cast`, which torch.compile traces."""
    if own is torch.bool:
        return other is torch.bool
    return own.is_complex or not (other.is_complex or (other.is_floating_point and not own.is_floating_point))


def into_out(call: Call, result: Tensor, out: Tensor | None) -> Tensor:
    """Return `result`, written into `out` if the call gave one, as torch's out= functions do.

    Raises RuntimeError, as torch does, if autograd would have to record the write, and if floats would be written into
    integers or complex numbers into real ones.
    """
    if out is None:
        return result
    if not can_hold(out.dtype, result.dtype):
        raise RuntimeError(
            f"{call.op}(): result type {result.dtype} can't be cast to the desired output type {out.dtype}"
        )
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{call.op}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def plain(call: Call) -> Any:
    """Return the result of the function itself: for tensors to which no rule applies, and to raise its own errors."""
    return call.func(*call.args, **call.kwargs)


# -- which calls rules apply to -------------------------------------------------------------------------------------


def check(*tensors: Any) -> None:
    """Leave the call to the function itself if an operand is not a floating-point tensor of up to 32 bits.

    The same holds for sparse or nested operands, which only the function can multiply; their values are rounded before.
    """
    if not is_ordinary(*tensors):
        raise Mismatch


def require(condition: bool) -> None:
    """Leave the call to the function itself, which raises its own error, unless the condition holds."""
    if not condition:
        raise Mismatch


def is_mixed(call: Call) -> bool:
    """Whether operands to round have several dtypes: the function would refuse these, and not say what does not fit."""
    tensors = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)]
    return len({one.dtype for one in tensors}) > 1 and is_ordinary(*tensors)


def is_ordinary(*tensors: Any) -> bool:
    """Whether rules apply to all of these, and each is None or in one strided block."""
    compiling = torch.compiler.is_compiling()
    for one in tensors:
        if one is None:
            continue
        if not isinstance(one, Tensor) or not one.is_floating_point() or one.dtype is torch.float64:
            return False
        if not compiling and (one.layout is not torch.strided or one.is_nested or one.is_mkldnn):
            return False
    return True
