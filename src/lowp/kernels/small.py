"""Linear layers of small tensors without gradients: operands are rounded into memory kept for their shapes.

The fixed cost of such a layer's calls exceeds its arithmetic, and most of that cost is the allocation of a tensor for
each conversion. A pair of shapes has its own memory, which is overwritten at every call: no value in it is ever
reused. The results have the bits of the same conversions into new tensors, since the layouts are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from lowp.casts import Cast
from lowp.compat import private
from lowp.kernels import cpu
from lowp.kernels.abi import parameters, sharing_parameters
from lowp.kernels.dispatch import chosen
from lowp.kernels.products import NARROW, sums_in_fp32
from lowp.kernels.tracing import is_wrapped

__all__ = ["MOST", "Product", "rounded_by_library", "sixteen_bits"]

MOST = 1024  # elements of an operand
_MOST_SHAPES = 64  # each of up to 16 KiB
_LINE = 16  # fp32 numbers of a cache line: operands begin at one, as in tensors of their own
_PLAIN = (Tensor, Parameter)
_BY_LIBRARY = (None, "cpu")  # implementations that use the library
_dispatch_modes: Any = private("torch._C._len_torch_dispatch_stack")
_is_traced: Any = private("torch._C._is_tracing")

# Takes input, weight and bias; returns None, with nothing done, for tensors that it does not serve.
Product = Callable[[Any, Any, Any], "Tensor | None"]


class _Memory(NamedTuple):
    """Memory of two operands in fp32, and in 16 bits if they are rounded to these: as one tensor, and each alone."""

    wide: Tensor
    wide_x: Tensor
    wide_weight: Tensor
    narrow: Tensor
    narrow_x: Tensor
    narrow_weight: Tensor


_Shapes = tuple[torch.Size, torch.Size]


class _Free(dict[_Shapes, "list[_Memory] | None"]):
    """The memory that no call uses, by the shapes of both operands; None for shapes that are not served.

    A call takes memory out of the list, so that calls in several threads, or within one another, never share any.
    """

    def __missing__(self, shapes: _Shapes) -> list[_Memory] | None:
        if len(self) >= _MOST_SHAPES:
            self.clear()
        x, weight = shapes
        fits = len(x) >= 1 and len(weight) == 2 and x[-1] == weight[-1]
        found: list[_Memory] | None = [] if fits and 0 < x.numel() <= MOST and 0 < weight.numel() <= MOST else None
        self[shapes] = found
        return found


def sixteen_bits(dtype: torch.dtype) -> Product:
    """Return the function of a linear layer in fp16 or bf16: fp32 operands rounded, summed in fp32, and rounded.

    A CPU that multiplies the dtype itself is not served.
    """
    free, copy, linear, narrowed = _Free(), Tensor.copy_, F.linear, NARROW[dtype]

    def run(x: Any, weight: Any, bias: Any) -> Tensor | None:
        if not sums_in_fp32(dtype) or not are_plain(x, weight, bias):
            return None
        found = free[x.shape, weight.shape]
        if found is None:
            return None
        memory = found.pop() if found else _memory(x.shape, weight.shape, dtype)
        wide, wide_x, wide_weight, narrow, narrow_x, narrow_weight = memory
        copy(narrow_x, x)
        copy(narrow_weight, weight)
        copy(wide, narrow)
        result = narrowed(linear(wide_x, wide_weight, bias))
        found.append(memory)
        return result

    return run


def rounded_by_library(cast_of_x: Cast, cast_of_weight: Cast) -> Product:
    """Return the function of a linear layer whose fp32 operands are rounded in one pass each, with a result in fp32.

    Both casts are of `run.is_one_pass`. It serves finite operands, where the C++ library is used.
    """
    free, linear = _Free(), F.linear
    for_x, for_weight = ((parameters(to), sharing_parameters(to)) for to in (cast_of_x, cast_of_weight))

    def run(x: Any, weight: Any, bias: Any) -> Tensor | None:
        if chosen() not in _BY_LIBRARY or not are_plain(x, weight, bias) or (own := cpu.library()) is None:
            return None
        found = free[x.shape, weight.shape]
        if found is None or x.is_neg() or weight.is_neg() or is_wrapped(x) or is_wrapped(weight):
            return None
        if not x.data_ptr() or not weight.data_ptr():  # without memory
            return None
        memory = found.pop() if found else _memory(x.shape, weight.shape, torch.float32)
        _, wide_x, wide_weight, *_ = memory
        result, quantize = None, own.lowp_quantize_finite
        if not quantize(*for_x, x, wide_x, x.numel(), 0, 1) and not quantize(
            *for_weight, weight, wide_weight, weight.numel(), 0, 1
        ):
            result = linear(wide_x, wide_weight, bias)
        found.append(memory)
        return result

    return run


def are_plain(x: Any, weight: Any, bias: Any) -> bool:
    """Whether these are plain fp32 tensors, two of them contiguous on the CPU, and no dispatch mode or trace sees them.

    Outside torch.func and forward-mode autograd, which callers exclude. A bias of another layout or device is left to
    the product, which takes or refuses it.
    """
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or (bias is not None and type(bias) not in _PLAIN):
        return False
    fp32, strided = torch.float32, torch.strided
    if x.dtype is not fp32 or weight.dtype is not fp32 or (bias is not None and bias.dtype is not fp32):
        return False
    if not x.is_cpu or not weight.is_cpu or x.layout is not strided or weight.layout is not strided:
        return False
    if x.is_nested or weight.is_nested:
        return False
    return x.is_contiguous() and weight.is_contiguous() and not _dispatch_modes() and not _is_traced()


def _memory(x: torch.Size, weight: torch.Size, dtype: torch.dtype) -> _Memory:
    """Return new memory for operands of these shapes."""
    first, begin = x.numel(), -(-x.numel() // _LINE) * _LINE
    end = begin + weight.numel()
    with torch.inference_mode(False), torch.no_grad():
        wide = torch.zeros(end, dtype=torch.float32, device="cpu")
        narrow = torch.zeros(end if dtype is not torch.float32 else 0, dtype=dtype, device="cpu")
        if dtype is torch.float32:
            narrow = wide
        parts = [(one, one[:first].view(x), one[begin:end].view(weight)) for one in (wide, narrow)]
    return _Memory(*parts[0], *parts[1])
