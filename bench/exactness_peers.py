"""The measured libraries: each as a function from a cast and an input dtype to a callable for that cast.

A library that is not installed is omitted, and the results say so.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import Cast, Overflow, Rounding
from lowp.formats import FORMATS, FloatFormat, Specials, parse

Function = Callable[[Tensor], Tensor]


class Peer(NamedTuple):
    """A library: its version, and its callable for a cast from a dtype (None if unsupported)."""

    name: str
    version: str
    function: Callable[[Cast, torch.dtype], Function | None]


def ours() -> Iterator[Peer]:
    """Yield lowp's implementations on this machine, without `native`, which has few casts and its own tests."""
    for name in kernels.available():
        if name != "native":
            yield Peer(f"lowp {name}", lowp.__version__, partial(_lowp, name))


def _lowp(name: str, cast: Cast, dtype: torch.dtype) -> Function:
    def function(x: Tensor, seed: int = 0) -> Tensor:
        with kernels.use(name):
            result: Tensor = kernels.quantize(x, cast, seed=seed)
            return result

    return function


def peers() -> tuple[list[Peer], dict[str, str]]:
    """Return the installed libraries, and for each of the others the reason why it is missing."""
    found, absent = [], {}
    for name, make in MAKERS.items():
        try:
            found.append(make())
        except (ImportError, OSError, KeyError) as error:
            absent[name] = f"{WHERE.get(name, 'not installed')} ({type(error).__name__})"
    return found, absent


# -- torch, NumPy, ml_dtypes ------------------------------------------------------------------------------------------
def _nearest(cast: Cast, overflow: Overflow | None = None) -> bool:
    default = Cast(cast.format).overflow if overflow is None else overflow
    return cast.rounding is Rounding.NEAREST_EVEN and cast.overflow is default


_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "e5m2": torch.float8_e5m2}
_TORCH |= {"e5m2fnuz": torch.float8_e5m2fnuz, "e4m3fnuz": torch.float8_e4m3fnuz, "e8m0": torch.float8_e8m0fnu}
_TORCH["e4m3fn"] = torch.float8_e4m3fn


def _torch() -> Peer:
    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        # since 2.12 torch saturates e4m3fn (pytorch#178817)
        overflow = Overflow.SATURATE if str(cast.format) == "e4m3fn" else None
        to = _TORCH.get(str(cast.format))
        return None if to is None or to is dtype or not _nearest(cast, overflow) else lambda x: x.to(to).to(dtype)

    return Peer("torch .to", torch.__version__.partition("+")[0], function)


def _array(to: Any, x: Tensor) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.numpy().astype(to).astype(x.numpy().dtype))


def _numpy() -> Peer:
    types = {"fp32": np.float32, "fp16": np.float16}

    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        to = types.get(str(cast.format))
        return partial(_array, to) if to is not None and _nearest(cast) else None

    return Peer("NumPy astype", np.__version__, function)


def _ml_dtypes() -> Peer:
    import ml_dtypes

    names = {"bf16": "bfloat16", "e5m2": "float8_e5m2", "e4m3fn": "float8_e4m3fn", "e5m2fnuz": "float8_e5m2fnuz"}
    names |= {"e4m3fnuz": "float8_e4m3fnuz", "e4m3b11fnuz": "float8_e4m3b11fnuz", "e4m3": "float8_e4m3"}
    names |= {"e3m4": "float8_e3m4", "e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e2m1": "float4_e2m1fn"}
    names |= {"e8m0": "float8_e8m0fnu"}

    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        name = names.get(str(cast.format))
        return partial(_array, getattr(ml_dtypes, name)) if name is not None and _nearest(cast) else None

    return Peer("ml_dtypes", ml_dtypes.__version__, function)


# -- gfloat -----------------------------------------------------------------------------------------------------------
_GFLOAT = {"nearest-even": "TiesToEven", "nearest-away": "TiesToAway", "toward-zero": "TowardZero"}
_GFLOAT |= {"up": "TowardPositive", "down": "TowardNegative"}


def _gfloat() -> Peer:
    from gfloat import Domain, FormatInfo, RoundMode, round_ndarray

    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        format = cast.element
        if str(cast.rounding) not in _GFLOAT or not isinstance(format, FloatFormat):
            return None
        if (not format.subnormals and format.has_zero) or (cast.overflow is Overflow.NAN and format.has_infinity):
            return None
        high_nans = {Specials.IEEE: (1 << format.mantissa_bits) - 1, Specials.FN: 1}.get(format.specials, 0)
        info = FormatInfo(
            name=str(format),
            k=format.bits,
            precision=format.precision,
            bias=format.bias,
            has_nz=format.has_minus_zero,
            domain=Domain.Extended if format.has_infinity else Domain.Finite,
            num_high_nans=high_nans,
            has_subnormals=format.subnormals,
            is_signed=format.signed,
            is_twos_complement=False,
        )
        mode, saturate = getattr(RoundMode, _GFLOAT[str(cast.rounding)]), cast.overflow is Overflow.SATURATE
        return lambda x: torch.from_numpy(np.asarray(round_ndarray(info, x.numpy(), mode, saturate)))

    return Peer("gfloat", importlib.metadata.version("gfloat"), function)


# -- Berkeley SoftFloat -----------------------------------------------------------------------------------------------
_SOFTFLOAT = {"nearest-even": 0, "toward-zero": 1, "down": 2, "up": 3, "nearest-away": 4}


def _softfloat() -> Peer:
    library = ctypes.CDLL(os.environ["SOFTFLOAT_LIBRARY"])
    mode = ctypes.c_uint8.in_dll(library, "softfloat_roundingMode")  # little-endian: the low byte of the variable
    words = {torch.float32: (ctypes.c_uint32, "f32"), torch.float64: (ctypes.c_uint64, "f64")}

    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        target = {"fp16": "f16", "fp32": "f32"}.get(str(cast.format))
        word, source = words[dtype]
        number = _SOFTFLOAT.get(str(cast.rounding))
        if target is None or target == source or number is None or cast.overflow is not Overflow.INFINITY:
            return None
        convert = getattr(library, f"{source}_to_{target}")
        convert.argtypes = [word]
        convert.restype = ctypes.c_uint16 if target == "f16" else ctypes.c_uint32

        def run(x: Tensor) -> Tensor:
            mode.value = number
            bits = [convert(bits) for bits in x.numpy().view(np.dtype(f"u{x.itemsize}")).tolist()]
            array = np.array(bits, dtype=np.uint16 if target == "f16" else np.uint32)
            return torch.from_numpy(array.view(np.float16 if target == "f16" else np.float32).copy()).to(dtype)

        return run

    return Peer("Berkeley SoftFloat", os.environ.get("SOFTFLOAT_VERSION", "3"), function)


# -- emulators --------------------------------------------------------------------------------------------------------
@cache
def qtorch_functions() -> Any:
    """Return qtorch.quant, which compiles C++ when it is imported, quietly."""
    with redirect_stdout(StringIO()):
        import qtorch.quant  # type: ignore[import-not-found]
    return qtorch.quant


def _qtorch() -> Peer:
    quant = qtorch_functions()

    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        format = cast.element
        if dtype != torch.float32 or not isinstance(format, FloatFormat) or not _nearest(cast):
            return None
        known = Specials.IEEE if format.exponent_bits == 8 else Specials.FINITE
        if format.specials is not known or format.bias_offset or not (format.subnormals and format.signed):
            return None
        return lambda x: quant.float_quantize(x, format.exponent_bits, format.mantissa_bits, "nearest")

    return Peer("qtorch", importlib.metadata.version("qtorch"), function)


_MX = {"e5m2": "fp8_e5m2", "e4m3fn": "fp8_e4m3", "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": "fp4_e2m1"}
_MX_MODES = {"nearest-away": "nearest", "nearest-even": "even", "toward-zero": "floor"}


def _microxcaling() -> Peer:
    from mx.elemwise_ops import _quantize_bfloat, _quantize_elemwise, _quantize_fp  # type: ignore[import-not-found]

    def function(cast: Cast, dtype: torch.dtype) -> Function | None:
        mode, name = _MX_MODES.get(str(cast.rounding)), str(cast.format)
        if mode is None or dtype != torch.float32:
            return None
        if name in _MX and cast.overflow is Overflow.SATURATE:
            return lambda x: _quantize_elemwise(x.clone(), _MX[name], mode, saturate_normals=True)
        if name == "bf16" and cast.overflow is Overflow.INFINITY:
            return lambda x: _quantize_bfloat(x.clone(), 16, mode)
        if name == "bf16-tpu" and cast.overflow is Overflow.INFINITY:
            return lambda x: _quantize_bfloat(x.clone(), 16, mode, allow_denorm=False)
        if name == "fp16" and cast.overflow is Overflow.INFINITY:
            return lambda x: _quantize_fp(x.clone(), 5, 10, mode)
        return None

    return Peer("microxcaling", os.environ.get("MICROXCALING_COMMIT", "unknown"), function)


MAKERS: dict[str, Callable[[], Peer]] = {
    "torch": _torch,
    "NumPy": _numpy,
    "ml_dtypes": _ml_dtypes,
    "gfloat": _gfloat,
    "Berkeley SoftFloat": _softfloat,
    "qtorch": _qtorch,
    "microxcaling": _microxcaling,
}
WHERE = {
    "Berkeley SoftFloat": "SOFTFLOAT_LIBRARY names no library with its f32_to_f16, f64_to_f16 and f64_to_f32",
    "microxcaling": "on no package index; put a checkout of github.com/microsoft/microxcaling on PYTHONPATH",
}


def formats() -> list[FloatFormat]:
    """Return the formats of the matrix: the named ones up to 32 bits, and those that only some peer has."""
    named = [row for row in FORMATS.values() if isinstance(row, FloatFormat) and row.bits <= 32]
    spelled = [
        parse(name) for name in ("e5m7", "e4m3", "e3m4", "e4m3b11fnuz", "e4m3finite", "e5m2finite", "e5m10finite")
    ]
    return [*named, *(row for row in spelled if isinstance(row, FloatFormat))]
