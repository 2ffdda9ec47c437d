"""The gradient of a cast where torch only follows gradients: no operator is called, and no compiler loaded for one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import run
from lowp.kernels.philox import Seed
from lowp.kernels.scaled import Scales


def quantize(module: ModuleType, x: Tensor, cast: Cast, scales: Scales | None, seed: Seed) -> Tensor:
    """Return the values that `cast` makes of `x`; gradients pass straight through (Bengio et al. 2013, 1308.3432)."""
    return _StraightThrough.apply(module, x, cast, scales, seed)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, module: ModuleType, x: Tensor, cast: Cast, scales: Scales | None, seed: Seed) -> Tensor:
        return run.quantize(module, x, cast, scales, seed)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradient, None, None, None
