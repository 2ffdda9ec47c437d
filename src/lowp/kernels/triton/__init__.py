"""Triton kernels for GPUs, with the same bits as every other implementation; on a CPU they run in Triton's interpreter.

The functions of an implementation are those of `calls` and `scaled`, which import triton when one is first used.
"""

import functools
import importlib
import importlib.util
from typing import Any

DEVICES = ("cuda",)  # also the device type of ROCm's GPUs
_CASTS = ("quantize", "encode", "encode_packed", "decode", "decode_packed", "signs", "statistics")
_MODULES = {**dict.fromkeys(_CASTS, "calls"), **dict.fromkeys(("quantize_groups", "encode_groups"), "scaled")}


@functools.cache
def is_installed() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return found
