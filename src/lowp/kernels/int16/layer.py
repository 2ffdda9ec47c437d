"""A linear layer or a convolution of int16 mantissas: one call of the C++ library forward, and one backward.

They compute what `mantissas.current_mantissas`, `integer`'s products, `mantissas.values` and `mantissas.sums` do, bit
for bit, with the same observations. Results are DFP-16's chains in fp32, or exact sums, each written under the exponent
of its entry in a table, which the library reads there. Mantissas that were kept of a tensor are compared with it in the
same call, before they are used.
"""

import math
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.cpu.abi import layer_block
from lowp.kernels.int16.cpu_int16 import mantissa_block, memory_of, own_bounds
from lowp.kernels.int16.integer import LARGEST_DEPTH
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import PRODUCTS, check_status, observers
from lowp.kernels.int16.mantissas import Mantissas, has_mantissas, readable

_NOT_FINITE, _UNFIT = (
    3,
    4,
)  # of the bias; of an operand, or kept mantissas that are not its own, or an entry's beginning
_KEPT, _KNOWN = 1, 2  # how mantissas are found
_MADE = 0, 0, 0  # no mantissas, no exponent, and that both are made
_CPU = torch.device("cpu")
_OF_FORWARD, _OF_BACKWARD = Struct("10q").pack, Struct("16q").pack  # what the library is given

Target = tuple[object, int]  # a table, as the library is given it, and an entry; of chains None, and any
Known = tuple[Mantissas, bool]  # mantissas, and whether they are only kept, and have to be compared with their tensor


class LayerResult(NamedTuple):
    """A result: its values in fp32, and of a written one its mantissas and their exponent."""

    values: Tensor
    payload: Tensor | None
    exponent: Tensor | None


def serves(to: Cast | None) -> bool:
    """Whether a cast rounds operands as a layer does: to int16 under the exponent of their maximum, to nearest."""
    if to is None or not has_mantissas(to) or to.is_stochastic:
        return False
    return to.scaling is None or to.scaling.exponent is None


class LayerPlan:
    """The plan of a layer: what is the same for all calls with tensors of these shapes.

    `casts` are those of x, weight and the gradient of the result; `output` that of results which are written.
    """

    def __init__(
        self, first: Sequence[int], second: Sequence[int], shape: ConvolutionShape | None, casts: Sequence[Cast],
        output: Cast | None,
    ) -> None:  # fmt: skip
        self.result = (*first[:-1], second[0]) if shape is None else shape.output
        self._of_result, *self._operands = map(_layout, (self.result, first, second, second[:1]))
        self.is_written = output is not None
        x, weight, y = math.prod(first), math.prod(second), math.prod(self.result)
        sizes = (x // first[-1], second[0], first[-1]) if shape is None else (x, weight, y)
        own, rounding = [own_bounds(cast) for cast in casts], None if output is None else mantissa_block(output)
        self._block = layer_block(own, rounding, None if shape is None else shape.numbers, sizes)
        library = cpu.loaded()
        self._forward = library.lowp_layer_forward.unguarded  # type: ignore[attr-defined]
        self._backward = library.lowp_layer_backward.unguarded  # type: ignore[attr-defined]

    @staticmethod
    def is_possible(first: Sequence[int], second: Sequence[int], shape: ConvolutionShape | None) -> bool:
        """Whether there is a plan of layers of these shapes."""
        if 0 in (*first, *second) or (shape is not None and 0 in shape.output):
            return False
        return shape is None or max(map(shape.depth, PRODUCTS)) <= LARGEST_DEPTH

    def forward(
        self, memory: Sequence[int], known: Known | None, target: Target, keeps: bool
    ) -> tuple[LayerResult, Tensor | None, Tensor | None, Tensor] | None:
        """Return the result, and if `keeps` what `backward` reads: the mantissas of x and weight, and the exponents.

        `memory`: of x, weight and bias, as `memory_of` gives it. `known`: the mantissas of x; None to make them. None
        where it is left to others: operands and biases that are not finite, mantissas that are not those of x, a first
        write at an entry, and while products are observed.
        """
        if observers:
            return None
        x, weight, *bias = memory
        empty, first, second, payload = torch.empty_strided, None if known is None else known[0].payload, None, None
        if keeps:
            first = empty(*self._operands[0], dtype=torch.int16, device=_CPU) if first is None else first
            second = empty(*self._operands[1], dtype=torch.int16, device=_CPU)
        exponents = torch.empty(3 if self.is_written else 2, dtype=torch.int32, device=_CPU)
        y = empty(*self._of_result, dtype=torch.float32, device=_CPU)
        if self.is_written:
            payload = empty(*self._of_result, dtype=torch.int16, device=_CPU)
        table, entry = target
        where = _MADE if known is None else (*cpu.addresses_of(known[0]), _KEPT if known[1] else _KNOWN)
        given = _OF_FORWARD(
            entry, 0 if payload is None else payload.data_ptr(), y.data_ptr(),
            x, 0 if first is None else first.data_ptr(), *where[1:],
            weight, 0 if second is None else second.data_ptr(), bias[0] if bias else 0,
        )  # fmt: skip
        kernel = cpu.asked()
        call = kernel.encode() or None, self._block, table, given, torch.get_num_threads(), exponents.data_ptr()
        status = self._forward(*call)
        if status in (_NOT_FINITE, _UNFIT):
            return None
        if status:
            check_status(status, kernel)
        return LayerResult(y, payload, exponents[2] if self.is_written else None), first, second, exponents

    def backward(
        self,
        gradient: Tensor,
        known: Known | None,
        saved: Sequence[Tensor],
        table: object,
        entries: Sequence[int | None],
    ) -> list[LayerResult | None] | None:
        """Return the gradients of x, weight and bias, from what `forward` has kept; None for one without an entry.

        `known`: the mantissas of the gradient of the result; None to make them, from one of any layout. Chains have no
        table, and any entry. None where they are left to others, as in `forward`.
        """
        if observers:
            return None
        memory: list[int] | None = [0]
        if known is None:
            if not gradient.is_contiguous() or (memory := memory_of(gradient)) is None:
                memory = memory_of(gradient := readable(gradient))
        elif known[1]:
            memory = memory_of(gradient)
        if memory is None:
            return None
        first, second, exponents = map(Tensor.contiguous, saved)  # hooks may have laid them out otherwise
        where = _MADE if known is None else (*cpu.addresses_of(known[0]), _KEPT if known[1] else _KNOWN)
        given = [*memory, *where, *cpu.addresses_of((first, second, exponents))]
        made: list[tuple[Tensor, Tensor | None] | None] = []
        for entry, layout in zip(entries, self._operands, strict=True):
            if entry is None:
                made.append(None)
                given += (0, 0, 0)
                continue
            values, payload = torch.empty_strided(*layout, dtype=torch.float32, device=_CPU), None
            if self.is_written:
                payload = torch.empty_strided(*layout, dtype=torch.int16, device=_CPU)
            made.append((values, payload))
            given += (entry, 0 if payload is None else payload.data_ptr(), values.data_ptr())
        told, kernel = torch.empty(3, dtype=torch.int32, device=_CPU), cpu.asked()
        call = kernel.encode() or None, self._block, table, _OF_BACKWARD(*given), torch.get_num_threads()
        status = self._backward(*call, told.data_ptr())
        if status == _UNFIT:
            return None
        if status:
            check_status(status, kernel)
        under = told.unbind() if self.is_written else (None, None, None)
        found: list[LayerResult | None] = []
        for one, exponent in zip(made, under, strict=True):
            found.append(None if one is None else LayerResult(*one, exponent))
        return found


_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _layout(shape: Sequence[int]) -> _Layout:
    """Return a shape, and the strides of a contiguous tensor of it."""
    return tuple(shape), torch.empty(tuple(shape), device="meta").stride()
