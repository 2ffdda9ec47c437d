"""NumPy arrays in place of tensors: views if possible, copies if torch cannot access the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_BFLOAT16 = "bfloat16"  # the name of ml_dtypes.bfloat16, which torch reads by its bits


def is_array(x: object) -> bool:
    """Whether `x` is a NumPy array or scalar, or provides one (MindSpore's ``asnumpy``)."""
    return isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "asnumpy")


def to_array(x: Any) -> np.ndarray[Any, Any]:
    """Return the NumPy array that `x` is or provides."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(
            "lowp does not support masked arrays: give x.filled(0) or x.data and put the mask on the "
            "result, or x.compressed() to lowp.statistics"
        )
    return np.asarray(x.asnumpy() if hasattr(x, "asnumpy") else x)


def to_tensor(array: np.ndarray[Any, Any], writing: bool = False) -> Tensor:
    """Return a tensor on the array's memory; a copy if torch needs one (with `writing`, ValueError instead)."""
    native = array.dtype.isnative
    reachable = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)  # fields of a record
    if writing and not (native and reachable and array.flags.writeable):
        raise ValueError(
            "out is an array that torch cannot write: read-only, byte-swapped, with negative strides or in a record; "
            "give another one, or assign the result to it"
        )
    if not (native and reachable and array.flags.writeable):
        array = array.astype(array.dtype.newbyteorder("=")) if not native else array.copy()
    if array.dtype.name == _BFLOAT16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise TypeError(
            f"torch has no dtype for {array.dtype}: convert the array first, for example with x.astype(numpy.float32)"
        ) from None


def to_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype for a dtype of either library. Raises TypeError for a dtype that torch lacks."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, np.dtype(dtype).name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype for {np.dtype(dtype)}: use numpy.float64, float32 or float16")
    return found


def to_numpy(x: Tensor, dtype: Any) -> np.ndarray[Any, Any]:
    """Return a CPU tensor as an array, on the same memory; bf16 in `dtype`, which must then be that of ml_dtypes."""
    if x.dtype != torch.bfloat16:
        return x.numpy()
    if isinstance(dtype, torch.dtype):
        raise TypeError("NumPy has no bfloat16: use ml_dtypes.bfloat16, numpy.float32 or numpy.float64")
    return x.view(torch.uint16).numpy().view(dtype)
