"""The types of the public names: checked by mypy in `make lint`, never run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import lowp
from lowp.formats import FloatFormat, IntFormat, ScaledFormat


def tensors_give_tensors_and_arrays_give_arrays(x: torch.Tensor, array: NDArray[np.float32]) -> None:
    """`quantize` and `decode` return the type of their argument."""
    assert_type(lowp.quantize(x, "fp16"), torch.Tensor)
    assert_type(lowp.quantize(x, lowp.format("e4m3fn"), out=x), torch.Tensor)
    assert_type(lowp.quantize(array, "e5m7:stochastic", seed=1), NDArray[np.float32])
    assert_type(lowp.decode(x, "e4m3fn", dtype=torch.float64), torch.Tensor)
    assert_type(lowp.decode(array, "e4m3fn"), NDArray[Any])
    assert_type(lowp.statistics(x), lowp.Statistics)


def codes_are_tensors_arrays_or_quantized(
    x: torch.Tensor, array: NDArray[np.float32], fp8: FloatFormat, int8: IntFormat, mxfp8: ScaledFormat
) -> None:
    """`encode` returns codes of the type of its argument, and a Quantized for a format with a shared scale."""
    assert_type(lowp.encode(x, fp8, packed=True), torch.Tensor)
    assert_type(lowp.encode(x, int8), torch.Tensor)
    assert_type(lowp.encode(array, fp8, seed=1), NDArray[Any])
    assert_type(lowp.encode(x, mxfp8), lowp.Quantized)
    assert_type(lowp.encode(array, mxfp8), lowp.Quantized)
    assert_type(lowp.encode(x, "e4m3fn"), torch.Tensor)
    assert_type(lowp.encode(array, "e4m3fn"), NDArray[Any])
    assert_type(lowp.encode(x, lowp.format("i8s@fp32/row")), torch.Tensor | lowp.Quantized)
    assert_type(lowp.dequantize(lowp.encode(x, "mxfp8")), torch.Tensor)


def what_is_neither_is_refused(x: torch.Tensor, array: NDArray[np.float32]) -> None:
    """Each line is an error: mypy reports an unused ignore."""
    lowp.quantize([1.0], "fp16")  # type: ignore[call-overload]
    lowp.quantize(x, "fp16", out=array)  # type: ignore[call-overload]
    lowp.quantize(x, 16)  # type: ignore[call-overload]
    lowp.encode([1.0], "fp16")  # type: ignore[call-overload]
    lowp.decode("codes", "e4m3fn")  # type: ignore[call-overload]


def errors_are_python_s_own_too() -> None:
    """A user catches lowp's errors, or the built-in ones from which they are derived."""
    try:
        lowp.quantize(torch.ones(1), "fp61")
    except lowp.UnknownName as error:
        assert_type(error, lowp.UnknownName)
        plain: ValueError = error
        del plain


def a_precision_keeps_the_types_of_what_it_prepares(model: torch.nn.Module, optimizer: torch.optim.Adam) -> None:
    """The returned optimizer has the type of the given one."""
    prepared, own = lowp.Precision("bf16").prepare(model, optimizer)
    assert_type(prepared, torch.nn.Module)
    assert_type(own, torch.optim.Adam)
