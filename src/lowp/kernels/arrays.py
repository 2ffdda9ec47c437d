"""NumPy arrays in place of tensors: views where possible, copies where torch cannot look at the memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_VIEWED = {"bfloat16": (np.uint16, torch.bfloat16)}  # ml_dtypes.bfloat16: torch reads it by its bits


def is_array(x: object) -> bool:
    """Whether `x` is an array or scalar of NumPy, or hands one out (MindSpore's ``asnumpy``)."""
    return isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "asnumpy")


def to_array(x: Any) -> np.ndarray[Any, Any]:
    """Return the NumPy array that `x` is or hands out."""
    return np.asarray(x.asnumpy() if hasattr(x, "asnumpy") else x)


def to_tensor(array: np.ndarray[Any, Any], writing: bool = False) -> Tensor:
    """Return a tensor on the array's memory; a copy where torch needs one (not `writing`: then ValueError)."""
    native = array.dtype.isnative
    positive = all(stride >= 0 for stride in array.strides)
    if writing and not (native and positive and array.flags.writeable):
        raise ValueError(
            "out is an array that torch cannot write: read-only, byte-swapped or with negative strides; "
            "give another one, or assign the result to it"
        )
    if not (native and positive and array.flags.writeable):
        array = array.astype(array.dtype.newbyteorder("=")) if not native else array.copy()
    viewed = _VIEWED.get(array.dtype.name)
    if viewed is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(viewed[0])).view(viewed[1])


def to_numpy(x: Tensor, like: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
    """Return a CPU tensor as an array, on the same memory; bf16 in the dtype of `like`."""
    if x.dtype == torch.bfloat16 and like is not None:
        return x.view(torch.uint16).numpy().view(like.dtype)
    return x.numpy()
