"""A contraction of int16 mantissas: one call of the C++ library forward, and one backward.

They compute what `mantissas.current_mantissas`, `integer`'s products, `mantissas.values` and `mantissas.sums` do, bit
for bit, with the same observations. Results are DFP-16's chains in fp32, or exact sums, each written under the exponent
of its entry in a table, which the library reads there. Mantissas that were kept of a tensor are compared with it in the
same call, before they are used.
"""

import math
from array import array
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
from lowp.kernels.int16.integer_reference import PRODUCTS, ConvolutionShape
from lowp.kernels.int16.integer_run import check_status, observers
from lowp.kernels.int16.mantissas import Mantissas, has_mantissas, readable
from lowp.kernels.tracing import is_watched, mode_count

# of the bias; of an operand, or kept mantissas that are not its own, or an entry's beginning
_NOT_FINITE, _UNFIT = 3, 4
_KEPT, _KNOWN = 1, 2  # how mantissas are found
_MADE = (0,) * 3  # no mantissas, no exponent, and that both are made
_CPU = torch.device("cpu")
_OF_FORWARD, _OF_BACKWARD = Struct("12q").pack, Struct("16q").pack  # what the library is given

Target = tuple[object, int]  # a table, as the library is given it, and an entry; of chains None, and any
Known = tuple[Mantissas, bool]  # mantissas, and whether they are only kept, and have to be compared with their tensor

Lie = tuple[tuple[int, ...], tuple[int, ...]]  # a shape and its strides


class MatrixProduct(NamedTuple):
    """A product of matrices left [..., m, k] and right [..., k, n] as they lie; the result is contiguous.

    At most two dimensions come before the last two, of which one has a stride of 1. `is_turned`: of the operands in the
    order of `PRODUCTS` the second is the left one.
    """

    left: Lie
    right: Lie
    is_turned: bool

    @property
    def numbers(self) -> list[int]:
        """The members of struct lowp_matrices of cpu/layer.cpp."""
        (*batch, m, k), n = self.left[0], self.right[0][-1]
        (*left, of_rows, left_depth), (*right, right_depth, of_columns) = self.left[1], self.right[1]
        if k == 1:  # any stride serves, and this one lets the other be any
            left_depth = right_depth = 1
        apart, none = [1] * (2 - len(batch)), [0] * (2 - len(batch))
        of_left, of_right = (*none, *left, of_rows, left_depth), (*none, *right, of_columns, right_depth)
        return [*apart, *batch, m, n, k, *of_left, *of_right, m * n * math.prod(batch[1:]), m * n, n, self.is_turned]


class MatrixProducts(NamedTuple):
    """The shape of a result, and the products that it and the gradients of both operands are."""

    result: tuple[int, ...]
    products: tuple[MatrixProduct, MatrixProduct, MatrixProduct]


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
    """The plan of a layer: what is the same for all calls with tensors of these shapes, which lie dense.

    `casts` are those of x, weight and the gradient of the result; `output` that of results which are written.
    """

    def __init__(
        self, first: Lie, second: Lie, shape: ConvolutionShape | MatrixProducts, casts: Sequence[Cast],
        output: Cast | None,
    ) -> None:  # fmt: skip
        if isinstance(shape, MatrixProducts):
            self.result, features = shape.result, shape.products[0].right[0][-1]
            products, geometry = array("q", [number for one in shape.products for number in one.numbers]), None
        else:
            self.result, features, products, geometry = shape.output, second[0][0], None, shape.numbers
        self._operands = first, second
        self._of_result, *self._of_gradients = map(_layout, (self.result, first[0], second[0], (features,)))
        self.is_written = output is not None
        own, rounding = [own_bounds(cast) for cast in casts], None if output is None else mantissa_block(output)
        sizes = math.prod(first[0]), math.prod(second[0]), math.prod(self.result)
        self._block = layer_block(own, rounding, geometry, products, sizes)
        library = cpu.loaded()
        self._forward = library.lowp_layer_forward.unguarded  # type: ignore[attr-defined]
        self._backward = library.lowp_layer_backward.unguarded  # type: ignore[attr-defined]

    @staticmethod
    def is_possible(shape: ConvolutionShape) -> bool:
        """Whether there is a plan of convolutions of a shape."""
        return 0 not in shape.output and max(map(shape.depth, PRODUCTS)) <= LARGEST_DEPTH

    def forward(
        self, memory: Sequence[int], known: Sequence[Known | None], target: Target, keeps: bool
    ) -> tuple[LayerResult, Tensor | None, Tensor | None, Tensor] | None:
        """Return the result, and if `keeps` what `backward` reads: the mantissas of x and weight, and the exponents.

        `memory`: of x, weight and bias, as `memory_of` gives it. `known`: the mantissas of x and of weight, which lie
        as they; None to make them. None where it is left to others: operands and biases that are not finite, mantissas
        that are not those of their tensor, a first write at an entry, and while products are observed.
        """
        if observers or (mode_count() and is_watched()):  # products are told one by one
            return None
        empty, table, entry = torch.empty_strided, *target
        exponents = empty((3 if self.is_written else 2,), (1,), dtype=torch.int32, device=_CPU)
        y, payload = empty(*self._of_result, dtype=torch.float32, device=_CPU), None
        if self.is_written:
            payload = empty(*self._of_result, dtype=torch.int16, device=_CPU)
        given: list[int] = [entry, 0 if payload is None else payload.data_ptr(), y.data_ptr()]
        saved: list[Tensor | None] = []
        for at, mantissas, lie in zip(memory, known, self._operands, strict=False):
            if mantissas is not None:
                given += (at, *cpu.addresses_of(mantissas[0]), _KEPT if mantissas[1] else _KNOWN)
                saved.append(mantissas[0].payload)
                continue
            own = empty(*lie, dtype=torch.int16, device=_CPU) if keeps else None
            given += (at, 0 if own is None else own.data_ptr(), *_MADE[1:])
            saved.append(own)
        given.append(memory[2] if len(memory) > 2 else 0)
        kernel = cpu.asked()
        call = kernel.encode(), self._block, table, _OF_FORWARD(*given), torch.get_num_threads()
        status = self._forward(*call, exponents.data_ptr())
        if status in (_NOT_FINITE, _UNFIT):
            return None
        if status:
            check_status(status, kernel)
        return LayerResult(y, payload, exponents[2] if self.is_written else None), *saved, exponents  # type: ignore[return-value]

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
        if observers or (mode_count() and is_watched()):  # products are told one by one
            return None
        memory: list[int] | None = [0]
        if known is None:
            if (memory := memory_of(gradient)) is None:
                memory = memory_of(gradient := readable(gradient))
        elif known[1]:
            memory = memory_of(gradient)
        if memory is None:
            return None
        *operands, exponents = saved
        for index, (x, lie) in enumerate(zip(operands, self._operands, strict=True)):
            if x.stride() != lie[1]:  # hooks may have laid them out otherwise
                operands[index] = torch.empty_strided(*lie, dtype=x.dtype, device=_CPU).copy_(x)
        where = _MADE if known is None else (*cpu.addresses_of(known[0]), _KEPT if known[1] else _KNOWN)
        given = [*memory, *where, *cpu.addresses_of((*operands, exponents.contiguous()))]
        made, places = self._memory_of_gradients(entries)
        given += places
        told, kernel = torch.empty(3, dtype=torch.int32, device=_CPU), cpu.asked()
        call = kernel.encode(), self._block, table, _OF_BACKWARD(*given), torch.get_num_threads()
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

    def _memory_of_gradients(
        self, entries: Sequence[int | None]
    ) -> tuple[list[tuple[Tensor, Tensor | None] | None], list[int]]:
        """Return values, and int16 where it is written, of each gradient with an entry; and entries and addresses."""
        made: list[tuple[Tensor, Tensor | None] | None] = []
        given: list[int] = []
        for entry, layout in zip(entries, self._of_gradients, strict=True):
            if entry is None:
                made.append(None)
                given += (0,) * 3
                continue
            values, payload = torch.empty_strided(*layout, dtype=torch.float32, device=_CPU), None
            if self.is_written:
                payload = torch.empty_strided(*layout, dtype=torch.int16, device=_CPU)
            made.append((values, payload))
            given += (entry, 0 if payload is None else payload.data_ptr(), values.data_ptr())
        return made, given


def _layout(shape: Sequence[int]) -> Lie:
    """Return a shape, and the strides of a contiguous tensor of it."""
    return tuple(shape), torch.empty(tuple(shape), device="meta").stride()
