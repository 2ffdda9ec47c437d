"""Integer products run: by the C++ library, by Triton, or by the definition, as `integer` has chosen; and who watches.

Operands and sizes are checked when they come here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import InvalidInput, Unavailable
from lowp.kernels import cpu
from lowp.kernels.int16 import integer_reference
from lowp.kernels.int16.integer_reference import PRODUCTS, ConvolutionShape
from lowp.kernels.tracing import is_watched, mode_count

# what an exact product can be written as, numbered as in cpu/gemm.hpp, where 0 is a chained one
KINDS = {torch.int16: 1, torch.float32: 2, torch.float64: 3, torch.int64: 4}
_WITHOUT_LIBRARY = ("reference", "triton")
Observer = Callable[[int], AbstractContextManager[None]]
observers: list[Observer] = []  # of the products of this process


class Bias(NamedTuple):
    """Numbers that are added to a product, fp32: one a column of a matrix, or one a channel of a convolution's result.

    A chained result is rounded to fp32 first, and the number added to it in fp32. An exact one is int16: the number is
    multiplied by 2^exponent (-E for a result of exponent E) and added in fp64, before the only rounding to mantissas.
    """

    numbers: Tensor
    exponent: int = 0


class NotFinite(InvalidInput):
    """A bias is infinite or NaN, which no integer can represent."""


class Output(NamedTuple):
    """What a product writes: dtype, exact or chained, times 2^exponent, int16 from `lowest`, plus bias, by a kernel."""

    dtype: torch.dtype
    chained: bool
    exponent: int
    lowest: int
    kernel: str
    bias: Bias | None


class Multiplied(NamedTuple):
    """The result of a product, and observations made while it was written.

    `saturated` counts the elements that did not fit int16 and `largest_mantissa` is max |mantissa| after saturation
    (32768 for -32768), the maximum that Autoflex takes; both are 0 unless the result is int16. `largest_sum` is the
    largest |integer sum|, before exponent, rounding and saturation: what a format that chooses its exponent by the true
    maximum needs. `largest` is the largest absolute value of a chained product. Those that are not of its kind are 0,
    and all of an empty result.
    """

    values: Tensor
    saturated: int = 0
    largest_mantissa: int = 0
    largest_sum: int = 0
    largest: float = 0.0


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Enter `observer(operations)` around each product of this process for a while, in whichever thread it runs.

    The operations are the multiplications and additions of the product. torch's dispatch modes do not see a call into
    the C++ library, and see other ops where the definition stands in for it, see `_show`.
    """
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def told(operations: int) -> AbstractContextManager[None]:
    """Report a product of so many operations to the observers while it runs."""
    return _told(operations) if observers else nullcontext()


def _show(operations: int) -> None:
    """Let dispatch modes that must see operators, as torch's FlopCounterMode, see a product that is none.

    It is one of tensors without memory, on the meta device, of as many operations.
    """
    if mode_count() and is_watched():
        side = torch.empty(1, operations // 2, device="meta")
        torch.mm(side, side.t())


@contextmanager
def _told(operations: int) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer(operations))
        yield


def _batched(x: Tensor) -> Tensor:
    """Return [..., r, c] with at most one dimension before these, and one of their strides 1 (else a copy)."""
    x = x.flatten(0, -3) if x.dim() > 3 else x
    return x if 1 in x.stride()[-2:] else x.contiguous()


def matmul(left: Tensor, right: Tensor, output: Output) -> Multiplied:
    """Return [..., m, k] @ [..., k, n], whose leading dimensions are the same."""
    *batch, m, k = left.shape
    n = right.shape[-1]
    with told(2 * math.prod(left.shape) * n):
        if output.kernel == "triton" and output.bias is None:
            scale = torch.full((), 2.0**output.exponent, dtype=torch.float64, device=left.device)
            values, found = by_triton(left, right, scale, output.dtype, output.chained, output.lowest)
            return _chained(values) if output.chained else Multiplied(values, *found.tolist())
        library = None if output.kernel in _WITHOUT_LIBRARY else cpu.library()
        if library is None:
            multiply = sums_by_triton if output.kernel == "triton" else integer_reference.matmul
            return _by_definition(multiply(left, right, output.chained), output, -1)
        _show(2 * math.prod(left.shape) * n)
        result = left.new_empty((*batch, m, n), dtype=output.dtype)
        a, b = _batched(left), _batched(right)
        *a_batch, a_rows, a_depth = a.stride()
        *b_batch, b_depth, b_columns = b.stride()
        sizes = array("q", (1, math.prod(batch), m, n, k))
        of_a, of_b = (*(a_batch or (0,)), a_rows, a_depth), (*(b_batch or (0,)), b_columns, b_depth)
        strides = array("q", (0, *of_a, 0, *of_b, 0, m * n, n))
        return _called(library.lowp_integer_matmul, output, result, (a, b, result, sizes, strides))


def by_triton(
    left: Tensor, right: Tensor, scale: Tensor, dtype: torch.dtype, chained: bool, lowest: int = -32768
) -> tuple[Tensor, Tensor]:
    """Return [..., m, k] @ [..., k, n] times `scale`, and counts, on the device: `triton.products.matmul`."""
    from lowp.kernels.triton import products

    _show(2 * math.prod(left.shape) * right.shape[-1])
    a, b = (_batched(x.unsqueeze(0) if x.dim() == 2 else x) for x in (left, right))
    values, counts = products.matmul(a, b, scale, dtype, chained, lowest)
    return values.reshape(*left.shape[:-1], right.shape[-1]), counts


def sums_by_triton(left: Tensor, right: Tensor, chained: bool) -> Tensor:
    """Return [..., m, k] @ [..., k, n] as `integer_reference.matmul` does: int64, or chained in fp32."""
    one = torch.ones((), dtype=torch.float64, device=left.device)
    return by_triton(left, right, one, torch.float32 if chained else torch.int64, chained)[0]


def convolution(product: str, a: Tensor, b: Tensor, shape: ConvolutionShape, output: Output) -> Multiplied:
    """Return one of the PRODUCTS of a convolution."""
    with told(shape.operations):
        library = None if output.kernel in _WITHOUT_LIBRARY else cpu.library()
        if library is None:
            multiply = sums_by_triton if output.kernel == "triton" else integer_reference.matmul
            sums = integer_reference.convolution(product, a, b, shape, output.chained, multiply)
            return _by_definition(sums, output, 1)
        _show(shape.operations)
        result = torch.empty(shape.of_operand(PRODUCTS[product][2]), dtype=output.dtype, device="cpu")
        a, b = a.contiguous(), b.contiguous()
        operands = (list(PRODUCTS).index(product), a, b, result, shape.numbers)
        return _called(library.lowp_integer_convolution, output, result, operands)


def _called(function: Callable[..., int], output: Output, result: Tensor, operands: tuple[Any, ...]) -> Multiplied:
    """Call the library; `operands` are tensors and numbers."""
    integers, largest = array("q", (0, 0, 0)), array("d", (0.0,))
    kind = 0 if output.chained else KINDS[output.dtype]
    bias = output.bias or (None, 0)
    seen = torch.get_num_threads(), integers, largest
    status = function(output.kernel.encode(), *operands, kind, output.exponent, output.lowest, *bias, *seen)
    check_status(status, output.kernel)
    return Multiplied(result, *integers, *largest)


def check_status(status: int, kernel: str) -> None:
    """Raise the error that a product by the library has returned; 0 is none."""
    if status == 1:
        raise Unavailable(f"this processor has no {kernel}; portable and reference run everywhere")
    if status == 3:
        raise _not_finite()
    if status:
        raise MemoryError("no memory for the packed operands of an integer product")


def _not_finite() -> NotFinite:
    return NotFinite("the bias is infinite or NaN, for which no int16 stands; add it to the sums in float64")


def _by_definition(sums: Tensor, output: Output, axis: int) -> Multiplied:
    """Return what a product writes of its sums; a bias has its numbers along `axis`."""
    if output.kernel not in ("", *_WITHOUT_LIBRARY):
        raise Unavailable(f"{output.kernel} needs lowp's C++ library, which is not loaded; reference runs without it")
    exponent, bias = output.exponent, None
    if output.bias is not None:
        bias = output.bias.numbers.reshape(-1, *(1,) * (sums.dim() - 1 - axis % sums.dim()))
    if output.chained:
        values = (sums.double() * 2.0**exponent).float()
        return _chained(values if bias is None else values + bias)
    scale = torch.full((), 2.0**exponent, dtype=torch.float64, device=sums.device)
    largest = int(sums.abs().max()) if sums.numel() else 0
    if output.dtype is not torch.int16:
        return Multiplied(integer_reference.times(sums, scale, output.dtype), largest_sum=largest)
    wide = integer_reference.to_odd(sums, torch.float64) * scale
    if bias is not None and output.bias is not None:
        if not bool(bias.isfinite().all()):
            raise _not_finite()
        wide = sums.double() * scale + torch.ldexp(bias.double(), torch.full_like(scale, output.bias.exponent))
        if sums.numel():
            largest = min(math.ceil(math.ldexp(float(wide.abs().max()), -exponent)), 1 << 62)
    values, counts = integer_reference.to_int16(wide, output.lowest)
    saturated, mantissa = counts.tolist()
    return Multiplied(values, saturated, mantissa, largest)


def _chained(values: Tensor) -> Multiplied:
    return Multiplied(values, largest=float(values.abs().max()) if values.numel() else 0.0)
