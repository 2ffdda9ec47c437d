"""How products of int16 mantissas run: in the C++ library, or by the definition in torch; and who is told of them.

Operands are checked by `integer`; here are memory, strides, the call and what was seen while it wrote.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.errors import Unavailable
from lowp.kernels import cpu, integer_reference
from lowp.kernels.integer_reference import ConvolutionShape

__all__ = ["KINDS", "PRODUCTS", "Output", "Seen", "convolution", "matmul", "observed"]

KINDS = {torch.int16: 1, torch.float32: 2, torch.float64: 3, torch.int64: 4}
# A row a product of a convolution, as the C++ library numbers them: its operands, and what it gives.
PRODUCTS = {
    "forward": ("input", "weight", "gradient"),
    "input_gradient": ("gradient", "weight", "input"),
    "weight_gradient": ("input", "gradient", "weight"),
}
Observer = Callable[[int], AbstractContextManager[None]]
_observers: list[Observer] = []


@dataclass(frozen=True)
class Output:
    """What a product writes: its dtype, exact or chained, times 2^exponent, int16 from `lowest`, by a kernel."""

    dtype: torch.dtype
    chained: bool
    exponent: int
    lowest: int
    kernel: str

    @property
    def kind(self) -> int:
        """The output as the C++ library numbers them."""
        return 0 if self.chained else KINDS[self.dtype]


class Seen(NamedTuple):
    """The result, and what was seen while it was written: (saturated, largest mantissa, largest sum), (largest,)."""

    values: Tensor
    integers: array[int]
    largest: array[float]


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Enter `observer(operations)` around each product of this process for a while, in whichever thread it runs.

    The operations are the multiplications and additions of the product. torch's dispatch modes do not see a call into
    the C++ library, and see other ops where the definition stands in for it.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def matmul(left: Tensor, right: Tensor, output: Output) -> Seen:
    """Return the product of [..., m, k] and [..., k, n] with the same leading dimensions."""
    with _told(2 * math.prod(left.shape) * right.shape[-1]) if _observers else _NOBODY:
        return _matmul(left, right, output)


def convolution(product: str, a: Tensor, b: Tensor, shape: ConvolutionShape, output: Output) -> Seen:
    """Return a product of a convolution: each output place meets each weight of its group once, in all three."""
    operations = 2 * shape.output[0] * math.prod(shape.output[2:]) * math.prod(shape.weight)
    with _told(operations) if _observers else _NOBODY:
        return _convolution(product, a, b, shape, output)


_NOBODY = nullcontext()


@contextmanager
def _told(operations: int) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in _observers:
            stack.enter_context(observer(operations))
        yield


def _nothing_seen(values: Tensor) -> Seen:
    return Seen(values, array("q", (0, 0, 0)), array("d", (0.0,)))


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


def _batched(x: Tensor) -> Tensor:
    """Return [..., r, c] as [batch, r, c] with one of the last two strides 1 (a copy only where neither is)."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    elif x.dim() != 3:
        x = x.reshape(-1, *x.shape[-2:]) if x.numel() else x.new_empty(x.shape[:-2].numel(), *x.shape[-2:])
    return x if x.stride(1) == 1 or x.stride(2) == 1 else x.contiguous()


def _matmul(left: Tensor, right: Tensor, output: Output) -> Seen:
    if output.kernel == "triton":
        return _matmul_by_triton(left, right, output)
    library = None if output.kernel == "reference" else cpu.library()
    if library is None:
        _check_reference(output)
        sums = integer_reference.matmul(left, right, output.chained)
        return _finish_reference(sums, output)
    result = torch.empty(*left.shape[:-1], right.shape[-1], dtype=output.dtype, device="cpu")
    a, b = _batched(left), _batched(right)
    # Where both strides are 1 (a single row or column), the kernels read along the depth.
    a_depth = 1 if a.shape[2] <= 1 else a.stride(2)
    a_rows = a.stride(1)
    if a_depth != 1 and a.shape[1] == 1:
        a, a_depth, a_rows = a.contiguous(), 1, a.shape[2]
    m, k, n = a.shape[1], a.shape[2], b.shape[2]
    sizes = array("q", (a.shape[0], m, n, k))
    strides = array("q", (a.stride(0), a_rows, a_depth, b.stride(0), b.stride(2), b.stride(1), m * n, n))
    addresses = (cpu.address(a), cpu.address(b), cpu.address(result), _address(sizes), _address(strides))
    return _called(library.lowp_integer_matmul, output, result, addresses)


def _matmul_by_triton(left: Tensor, right: Tensor, output: Output) -> Seen:
    """Run the kernel and wait for what it saw."""
    from lowp.kernels.triton import products

    a, b = _batched(left), _batched(right)
    scale = torch.full((), 2.0**output.exponent, dtype=torch.float64, device=left.device)
    values, found = products.matmul(a, b, scale, output.dtype, output.chained, output.lowest)
    seen = _nothing_seen(values.reshape(*left.shape[:-1], right.shape[-1]))
    if output.chained:
        seen.largest[0] = float(values.abs().max()) if values.numel() else 0.0
    else:
        seen.integers[:] = array("q", found.tolist())
    return seen


def _convolution(product: str, a: Tensor, b: Tensor, shape: ConvolutionShape, output: Output) -> Seen:
    library = None if output.kernel in ("reference", "triton") else cpu.library()
    if library is None:
        _check_reference(output)
        sums = integer_reference.convolution(product, a, b, shape, output.chained)
        return _finish_reference(sums, output)
    result = torch.empty(shape.of_operand(PRODUCTS[product][2]), dtype=output.dtype, device="cpu")
    a, b = a.contiguous(), b.contiguous()
    geometry = array("q", shape.numbers())
    addresses = (cpu.address(a), cpu.address(b), cpu.address(result), _address(geometry))
    return _called(library.lowp_integer_convolution, output, result, (list(PRODUCTS).index(product), *addresses))


def _called(function: Callable[..., int], output: Output, result: Tensor, operands: tuple[Any, ...]) -> Seen:
    """Call the library; `operands` are numbers and addresses of memory that the caller keeps."""
    seen = _nothing_seen(result)
    status = function(
        output.kernel.encode() or None,
        *operands,
        output.kind,
        output.exponent,
        output.lowest,
        cpu.threads(),
        _address(seen.integers),
        _address(seen.largest),
    )
    if status == 1:
        raise Unavailable(f"this processor has no {output.kernel}; portable and reference run everywhere")
    if status:
        raise MemoryError("no memory for the packed operands of an integer product")
    return seen


def _check_reference(output: Output) -> None:
    if output.kernel not in ("", "reference", "triton"):
        raise Unavailable(f"{output.kernel} needs lowp's C++ library, which is not loaded; reference runs without it")


def _finish_reference(sums: Tensor, output: Output) -> Seen:
    if output.chained:
        seen = _nothing_seen((sums.double() * 2.0**output.exponent).float())
        if sums.numel():
            seen.largest[0] = seen.values.abs().max().item()
        return seen
    if output.dtype is not torch.int16:
        seen = _nothing_seen(integer_reference.scaled(sums, output.exponent, output.dtype))
    else:
        rounded = integer_reference.shift_rounded(sums, output.exponent)
        mantissas = rounded.clamp(output.lowest, 32767)
        seen = _nothing_seen(mantissas.to(torch.int16))
        if sums.numel():
            seen.integers[0], seen.integers[1] = int((mantissas != rounded).sum()), int(mantissas.abs().max())
    if sums.numel():
        seen.integers[2] = int(sums.abs().max())
    return seen
