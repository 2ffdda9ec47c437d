"""Kernels for GPUs in Triton: the same bits as every other implementation; on a CPU in Triton's interpreter.

Nothing here imports triton before a kernel is asked for.
"""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor

from lowp.casts import Cast
from lowp.kernels.philox import Seed

__all__ = ["DEVICES", "is_installed", "quantize"]

DEVICES = ("cuda",)  # which ROCm's GPUs are called, too


@functools.cache
def is_installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> None:
    """Write the values that `cast` makes of `x` into `out`, which may be `x`; see `lowp.quantize`."""
    from lowp.kernels.triton import calls

    calls.quantize(x, cast, seed, out)
