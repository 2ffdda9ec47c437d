"""Runners of softmax and log_softmax: read in the rule's format, computed in fp32, written in the rule's output."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.ops.call import Call
from lowp.ops.contraction import runner
from lowp.ops.fp32 import Computation, computed_in_fp32
from lowp.ops.signature import bound, check, require


@dataclass(frozen=True)
class Softmax(Computation):
    """exp(x) / sum(exp(x)) along a dimension, or its logarithm.

    Backward computes it again from the saved input. The rounded result is too coarse: a log-probability of -8 in bf16
    is off by 1.5 %.
    """

    dim: int
    logarithm: bool

    def native(self, x: Tensor, *_: Tensor | None) -> Tensor:
        if not self.logarithm:
            return torch.softmax(x, self.dim)
        return torch.log_softmax(x, self.dim, torch.float32).to(x.dtype)

    def plain(self, x: Tensor, *_: Tensor | None) -> Tensor:
        return torch.log_softmax(x, self.dim) if self.logarithm else torch.softmax(x, self.dim)


@runner
def softmax(call: Call) -> Tensor:
    """softmax, log_softmax and softmin of F, torch, torch.special and Tensor (input, dim, dtype=None).

    If a dtype is given, the result has that dtype.
    """
    logarithm, negative = call.op == "log_softmax", call.op == "softmin"
    x, dim, dtype = _arguments(call)
    check(x)
    require(isinstance(dim, int) and (-x.dim() <= dim < x.dim() or (x.dim() == 0 and dim in (0, -1))))
    x = call.casts.cast(x, "input")
    x = -x if negative else x
    if dtype is not None:
        require(dtype.is_floating_point)
        function = torch.log_softmax if logarithm else torch.softmax
        return function(x, dim, dtype) if dtype is torch.float64 else function(x.float(), dim).to(dtype)
    return computed_in_fp32(Softmax(dim, logarithm), call.casts, x)


def _arguments(call: Call) -> list[Any]:
    name = "self" if "self" in call.kwargs else "input"
    if getattr(call.func, "__module__", "") == F.__name__:  # F's have a _stacklevel of their own before dtype
        x, dim, _, dtype = bound(call, name, dim=None, _stacklevel=3, dtype=None)
        if dim is None:  # F.softmax chooses one, and torch warns of it
            dim = 0 if x.dim() in (0, 1, 3) else 1
        return [x, dim, dtype]
    return bound(call, name, "dim", dtype=None)
