"""Which dtypes can hold the results of which casts, decided exactly."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from lowp.casts import Cast, Overflow, Rounding
from lowp.compat import private
from lowp.formats import FORMATS, FloatFormat, IntFormat
from lowp.kernels import bitwise, scaled
from lowp.kernels.floats import narrow, widen

_real_tensors = typing.cast(
    Callable[[], AbstractContextManager[object]], private("torch.utils._python_dispatch._disable_current_modes")
)


@functools.lru_cache(maxsize=1024)
def holds(cast: Cast, dtype: torch.dtype) -> bool:
    """Whether `dtype` can hold every result of `cast` on numbers of `dtype`; a 16-bit dtype is tried whole."""
    if cast.scaling is not None:
        return scaled.fits(cast, dtype)
    if dtype.itemsize > 2:
        return dtype == torch.float64 or holds_format(cast.element, dtype) or _is_identity_on_fp32(cast)
    both_ways = (Rounding.UP, Rounding.DOWN) if cast.is_stochastic else (cast.rounding,)
    casts = [replace(cast, rounding=mode, random_bits=None) for mode in both_ways]
    with _real_tensors():  # torch.compile may ask, whose tensors have no values
        every = widen(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype))
        return all(_survives(bitwise.quantized(every, one), dtype) for one in casts)


def holds_format(format: FloatFormat | IntFormat, dtype: torch.dtype) -> bool:
    """Whether every value of a format is a number of `dtype`."""
    if isinstance(format, IntFormat):
        digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
        return format.bits - 1 <= digits and format.maximum <= torch.finfo(dtype).max
    names = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    carrier = FORMATS[names[dtype]]
    assert isinstance(carrier, FloatFormat)
    return format.fits(carrier)


def _is_identity_on_fp32(cast: Cast) -> bool:
    carrier, format = FORMATS["fp32"], cast.element
    contains = isinstance(carrier, FloatFormat) and isinstance(format, FloatFormat) and carrier.fits(format)
    return contains and cast.overflow is not Overflow.SATURATE


def _survives(values: Tensor, dtype: torch.dtype) -> bool:
    back = widen(narrow(values, dtype))
    return bool(((back == values) | values.isnan()).all())
