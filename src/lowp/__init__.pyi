from typing import Any, Literal, TypeVar, overload

import numpy as _numpy
import torch as _torch
from numpy.typing import NDArray as _NDArray

from lowp import inference, optim
from lowp.casts import Cast
from lowp.checkpoint import InvalidCheckpoint, save
from lowp.compression import GradientCompression
from lowp.errors import InvalidInput, LowpError, Misuse, NotWritten, Unavailable, UnknownName
from lowp.formats import FORMATS
from lowp.formats import FloatFormat as _FloatFormat
from lowp.formats import Format as _Format
from lowp.formats import IntFormat as _IntFormat
from lowp.formats import ScaledFormat as _ScaledFormat
from lowp.formats import parse as format
from lowp.inference import mismatch as mismatch
from lowp.inference import quantize_model
from lowp.kernels import Statistics, dequantize, statistics
from lowp.monitoring import Monitor
from lowp.ops.observing import Observation, observe
from lowp.optim import MasterWeights
from lowp.policy import Policy, Rule
from lowp.portable import load
from lowp.precision import Precision
from lowp.profiling import profile
from lowp.quantized import Quantized
from lowp.region import autocast
from lowp.reproducing import reproducible
from lowp.step import GradScaler, NonFiniteGradients

__version__: str

_ScaledName = Literal[
    "mxfp8",
    "mxfp8-e5m2",
    "mxfp6",
    "mxfp6-e3m2",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "if4",
    "flex16+5",
    "dfp16",
    "int16",
    "int8",
    "int8-affine",
    "int4",
    "ternary",
    "binary",
]
_Element = TypeVar("_Element", bound=_numpy.generic)

@overload
def quantize(
    x: _torch.Tensor,
    cast: str | Cast | _Format | _torch.dtype,
    *,
    scale: Any = None,
    seed: int | _torch.Tensor = 0,
    offset: int = 0,
    out: _torch.Tensor | None = None,
) -> _torch.Tensor: ...
@overload
def quantize(
    x: _NDArray[_Element],
    cast: str | Cast | _Format | _torch.dtype,
    *,
    scale: Any = None,
    seed: int | _torch.Tensor = 0,
    offset: int = 0,
    out: _NDArray[_Element] | None = None,
) -> _NDArray[_Element]: ...

# A format with a shared scale gives a Quantized: a checker knows it by its type or its name, and not another text that
# spells one, such as "i8s@fp32/row": give lowp.format(text).
@overload
def encode(  # type: ignore[overload-overlap]
    x: _torch.Tensor | _NDArray[Any],
    cast: _ScaledFormat | _ScaledName,
    *,
    scale: Any = None,
    seed: int | _torch.Tensor = 0,
    offset: int = 0,
    packed: bool = False,
) -> Quantized: ...
@overload
def encode(
    x: _torch.Tensor,
    cast: str | Cast | _FloatFormat | _IntFormat,
    *,
    scale: Any = None,
    seed: int | _torch.Tensor = 0,
    offset: int = 0,
    packed: bool = False,
) -> _torch.Tensor: ...
@overload
def encode(
    x: _NDArray[Any],
    cast: str | Cast | _FloatFormat | _IntFormat,
    *,
    scale: Any = None,
    seed: int | _torch.Tensor = 0,
    offset: int = 0,
    packed: bool = False,
) -> _NDArray[Any]: ...
@overload
def decode(
    codes: _torch.Tensor,
    format: str | Cast | _Format | _torch.dtype,
    *,
    dtype: _torch.dtype = ...,
    packed: bool = False,
    length: int | None = None,
) -> _torch.Tensor: ...
@overload
def decode(
    codes: _NDArray[Any],
    format: str | Cast | _Format | _torch.dtype,
    *,
    dtype: _torch.dtype = ...,
    packed: bool = False,
    length: int | None = None,
) -> _NDArray[Any]: ...

__all__ = [
    "FORMATS",
    "Cast",
    "GradScaler",
    "GradientCompression",
    "InvalidCheckpoint",
    "InvalidInput",
    "LowpError",
    "MasterWeights",
    "Misuse",
    "Monitor",
    "NonFiniteGradients",
    "NotWritten",
    "Observation",
    "Policy",
    "Precision",
    "Quantized",
    "Rule",
    "Statistics",
    "Unavailable",
    "UnknownName",
    "__version__",
    "autocast",
    "decode",
    "dequantize",
    "encode",
    "format",
    "inference",
    "load",
    "mismatch",
    "observe",
    "optim",
    "profile",
    "quantize",
    "quantize_model",
    "reproducible",
    "save",
    "statistics",
]
